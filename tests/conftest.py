"""What all tests share: CPU only, and the tour as a module."""

import os
import pathlib
import subprocess
import sys

import pytest

# Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("kauldron_tour")

import kauldron_tour


@pytest.fixture
def tour(monkeypatch):
  """The tour as a module, with nothing recorded yet."""
  monkeypatch.setattr(kauldron_tour, "RESULTS", {})
  return kauldron_tour


@pytest.fixture
def script(tmp_path):
  """Runs the tour as a script, in an empty folder and with an empty TMPDIR."""
  temporary = tmp_path / "tmp"
  temporary.mkdir()

  def run(*arguments, python=(), path=ROOT / "kauldron_tour.py", **environ):
    process = subprocess.run(
        [sys.executable, *python, path, *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"TMPDIR": str(temporary)} | environ)
    process.left_behind = list(temporary.iterdir())
    return process

  return run
