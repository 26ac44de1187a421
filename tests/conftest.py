"""What all tests share: CPU only, the tour as a module and as a script."""

import fcntl
import functools
import gc
import json
import os
import pathlib
import pickle
import subprocess
import sys

import pytest

# What `make test` hands on is not for the makes that the tests start.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
  os.environ.pop(name, None)

# Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(sys.prefix, "compiled"))
ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "kauldron_tour.py"
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("kauldron_tour")

import kauldron_tour


def pytest_unconfigure():
  gc.freeze()  # Taking everything apart would cost two seconds.


@pytest.fixture
def tour(monkeypatch):
  """The tour as a module, with nothing recorded yet."""
  monkeypatch.setattr(kauldron_tour, "RESULTS", {})
  return kauldron_tour


# The tour as a script.


def outside(folder):
  """Returns the environment of a user, with a TMPDIR of its own.

  What was set for this process is not handed on, except for the cache.
  """
  temporary = folder / "tmp"
  temporary.mkdir(exist_ok=True)
  environ = {name: value for name, value in os.environ.items()
             if not name.startswith(("JAX_", "TF_CPP_", "TQDM_"))}
  cache = "JAX_COMPILATION_CACHE_DIR"
  return environ | {"TMPDIR": str(temporary), cache: os.environ[cache]}


def run_tour(folder, *arguments, python=(), path=SCRIPT, **environ):
  """Runs the tour in a new process, in a folder.

  Returns the finished process, and in `left_behind` what is left in TMPDIR.
  """
  process = subprocess.run(
      [sys.executable, *python, path, *arguments], cwd=folder,
      env=outside(folder) | environ, stdin=subprocess.DEVNULL,
      capture_output=True, text=True, check=False)
  process.left_behind = os.listdir(folder / "tmp")
  return process


def train_project(folder, project, config, *flags):
  """Trains a project of two files by `kauldron.main`, as a new process.

  Returns the `config.json` that it has written.
  """
  (folder / "project.py").write_text(project)
  (folder / "configs").mkdir()
  (folder / "configs" / "my_experiment.py").write_text(config)
  process = subprocess.run(
      [sys.executable, "-m", "kauldron.main", *flags,
       f"--cfg.workdir={folder / 'run'}"],  # After `--cfg`.
      cwd=folder, env=outside(folder), capture_output=True, text=True,
      check=False)
  assert process.returncode == 0, process.stderr[-2000:]
  return json.loads((folder / "run" / "config.json").read_text())


@pytest.fixture
def script(tmp_path):
  """Runs the tour in a new process: `run_tour` in a folder of the test's."""
  return functools.partial(run_tour, tmp_path)


# What the tour sets before it imports JAX, for those that import it first.
AS_THE_TOUR = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TQDM_DISABLE": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}

# Imports what takes long, and for each job forks a process that runs a script.
# JAX has not started yet, so this is safe.
FORKER = """if True:
  import json, os, runpy, sys
  import kauldron.train
  import kauldron.data.py
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      break
    status = os.waitpid(pid, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
  else:
    os._exit(0)
  job = json.loads(line)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(os.open(job["stdout"], os.O_WRONLY | os.O_CREAT), 1)
  os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_CREAT), 2)
  os.chdir(job["cwd"])
  os.environ.clear()
  os.environ.update(job["environ"])
  sys.argv = job["argv"]
  sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
  runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def forker(tmp_path_factory):
  """The process that forks, started when it is first asked for."""
  folder = tmp_path_factory.mktemp("forker")
  with subprocess.Popen(
      [sys.executable, "-c", FORKER], cwd=folder,
      env=outside(folder) | AS_THE_TOUR,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL, text=True) as process:
    yield process
    process.stdin.close()


@pytest.fixture
def forked(forker, tmp_path):
  """Runs a script as `script` does, but forked: seconds less with TensorFlow.

  What JAX and Kauldron read when they are imported is as in `outside`.
  """
  def run(*arguments, path=SCRIPT, **environ):
    job = {"argv": [os.path.join(tmp_path, path), *map(str, arguments)],
           "cwd": str(tmp_path), "environ": outside(tmp_path) | environ,
           "stdout": str(tmp_path / "tmp" / "stdout"),
           "stderr": str(tmp_path / "tmp" / "stderr")}
    print(json.dumps(job), file=forker.stdin, flush=True)
    status = int(forker.stdout.readline())
    texts = [pathlib.Path(job[name]) for name in ("stdout", "stderr")]
    process = subprocess.CompletedProcess(
        job["argv"], status, *(path.read_text() for path in texts))
    for path in texts:
      path.unlink()
    process.left_behind = os.listdir(tmp_path / "tmp")
    return process

  return run


@pytest.fixture(scope="session")
def whole_tour(tmp_path_factory):
  """The whole tour as a script, once for all workers, and its report."""
  shared = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    shared = shared.parent
  folder = shared / "whole_tour"
  with open(shared / "whole_tour.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not folder.exists():
      folder.mkdir()
      process = run_tour(folder, "--strict", "--report", "report.json")
      (folder / "process.pickle").write_bytes(pickle.dumps(process))
  process = pickle.loads((folder / "process.pickle").read_bytes())
  return process, json.loads((folder / "report.json").read_text())
