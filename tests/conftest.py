"""What all tests share: CPU only, and the tour as a module."""

import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

# Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
CACHE = tempfile.TemporaryDirectory(prefix="compiled_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", CACHE.name)
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("kauldron_tour")

import kauldron_tour


def pytest_configure(config):
  """Registers the marker by which `make quick` leaves out what takes long."""
  config.addinivalue_line(
      "markers", "slow: runs the tour as a script, or a section once more")


def pytest_unconfigure():
  CACHE.cleanup()
  gc.freeze()  # Taking everything apart would cost two seconds.


@pytest.fixture
def tour(monkeypatch):
  """The tour as a module, with nothing recorded yet."""
  monkeypatch.setattr(kauldron_tour, "RESULTS", kauldron_tour.Results())
  return kauldron_tour


def run_tour(folder, *arguments, python=(), path=ROOT / "kauldron_tour.py",
             **environ):
  """Runs the tour as a script in a folder, with an empty TMPDIR below it.

  Returns the finished process, and in `left_behind` what is left in TMPDIR.
  The settings that the tests make for this process are not handed on.
  """
  temporary = folder / "tmp"
  temporary.mkdir(exist_ok=True)
  ours = {name: value for name, value in os.environ.items()
          if not name.startswith(("JAX_", "TF_CPP_", "TQDM_"))}
  process = subprocess.run(
      [sys.executable, *python, path, *arguments], cwd=folder,
      env=ours | {"TMPDIR": str(temporary)} | environ,
      capture_output=True, text=True, check=False)
  process.left_behind = list(temporary.iterdir())
  return process


@pytest.fixture
def script(tmp_path):
  """Runs the tour as a script: `run_tour` in a folder of the test's own."""
  return functools.partial(run_tour, tmp_path)


@pytest.fixture(scope="session")
def whole_tour(tmp_path_factory):
  """The whole tour as a script: the finished process and its report."""
  folder = tmp_path_factory.mktemp("whole")
  process = run_tour(folder, "--strict", "--report", "report.json")
  process.report_path = folder / "report.json"
  return process, json.loads(process.report_path.read_text())
