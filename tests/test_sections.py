"""Each section passes, alone and in any order, and the file can be pasted."""

import ast
import json
import math
import re
import subprocess
import sys

import kauldron_tour
import numpy as np
import pytest

from conftest import AS_THE_TOUR
from conftest import ROOT
from conftest import SCRIPT
from conftest import outside
from conftest import train_project

SOURCE = SCRIPT.read_text()
TREE = ast.parse(SOURCE)
FUNCTIONS = {node.name: node for node in TREE.body
             if isinstance(node, ast.FunctionDef)}
NAMES = list(kauldron_tour.SECTIONS)
each_section = pytest.mark.parametrize("name", NAMES)


@each_section
def test_section(tour, name):
  tour.run_section(tour.SECTIONS[name])
  result = tour.RESULTS[name]
  assert result["status"] == "PASS", result
  assert result["facts"], "it shows nothing"
  assert json.loads(json.dumps(result["facts"])) == result["facts"]


# What `agree` must take for equal, and what it must not.
EQUAL = {
    "same floats": (0.1, 0.1),
    "rounding": (np.float32(0.1), 0.1),
    "arrays": (np.ones(3), np.float32([1, 1, 1])),
    "tuples": ((1, 2), (1, 2)),
}
UNEQUAL = {
    "other float": (0.1, 0.1001),
    "array of the same numbers in another shape": (np.ones((3, 1)), np.ones(3)),
    "number for an array": (1.0, np.ones(3)),
    "not a number": (float("nan"), float("nan")),
    "one element": (np.array([1.0, 2.0]), np.array([1.0, 2.1])),
    "int and float": (10, 10.001),
    "other text": ("a", "b"),
    "shorter tuple": ((1,), (1, 2)),
}


@pytest.mark.parametrize("found, expected", EQUAL.values(), ids=EQUAL)
def test_agree_takes_what_is_equal(tour, found, expected):
  tour.agree("x", found=found, expected=expected)


@pytest.mark.parametrize("found, expected", UNEQUAL.values(), ids=UNEQUAL)
def test_agree_refuses_what_is_not(tour, found, expected):
  with pytest.raises(AssertionError):
    tour.agree("x", found=found, expected=expected)


def test_agree_without_tolerance_refuses_rounding(tour):
  with pytest.raises(AssertionError):
    tour.agree("x", rtol=0, found=0.1, expected=0.1 * (1 + 1e-7))


def differing(facts, others):
  """Returns the labels whose values differ, floats by more than 1e-3."""
  def is_same(one, other):
    if isinstance(one, float) and isinstance(other, float):
      return math.isclose(one, other, rel_tol=1e-3)
    workdir = r"/\S*/kauldron_tour_\w+/\w+"  # Another one in each process.
    return re.sub(workdir, "", str(one)) == re.sub(workdir, "", str(other))

  return [label for label in facts | others
          if not is_same(facts.get(label), others.get(label))]


# Each job is a list of sections, which a new process runs one after the other.
DRIVER = """if True:
  import json, os, sys
  sys.path.insert(0, sys.argv[1])
  import kauldron.train
  import kauldron.data.py
  for names in json.loads(sys.argv[2]):
    if os.fork():
      os.wait()
      continue
    import kauldron_tour as tour  # This starts JAX.
    for name in names:
      tour.run_section(tour.SECTIONS[name])
      result = tour.RESULTS[name] | {"name": name, "names": names}
      print("RESULT", json.dumps(result), flush=True)
    os._exit(0)
"""


def results_of(jobs, folder):
  """Returns the results of all sections, in the order in which they ran."""
  process = subprocess.run(
      [sys.executable, "-c", DRIVER, ROOT, json.dumps(jobs)],
      env=outside(folder) | AS_THE_TOUR | {"JAX_NUM_CPU_DEVICES": "2"},
      capture_output=True, text=True, check=False)
  lines = re.findall("^RESULT (.*)$", process.stdout, re.MULTILINE)
  assert len(lines) == sum(map(len, jobs)), process
  return map(json.loads, lines)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_alone_and_twice_in_a_process(whole_tour, tmp_path, part):
  jobs = [[name, name] for name in NAMES[part::2]]
  _assert_same_as_the_script(results_of(jobs, tmp_path), whole_tour)


@pytest.mark.slow
def test_backwards_in_a_process(whole_tour, tmp_path):
  _assert_same_as_the_script(results_of([NAMES[::-1]], tmp_path), whole_tour)


def _assert_same_as_the_script(results, whole_tour):
  differ = {}
  for result in results:
    name = result["name"]
    assert result["status"] == "PASS", result
    as_script = whole_tour[1]["sections"][name]
    differ[name] = differing(result["facts"], as_script["facts"])
  assert {name: labels for name, labels in differ.items() if labels} == {}


# What protects whoever reads or pastes the file.


@each_section
def test_section_asserts_something(name):
  words = ast.unparse(FUNCTIONS[name])
  assert re.search(r"\bassert |\bagree\(|\braises\(|np\.testing\.", words)


@each_section
def test_heading_is_the_title(name):
  before = SOURCE[:SOURCE.index(f"\ndef {name}():")]
  headings = re.findall("^# ## (.*)$", before, re.MULTILINE)
  assert headings[-1] == kauldron_tour.SECTIONS[name].title


def test_titles_are_unique_and_short():
  titles = [function.title for function in kauldron_tour.SECTIONS.values()]
  assert len(set(titles)) == len(titles)
  assert max(map(len, titles)) <= 60


def test_it_can_be_pasted():
  names = {node.id for node in ast.walk(TREE) if isinstance(node, ast.Name)}
  assert not names & {"__file__", "input"}
  assert not [node for node in TREE.body
              if getattr(node, "module", "") == "__future__"]
  cells = SOURCE.split("\n# %%")[1:]
  code = [cell for cell in cells if not cell.startswith(" [markdown]")]
  for cell in code[1:]:  # The first one has the docstring.
    last = ast.parse(f"#{cell}").body[-1]
    assert not (isinstance(last, ast.Expr)
                and isinstance(last.value, ast.Constant)), cell


def cells_of(name):
  """Returns the code cells below a section's heading, as text."""
  title = kauldron_tour.SECTIONS[name].title
  _, _, after = SOURCE.partition(f"\n# ## {title}\n")
  cells = re.split(r"\n# ##? |\n# %% The command", after)[0].split("\n# %%")
  return [f"#{cell}" for cell in cells[1:]
          if not cell.startswith(" [markdown]")]


@pytest.mark.slow
def test_last_section_copied_out_runs(tmp_path):
  """Imports, the cells that all need, and its own; no other section."""
  cells = [f"#{cell}" for cell in SOURCE.split("\n# %%")[1:]]
  shared = [cell for cell in cells if re.match(
      r"# How a section runs|# Setup|#\nwith konfig\.imports\(\)"
      r"|#\nfrom kauldron import ktyping"
      r"|# Importing the trainer"
      r"|#\ndef read_events", cell)]
  shared = [cell.partition("\n\n\n@section")[0] if "@section(\"" in cell
            and not cell.startswith("# How") else cell for cell in shared]
  copied = "\n\n".join(
      [*shared, *cells_of(NAMES[-1]), "print(list(RESULTS.items()))\n"])
  process = subprocess.run(  # As in a notebook, the file has no name.
      [sys.executable], input=copied, cwd=tmp_path, env=outside(tmp_path),
      capture_output=True, text=True, check=False)
  assert process.returncode == 0, process
  assert process.stdout.count("\nPASS ") == 1
  assert f"[('{NAMES[-1]}'," in process.stdout


@pytest.mark.slow
def test_last_section_makes_a_project(tmp_path):
  """Its two cells become two files as the text says, and `main` trains them."""
  title = kauldron_tour.SECTIONS[NAMES[-1]].title
  _, _, text = SOURCE.partition(f"\n# ## {title}\n")
  prose, parts, config_prose, config, _ = text.split("\n# %%")[:5]

  def with_lines_above(prose, cell):
    """Returns a cell below the code that the text quotes."""
    quoted = re.findall("^#(?:     (.*))?$", prose, re.MULTILINE)
    return "\n".join([*quoted, cell])
  config = with_lines_above(config_prose, config)
  for name, new in {"get_signal_config": "get_config", "lazy_kd": "kd",
                    "lazy_optax": "optax", "lazy_tour": "project"}.items():
    assert name in config
    config = config.replace(name, new)
  cfg = train_project(
      tmp_path, with_lines_above(prose, parts), config,
      "--cfg=configs/my_experiment.py", "--cfg.num_train_steps=2")
  assert cfg["model"]["__qualname__"] == "project:SignalModel"
  assert cfg["schedules"]["learning_rate"]["decay_steps"] == 2
  assert (tmp_path / "run" / "train_complete.txt").exists()
