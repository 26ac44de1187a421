"""What Kauldron's documentation teaches and its wheel does not hold."""

from importlib import metadata
import subprocess
import sys

from kauldron import kd
from kauldron import konfig
from kauldron import kontext
import pytest

with konfig.imports():
  from kauldron import kd as lazy_kd


@pytest.mark.parametrize("path", ["data.tf", "contrib.nn"])
def test_missing_module(path):
  with pytest.raises(KeyError, match="has no attributes/key"):
    kontext.get_by_path(kd, path)
    pytest.fail("mended upstream: remove the caveat after own_experiment")


def test_contrib_must_be_imported():
  code = ("from kauldron import kd; import kauldron.contrib; "
          "print(hasattr(kd.contrib, 'losses')); "
          "import kauldron.contrib.losses; print(kd.contrib.losses)")
  process = subprocess.run([sys.executable, "-c", code], check=True,
                           capture_output=True, text=True)
  before, after = process.stdout.splitlines()
  assert before == "False", (
      "mended upstream: remove the caveat after own_experiment")
  assert "kauldron.contrib.losses" in after


def test_most_of_contrib_data():
  from kauldron.contrib import data
  missing = []
  names = [name for name in dir(data) if not name.startswith("_")]
  for name in names:
    try:
      getattr(data, name)
    except ImportError:
      missing.append(name)
  assert len(missing) > len(names) / 2, (
      "mended upstream: remove the caveat after own_experiment")


def test_eval_only():
  cfg = lazy_kd.train.Trainer.eval_only()
  with pytest.raises(AttributeError, match="has no attribute 'tf'"):
    konfig.resolve(cfg)
    pytest.fail("mended upstream: remove the caveat after own_experiment")


def test_command():
  (command,) = metadata.entry_points(group="console_scripts", name="kauldron")
  code = f"from {command.module} import {command.attr} as main; main()"
  process = subprocess.run([sys.executable, "-c", code], check=False,
                           capture_output=True, text=True)
  assert "not callable" in process.stderr, (
      "mended upstream: remove the caveat in section project")
