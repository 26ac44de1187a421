"""Several processes train as one does, and one that dies does not hang them.

Each process has one CPU device. This one has as many devices as there are
processes: two, unless JAX_NUM_CPU_DEVICES says another number. With two, the
parameters are those of one process to the last digit. All of it goes through
the loopback interface.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

from conftest import SCRIPT
import jax
import kauldron_tour
import numpy as np
import process
import pytest

PROCESSES = jax.device_count()
GIVEN_UP_SECONDS = 120  # What takes longer to appear counts as hanging.
# Two numbers have one sum; more are added in another order by other means.
TOLERANCE = 0 if PROCESSES == 2 else 1e-5
NOTICED_SECONDS = process.HEARTBEAT_SECONDS + 20  # That a process is dead.


class Processes:
  """As many processes as this one has devices.

  Their arguments say {port} and {number} for what is found out here.
  """

  def __init__(self, folder, *arguments):
    self.folder = folder
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      port = probe.getsockname()[1]
    environ = {"JAX_NUM_CPU_DEVICES": "1", "no_proxy": "127.0.0.1"}
    self.children = []
    for number in range(PROCESSES):
      texts = [str(argument).format(port=port, number=number)
               for argument in arguments]
      with open(folder / f"{number}.log", "wb") as log:
        self.children.append(subprocess.Popen(
            [sys.executable, *texts], env=os.environ | environ,
            stdout=log, stderr=subprocess.STDOUT))

  def log(self, number):
    """Returns what a process has printed."""
    path = self.folder / f"{number}.log"
    return path.read_text(encoding="utf-8", errors="replace")

  def wait_for(self, path):
    """Waits until a file is there; all processes must be alive until then."""
    end = time.monotonic() + GIVEN_UP_SECONDS
    while not path.exists():
      for number, child in enumerate(self.children):
        assert child.poll() is None or path.exists(), self.log(number)
      assert time.monotonic() < end, f"{path.name} did not come: {self.log(0)}"
      time.sleep(0.1)

  def found(self, job):
    """Returns what each process has found in a job, when all have ended it."""
    paths = [self.folder / f"{job}.{number}.json"
             for number in range(PROCESSES)]
    for path in paths:
      self.wait_for(path)
    return [json.loads(path.read_text()) for path in paths]

  def params(self, job):
    """Returns the parameters that each process had at the end of a job."""
    self.found(job)
    return [dict(np.load(self.folder / f"{job}.{number}.npz"))
            for number in range(PROCESSES)]

  def end(self):
    """Ends the processes that have not ended."""
    for child in self.children:
      child.kill()
      child.wait()


class Alone:
  """This process, which has all devices to itself."""

  def __init__(self, folder):
    self.folder = folder
    self.results = {}

  def run(self, job):
    """Runs a job."""
    self.results[job] = process.JOBS[job](self.folder)

  def found(self, job):
    """Returns what this process has found in a job."""
    return self.results[job][0]

  def params(self, job):
    """Returns the parameters at the end of a job."""
    return self.results[job][1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """The runs of this process."""
  runs = Alone(tmp_path_factory.mktemp("alone"))
  runs.run("plain")
  runs.run("divided")
  runs.run("pygrain")
  shutil.copytree(runs.folder / "plain", runs.folder / "stopped")
  runs.run("resumed")
  return runs


@pytest.fixture(scope="module")
def together(alone, tmp_path_factory):
  """The runs of several processes. `resumed` goes on with one of `alone`."""
  folder = tmp_path_factory.mktemp("together")
  shutil.copytree(alone.folder / "plain", folder / "stopped")
  shutil.copytree(alone.folder / "pygrain", folder / "pygrain_stopped")
  processes = Processes(
      folder, process.__file__, "{number}", PROCESSES, "{port}", folder,
      "plain", "divided", "resumed", "pygrain", "pygrain_resumed", "endless")
  yield processes
  processes.end()


def assert_same(params, expected, tolerance=0):
  """Asserts that two dicts of arrays are equal, or within a tolerance."""
  assert params.keys() == expected.keys()
  for path, array in params.items():
    np.testing.assert_allclose(
        array, expected[path], rtol=0, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("job", ["plain", "divided"])
def test_same_parameters(alone, together, job):
  """Each process ends with the parameters of one process with all devices."""
  for found in together.found(job):
    assert found["processes"] == PROCESSES
    assert found["devices"] == alone.found(job)["devices"] == PROCESSES
    assert found["step"] == alone.found(job)["step"] == process.STOP
  for params in together.params(job):
    assert_same(params, alone.params(job), TOLERANCE)


def test_what_a_process_holds(together):
  """A process holds the whole kernel, or its part."""
  width = kauldron_tour.WIDTH
  for found in together.found("plain"):
    assert found["shards"] == [[64, width]]
  for found in together.found("divided"):
    assert found["shards"] == [[64 // PROCESSES, width]]


def test_in_memory_batches(alone, together):
  """In memory each process yields its part of the batch of one process."""
  batches = [found["first batch"] for found in together.found("plain")]
  assert [len(batch) for batch in batches] == [
      kauldron_tour.BATCH_SIZE // PROCESSES] * PROCESSES
  assert sum(batches, []) == alone.found("plain")["first batch"]


def test_pygrain_batches(alone, together):
  """PyGrain deals the examples out, so the batches are others."""
  images = process.fingerprints(kauldron_tour.train_images()["image"])
  batches = [found["first batch"] for found in together.found("pygrain")]
  for number, batch in enumerate(batches):
    assert len(batch) == kauldron_tour.BATCH_SIZE // PROCESSES
    assert set(batch) <= set(images[number::PROCESSES])
  assert set(sum(batches, [])) != set(alone.found("pygrain")["first batch"])

  # So the parameters are others too, but the same on all processes.
  first, *others = together.params("pygrain")
  for params in others:
    assert_same(params, first)
  assert np.any(first["encoder.kernel"]
                != alone.params("pygrain")["encoder.kernel"])


@pytest.mark.parametrize("collection", ["train", "held_out"])
@pytest.mark.parametrize("job", ["plain", "divided"])
def test_events(alone, together, job, collection):
  """One process writes: each step is there once, with the same value."""
  together.found(job)
  files = list((together.folder / job / collection).iterdir())
  assert len(files) == 1
  assert (together.folder / job / "config.json").is_file()
  steps, losses = kauldron_tour.read_events(
      together.folder / job, "losses/total", collection)
  assert steps == [0, 5, 10]
  _, expected = kauldron_tour.read_events(
      alone.folder / job, "losses/total", collection)
  np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_resumed_by_several(alone, together):
  """Several processes go on with a run of one, as that one does."""
  for found in together.found("resumed"):
    assert found["resumes at"] == process.SAVED
    assert found["step"] == process.END
  for params in together.params("resumed"):
    assert_same(params, alone.params("resumed"), TOLERANCE)


@pytest.mark.parametrize("job", ["plain", "divided"])
def test_resumed_by_one(alone, together, tmp_path, job):
  """One process goes on with a run of several, as with its own."""
  together.found(job)
  shutil.copytree(together.folder / job, tmp_path / "stopped")
  found, params = process.resumed(tmp_path)
  assert found["resumes at"] == process.SAVED
  assert found["step"] == process.END
  assert_same(params, alone.params("resumed"), TOLERANCE)


def test_pygrain_resumed_by_several(together):
  """PyGrain's position is saved per process: another number has none."""
  for number, found in enumerate(together.found("pygrain_resumed")):
    assert f"process_{number}-of-{PROCESSES}.json does not" in found["error"]


def test_pygrain_resumed_by_one(together, tmp_path):
  """Nor does one process find its position in a run of several."""
  together.found("pygrain")
  shutil.copytree(together.folder / "pygrain", tmp_path / "pygrain_stopped")
  with pytest.raises(ValueError, match="process_0-of-1.json does not exist"):
    process.pygrain_resumed(tmp_path)


def test_killed(together):
  """One is killed: the others end with an error, and the run resumes."""
  together.wait_for(together.folder / "endless" / "checkpoints" / "ckpt_20")
  *others, victim = together.children
  victim.kill()

  start = time.monotonic()
  for number, child in enumerate(others):
    left = NOTICED_SECONDS - (time.monotonic() - start)
    assert child.wait(timeout=max(left, 0)) != 0
    assert re.search("Gloo .* failed|service detected fatal errors",
                     together.log(number)), together.log(number)
  print(f"noticed within {time.monotonic() - start:.1f} s")

  steps = [int(path.name.removeprefix("ckpt_")) for path in pathlib.Path(
      together.folder, "endless", "checkpoints").glob("ckpt_*[0-9]")]
  last = max(steps)
  assert last >= 20
  found, _ = process.endless(together.folder, stop=last + 5)
  assert found["resumes at"] == last
  assert found["step"] == last + 5


def test_tour(tmp_path):
  """The tour is one of several processes, of which only the first prints."""
  processes = Processes(
      tmp_path, SCRIPT, "--workdir", tmp_path / "out",
      "--only", "real_trainer", "sharding", "several_processes",
      "--distributed", "127.0.0.1:{port}", PROCESSES, "{number}")
  try:
    for number, child in enumerate(processes.children):
      assert child.wait(timeout=GIVEN_UP_SECONDS) == 0, processes.log(number)
  finally:
    processes.end()
  first, *others = map(processes.log, range(PROCESSES))
  assert f"=> number 0 of {PROCESSES}" in first
  assert "2 PASS, 1 SKIP, 0 FAIL" in first
  for number, log in enumerate(others, 1):
    assert "PASS" not in log
    printed = (tmp_path / "out" / f"process_{number}.txt").read_text()
    assert f"=> number {number} of {PROCESSES}" in printed
    assert "2 PASS, 1 SKIP, 0 FAIL" in printed
