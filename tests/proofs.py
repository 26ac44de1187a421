"""Which checks of the tour are needed: those that some fault needs.

A check is an `assert`, an `agree(...)`, a `with raises(...)` or a comparison of
`np.testing`. Each section runs under each of its cases in test_sabotage.py, and
a check that fails is noted instead of ending the section. A check is needed if
in some case it is the only one to fail: if it were deleted, nobody would notice
that fault.

  python tests/proofs.py                      # all sections: some minutes
  python tests/proofs.py --section key_paths
  python tests/proofs.py --all                # each case, all sections: hours

The first two print, for each case, the lines of the checks that fail, and the
error that has ended the section, if there was one. The exit status is 0 if all
checks are needed and each case fails its section, else 1. With --all there is a
line a case: the sections that fail. It should be one, or those that claim the
same.
"""

import argparse
import ast
import contextlib
import copy
import io
import pathlib
import signal
import sys
import textwrap
import time

import conftest  # noqa: F401  The settings of the tests come first.
import pytest
import test_sabotage

import kauldron_tour as tour

SOURCE = ast.parse(pathlib.Path(tour.__file__).read_text(encoding="utf-8"))
TIME_LIMIT = 30  # Seconds; under some faults a section would wait for ever.
ELSEWHERE = 0  # Stands for the line of an error outside the checks.


class OutOfTime(BaseException):
  """Ends what runs too long; no test and no section catches it."""


@contextlib.contextmanager
def time_limit(seconds):
  """Raises OutOfTime in a block that takes longer."""
  def out_of_time(*_):
    raise OutOfTime(f"after {seconds} seconds")

  signal.signal(signal.SIGALRM, out_of_time)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)


def is_check(node):
  """Says whether a statement does nothing but compare."""
  if isinstance(node, ast.Assert):
    return True
  if isinstance(node, ast.With):
    call = node.items[0].context_expr
    return ast.unparse(call).startswith(("raises(", "pytest.raises("))
  return isinstance(node, ast.Expr) and ast.unparse(node).startswith(
      ("agree(", "np.testing."))


class Noting(ast.NodeTransformer):
  """Puts each check into `with noting(line):`; collects line -> source."""

  def __init__(self):
    self.checks = {}

  def visit(self, node):
    self.generic_visit(node)
    if not is_check(node):
      return node
    source = ast.unparse(node).splitlines()[0]
    self.checks[node.lineno] = textwrap.shorten(source, 66, placeholder=" ...")
    block = ast.parse(f"with noting({node.lineno}):\n  pass").body[0]
    block.body = [node]
    return ast.copy_location(block, node)


class Section:
  """A section whose checks are noted when they fail."""

  def __init__(self, name):
    (section,) = [node for node in SOURCE.body
                  if isinstance(node, ast.FunctionDef) and node.name == name]
    section = copy.deepcopy(section)
    section.decorator_list = []
    transformer = Noting()
    transformer.visit(section)
    self.checks = transformer.checks
    tree = ast.fix_missing_locations(ast.Module([section], []))
    code = compile(tree, tour.__file__, "exec")
    defined = {}
    exec(code, vars(tour), defined)
    self.function = defined[name]

  def failures(self):
    """Runs; returns the lines that failed, and the error that ended it."""
    failed = set()
    error = None

    @contextlib.contextmanager
    def noting(line):
      try:
        yield
      except Exception:  # Whatever ends a check, it has failed.
        failed.add(line)

    tour.noting = noting
    try:
      with contextlib.redirect_stdout(io.StringIO()), time_limit(TIME_LIMIT):
        self.function()
    except (Exception, OutOfTime) as problem:
      failed.add(ELSEWHERE)
      error = problem
    return failed, error


NO_FAULT = test_sabotage.Case("", AssertionError, lambda *_: None)


def run(section, case):
  """Returns which lines of a section fail under a case, and the error."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    # After `with raises(...) as caught` has failed, `caught.exception` is this.
    monkeypatch.setattr(type(tour.raises(ValueError, "")), "exception",
                        AssertionError("nothing was raised"), raising=False)
    with test_sabotage.broken(case, monkeypatch):
      return section.failures()


def prove(name, cases):
  """Prints a section's cases and checks; returns the number of problems."""
  section = Section(name)
  print(f"\n{name}: {len(cases)} cases, {len(section.checks)} checks")
  problems = 0
  failed, error = run(section, NO_FAULT)
  if failed:
    print(f"  it fails without a fault: {failed} {error}")
    problems += 1
  needed = set()
  for case, broken in cases.items():
    start = time.perf_counter()
    failed, error = run(section, broken)
    lines = " ".join(str(line) for line in sorted(failed - {ELSEWHERE}))
    seconds = f"{time.perf_counter() - start:.1f} s"
    end = f"{type(error).__name__}: {error}" if error else ""
    text = f"{case}, {seconds}: {lines} {end}"
    print(f"  {textwrap.shorten(text, 150, placeholder=' ...')}", flush=True)
    problems += not failed
    if len(failed) == 1:
      needed |= failed
  for line, source in section.checks.items():
    if line not in needed:
      print(f"  {line} is not needed: {source}")
      problems += 1
  return problems


def show_other_sections(cases):
  """Prints, for each case, all the sections that fail."""
  sections = {name: Section(name) for name in tour.SECTIONS}
  # Without a fault first: what is imported under one may stay broken.
  failing = [name for name, section in sections.items()
             if any(run(section, NO_FAULT))]
  if failing:
    sys.exit(f"These fail without a fault: {' '.join(failing)}")
  for case, broken in cases.items():
    failing = [name for name, section in sections.items()
               if any(run(section, broken))]
    print(f"{case}: {' '.join(failing)}", flush=True)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--section", nargs="+", default=list(tour.SECTIONS))
  parser.add_argument("--all", action="store_true")
  options = parser.parse_args()
  cases = {name: case for name, case in test_sabotage.CASES.items()
           if case.section in options.section}
  if options.all:
    show_other_sections(cases)
    return 0
  problems = 0
  for section in options.section:
    problems += prove(section, {
        name: case for name, case in cases.items() if case.section == section})
  print(f"\n{problems} problems")
  return int(problems > 0)


if __name__ == "__main__":
  sys.exit(main())
