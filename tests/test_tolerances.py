"""No tolerance is more than ten times as wide as the runs need.

With `-s` the test prints, for each comparison of floats, what is allowed and
the largest error that was seen with the seeds 0 and 1.
"""

import ast
import collections
import copy
import pathlib
import sys

import jax
import numpy as np
import pytest

import kauldron_tour as tour

SEEDS = 0, 1
ROUNDING = 3e-6  # What sums of float32 may be off by on another machine.


class Measuring(ast.NodeTransformer):
  """Puts `measure(...)` before each `assert x < 1e-5`, or another small one."""

  def visit_Assert(self, node):
    match node.test:
      case ast.Compare(left, [ast.Lt()], [ast.Constant(float(bound))]) if (
          bound < 1e-3):
        name = ast.unparse(left)
        call = f"measure({name!r}, {bound}, {name})"
        return [*ast.parse(call).body, node]
    return node


def measuring(name):
  """Returns a section that says to `measure` what it allows and sees."""
  source = pathlib.Path(tour.__file__).read_text(encoding="utf-8")
  (section,) = [node for node in ast.parse(source).body
                if isinstance(node, ast.FunctionDef) and node.name == name]
  section = Measuring().visit(copy.deepcopy(section))
  section.decorator_list = []
  module = ast.fix_missing_locations(ast.Module([section], []))
  defined = {}
  exec(compile(module, tour.__file__, "exec"), vars(tour), defined)
  return defined[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", tour.SECTIONS)
def test_tolerance(name, monkeypatch):
  allowed = {}
  seen = collections.defaultdict(float)

  def measure(label, tolerance, error):
    allowed[label] = float(tolerance)
    seen[label] = max(seen[label], float(error))

  allclose = np.testing.assert_allclose

  def measured(actual, desired, rtol=1e-7, atol=0, err_msg="", **kwargs):
    line = sys._getframe(1).f_lineno
    largest = np.abs(np.asarray(desired)).max() or 1.0
    error = np.abs(np.asarray(actual) - np.asarray(desired)).max()
    measure(err_msg or f"line {line}", rtol + atol / largest, error / largest)
    allclose(actual, desired, rtol, atol, err_msg=err_msg, **kwargs)

  monkeypatch.setattr(np.testing, "assert_allclose", measured)
  monkeypatch.setattr(tour, "measure", measure, raising=False)
  section = measuring(name)
  for seed in SEEDS:
    monkeypatch.setattr(tour, "SEED", seed)
    jax.clear_caches()
    section()
  for label, tolerance in allowed.items():
    print(f"{name}: {label}: {tolerance:.1e} allowed, {seen[label]:.1e} seen")
  wide = {label: (tolerance, seen[label])
          for label, tolerance in allowed.items()
          if tolerance > max(10 * seen[label], ROUNDING) * 1.001}
  assert wide == {}
