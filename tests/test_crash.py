"""A training that is killed, a checkpoint that is damaged, Ctrl-C.

The kills are the work of `python tests/test_crash.py FOLDER KILLS`: it imports
Kauldron once and forks before JAX has started, so a kill costs few seconds.
"""

import gc
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import types

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
KILLS = int(os.environ.get("SOAK_KILLS", 4))
STEPS, SAVE_EVERY, SEED = 12, 3, 0


# In the process that forks, and in its children.


def train(folder):
  """Trains, from the newest checkpoint on, and saves what came out."""
  import jax
  import kauldron_tour as tour  # This starts JAX.
  cfg = tour.get_config()
  cfg.train_ds = tour.lazy_kd.data.py.DataSource(
      data_source=tour.lazy_tour.train_examples(), batch_size=tour.BATCH_SIZE,
      shuffle=True, num_workers=0)
  cfg.checkpointer = tour.lazy_kd.ckpts.Checkpointer(
      save_interval_steps=SAVE_EVERY)
  cfg.num_train_steps, cfg.workdir = STEPS, str(folder)
  trainer = tour.konfig.resolve(cfg)
  resumed_from = trainer.checkpointer.latest_step
  state, _ = trainer.train()
  arrays = jax.tree.leaves((state.params, state.opt_state, state.step))
  np.savez(f"{folder}.npz", *arrays,
           resumed_from=-1 if resumed_from is None else resumed_from)


def forked_train(folder):
  """Trains in a child process; returns its number."""
  pid = os.fork()
  if pid:
    return pid
  status = 1
  try:
    train(folder)
    status = 0
  except BaseException:
    traceback.print_exc()
  finally:  # Never back into the code of the parent.
    os._exit(status)


def trained(folder):
  """Trains to the end; returns the arrays, and where it resumed (-1: not)."""
  _, status = os.waitpid(forked_train(folder), 0)
  if status:
    raise RuntimeError(f"training in {folder.name} ended with {status}")
  arrays = dict(np.load(f"{folder}.npz"))
  return int(arrays.pop("resumed_from")), arrays


def is_killed(folder, saving, seconds):
  """Kills a training after so many seconds; returns whether it hit.

  With `saving`, the seconds count from when that checkpoint appears, and only
  a kill before it is complete is a hit.
  """
  pid = forked_train(folder)
  partial = f"checkpoints/ckpt_{saving}.*tmp*"
  while saving is not None and not any(folder.glob(partial)):
    if os.waitpid(pid, os.WNOHANG)[0]:
      return False
    time.sleep(0.001)
  time.sleep(seconds)
  os.kill(pid, signal.SIGSTOP)  # Stop, look, kill: nothing moves meanwhile.
  _, status = os.waitpid(pid, os.WUNTRACED)
  if not os.WIFSTOPPED(status):
    return False
  hit = saving is None or any(folder.glob(partial))
  os.kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
  return hit


def soak(folder, kills):
  """Kills so many trainings, lets each go on, and prints how that ended."""
  import kauldron.train  # noqa: F401
  from jax._src import xla_bridge
  assert not xla_bridge.backends_are_initialized(), "no longer safe to fork"
  _, whole = trained(folder / "first")  # Compiles.
  start = time.perf_counter()
  _, again = trained(folder / "again")
  duration = time.perf_counter() - start
  np.testing.assert_equal(again, whole)

  rng = random.Random(SEED)
  for number in range(kills):
    saving, seconds = None, duration * (number + rng.random()) / kills
    if number % 2:
      saving = rng.randrange(0, STEPS + 1, SAVE_EVERY)
      seconds = 0.1 * rng.random()
    for attempt in range(10):
      workdir = folder / f"killed_{number}_{attempt}"
      if is_killed(workdir, saving, seconds):
        break
      seconds *= 0.7
    else:
      raise RuntimeError(f"no kill hit: {saving=}, {seconds=}")
    left = sorted(path.name for path in workdir.glob("checkpoints/*"))
    resumed_from, arrays = trained(workdir)
    same = arrays.keys() == whole.keys() and all(
        np.array_equal(arrays[key], whole[key]) for key in whole)
    after = "" if saving is None else f" into saving {saving}"
    print(f"kill {number}: {seconds:.3f} s{after}; left {' '.join(left)};"
          f" resumed from {resumed_from};",
          "identical" if same else "DIFFERENT", flush=True)


# The tests.


def test_a_killed_training_ends_as_if_never_killed(tmp_path):
  process = subprocess.run(
      [sys.executable, __file__, tmp_path, str(KILLS)],
      capture_output=True, text=True, check=False,
      env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
                        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                        "TF_CPP_MIN_LOG_LEVEL": "3", "TQDM_DISABLE": "1"})
  print(process.stdout)
  assert process.returncode == 0, process.stderr
  kills = process.stdout.splitlines()
  assert len(kills) == KILLS
  assert all(line.endswith("; identical") for line in kills)
  for line in kills:  # It goes on from the newest checkpoint that is complete.
    complete = re.findall(r" ckpt_(\d+)(?= |;)", line)
    newest = max(map(int, complete), default=-1)
    assert f"resumed from {newest};" in line
  assert sum("-tmp" in line for line in kills) >= KILLS // 2


def halve(path):
  os.truncate(path, path.stat().st_size // 2)


def zero(path):
  path.write_bytes(bytes(path.stat().st_size))


@pytest.fixture
def spilled(monkeypatch):
  """A list of what is raised where nobody can catch it."""
  errors = []
  monkeypatch.setattr(sys, "excepthook", lambda *args: errors.append(args[1]))
  for module, hook in ((threading, "excepthook"), (sys, "unraisablehook")):
    monkeypatch.setattr(
        module, hook, lambda args: errors.append(args.exc_value))
  return errors


@pytest.mark.parametrize("damage", [halve, zero, os.remove])
@pytest.mark.parametrize("pattern", [
    "_METADATA", "manifest.ocdbt", "d/*", "ocdbt.process_0/d/*"])
def test_a_damaged_checkpoint_fails_cleanly(
    tour, monkeypatch, capsys, spilled, pattern, damage):
  """Restoring raises. It does not give a state that is wrong."""
  def copy_and_damage(source, target, **kwargs):
    shutil.copytree(source, target, **kwargs)
    files = pathlib.Path(target).glob(f"checkpoints/ckpt_10/default/{pattern}")
    damage(max(files, key=lambda path: path.stat().st_size))
    return target

  monkeypatch.setattr(
      tour, "shutil", types.SimpleNamespace(copytree=copy_and_damage))
  tour.run_section(tour.rebuilt_run)
  result = tour.RESULTS["rebuilt_run"]
  assert result["status"] == "FAIL"
  assert ".restore(" in result["where"]
  assert result["library"]
  assert re.match(r"\w+: .", result["reason"])
  assert not result["reason"].startswith("AssertionError")

  capsys.readouterr()
  assert tour.print_summary() == 1
  out = capsys.readouterr().out
  assert "\n0 PASS, 0 SKIP, 1 FAIL of 1 sections\n" in out
  assert max(map(len, out.splitlines())) <= 80
  gc.collect()
  # Reads of other arrays may end after the loop that awaited them.
  assert {str(error).partition(":")[0] for error in spilled} <= {
      "Event loop is closed", "Encountered error while reading array index"}


@pytest.mark.parametrize("name", ["real_trainer", "sweep"])
def test_ctrl_c_during_a_training(tmp_path, name):
  from conftest import outside  # Not in a process that forks.
  names = ["mock_modules", name]
  process = subprocess.Popen(
      [sys.executable, "-u", ROOT / "kauldron_tour.py", "--only", *names,
       "--report", "r.json"], cwd=tmp_path, env=outside(tmp_path),
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  for line in process.stdout:
    if re.match(r"\[\d\d\]", line):  # The heading of the second one.
      break
  time.sleep(0.3)
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 130, (out, err)
  assert err == ""
  assert "\n1 PASS, 0 SKIP, 1 FAIL of 2 sections\n" in out
  assert "\nFAIL: interrupted\n" in out
  sections = json.loads((tmp_path / "r.json").read_text())["sections"]
  assert sections["mock_modules"]["status"] == "PASS"
  assert sections[name]["reason"] == "interrupted"
  assert os.listdir(tmp_path / "tmp") == []


if __name__ == "__main__":
  soak(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
