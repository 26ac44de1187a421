"""Every section passes, alone and in any order, with facts for a report."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import kauldron_tour
import pytest

ROOT = pathlib.Path(kauldron_tour.__file__).parent
each_section = pytest.mark.parametrize("name", kauldron_tour.SECTIONS)


@functools.cache
def facts_of(name):
  """Returns the facts of a section that runs in this process, once."""
  return getattr(kauldron_tour, name)()


@each_section
def test_section(name):
  facts = facts_of(name)
  assert facts
  for key, value in facts.items():
    assert re.fullmatch(r"[\w.]+", key), key
    assert isinstance(value, (bool, int, float, str)), (key, value)
  assert json.loads(json.dumps(facts)) == facts


@pytest.mark.slow
@each_section
def test_facts_are_those_of_the_script(whole_tour, name):
  as_script = whole_tour[1]["sections"][name]["facts"]
  assert kauldron_tour.differences(as_script, facts_of(name)) == {}


@pytest.mark.slow
def test_each_section_alone_in_a_process(tmp_path):
  """Forked from a process with Kauldron imported, before JAX has started."""
  driver = tmp_path / "driver.py"
  driver.write_text(f"""if True:
    import os, sys; sys.path.insert(0, {str(ROOT)!r})
    import kauldron.train
    for name in sys.argv[1:]:
      pid = os.fork()
      if not pid:
        import kauldron_tour as tour
        tour.run_section(getattr(tour, name))
        os._exit(tour.RESULTS[name]["status"] != "PASS")
      print(name, os.waitpid(pid, 0)[1], flush=True)
  """)
  process = subprocess.run(
      [sys.executable, driver, *kauldron_tour.SECTIONS],
      env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
      capture_output=True, text=True, check=False)
  ended = re.findall(r"^(\w+) (\d+)$", process.stdout, re.MULTILINE)
  assert ended == [(name, "0") for name in kauldron_tour.SECTIONS], process


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config_tree", "resumed_run"])
def test_twice_in_one_process(tour, name):
  assert getattr(tour, name)() == getattr(tour, name)()
