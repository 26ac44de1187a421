"""Strange but lawful surroundings: the tour passes, or says why it cannot."""

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig

import kauldron_tour
import pytest

SCRIPT = pathlib.Path(kauldron_tour.__file__)
LIGHT = ["--only", "1", "3", "4"]


def _passes(process, count):
  assert process.stderr == ""
  assert process.returncode == 0, process.stdout
  assert f"{count} PASS, 0 SKIP, 0 FAIL" in process.stdout
  assert process.left_behind == []


def _bash(command, cwd):
  """Runs a shell command in which $TOUR starts the tour's light sections."""
  tour = f"{sys.executable} {SCRIPT} {' '.join(LIGHT)}"
  return subprocess.run(
      ["bash", "-c", command.replace("$TOUR", tour)], cwd=cwd,
      capture_output=True, text=True, check=False)


@pytest.mark.parametrize("environ", [
    {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    {"TERM": "dumb", "COLUMNS": "40"},
    {"COLUMNS": "200"},
    {"PYTHONHASHSEED": "1"},
    {"PYTHONHASHSEED": "2"},
    {"PYTHONWARNINGS": "error"},
    {"PYTHONDONTWRITEBYTECODE": "1"},
    {"JAX_DISABLE_JIT": "1"},
], ids=str)
def test_environment_variables(script, environ):
  _passes(script(*LIGHT, **environ), 3)


def test_a_training_without_a_home_terminal_or_locale(script):
  _passes(script(
      "--only", "6", "10", HOME="/nonexistent", LANG="C", LC_ALL="C",
      PYTHONIOENCODING="ascii", TERM="dumb", COLUMNS="40",
      PYTHONWARNINGS="error", PYTHONDONTWRITEBYTECODE="1"), 2)


@pytest.mark.parametrize("environ", [
    {"JAX_ENABLE_X64": "1"},
    {"JAX_DEBUG_NANS": "1"},
    {"JAX_NUMPY_RANK_PROMOTION": "raise"},
], ids=str)
def test_settings_of_jax(script, environ):
  _passes(script("--only", "0", "8", "14", "15", **environ), 4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_numbers_of_devices(script, count):
  flags = f"--xla_force_host_platform_device_count={count}"
  process = script("--only", "15", XLA_FLAGS=flags)
  assert process.returncode == 0, process.stdout
  if count in (1, 3):
    assert f"SKIP sharding: {count} devices" in process.stdout
  else:
    assert f"({64 // count}, 32)" in process.stdout
    assert "1 PASS, 0 SKIP, 0 FAIL" in process.stdout


def test_a_batch_that_the_devices_cannot_share(script):
  process = script("--only", "1", "13", JAX_NUM_CPU_DEVICES="5")
  assert process.returncode == 1, process.stdout
  assert "1 PASS, 0 SKIP, 1 FAIL" in process.stdout
  assert "BATCH_SIZE=48 must be a multiple of devices=5" in process.stdout


# What an installation may lack.


def test_numpy_without_float128(script, tmp_path):
  startup = tmp_path / "sitecustomize.py"
  startup.write_text("import numpy\ndel numpy.float128\n")
  lacking = {"PYTHONPATH": str(tmp_path)}
  process = script("--only", "0", "4", "6", **lacking)
  _passes(process, 3)
  assert "patched numpy.float128 =>" in process.stdout
  assert "patches: numpy.float128" in process.stdout
  process = script("--only", "1", "2", "4", "--no-patch", **lacking)
  assert process.returncode == 1, process.stdout
  assert "2 PASS, 0 SKIP, 1 FAIL" in process.stdout
  assert "has no attribute 'float128'" in process.stdout


@pytest.mark.parametrize("module", ["grain", "tensorflow"])
def test_a_module_that_cannot_be_imported(script, tmp_path, module):
  package = tmp_path / module
  package.mkdir()
  (package / "__init__.py").write_text(
      f"raise ImportError('{module} does not load here')\n")
  process = script("--only", "0", "1", "2", "3", "4", "5", "6", "18",
                   PYTHONPATH=str(tmp_path))
  assert process.returncode == 1, process.stdout
  assert process.stderr == ""
  assert "6 PASS, 0 SKIP, 2 FAIL" in process.stdout
  for name in ("real_trainer", "data_pipeline"):
    reason = f"FAIL {name}: ImportError: Error resolving the config: {module}"
    assert reason in " ".join(process.stdout.split()), process.stdout


@pytest.mark.parametrize("name, fails", [
    ("kd.losses.Loss", ["loss_and_metric"]),
    ("kd.ktyping", ["shape_checker", "loss_and_metric"]),
])
def test_a_name_of_kauldron_that_is_gone(script, tmp_path, name, fails):
  tour = tmp_path / "kauldron_tour.py"
  tour.write_text(SCRIPT.read_text().replace(name, f"{name}_gone"))
  process = script("--only", "1", "2", "3", "4", "5", path=tour)
  assert process.returncode == 1, process.stdout
  assert "Not defined: AttributeError: " in process.stdout
  assert f"{name.rpartition('.')[2]}_gone" in process.stdout
  for section in kauldron_tour.SECTIONS[1:6]:
    assert (f"\nFAIL {section}" in process.stdout) == (section in fails)


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there(script, platform):
  process = script("--only", "1", JAX_PLATFORMS=platform)
  assert process.returncode == 2
  assert process.stderr.count("\n") == 1
  assert platform in process.stderr


def test_a_compilation_cache_of_the_callers_is_used_and_kept(script, tmp_path):
  cache = tmp_path / "cache"
  _passes(script("--only", "6", JAX_COMPILATION_CACHE_DIR=str(cache)), 1)
  assert list(cache.iterdir())


def test_no_network(tmp_path):
  if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
    pytest.skip("unshare -n is not allowed here")
  process = _bash("unshare -n $TOUR", tmp_path)
  assert (process.returncode, process.stderr) == (0, ""), process


@pytest.mark.parametrize("command, status", [
    ("env -u HOME $TOUR", 0),
    ("$TOUR <&-", 0),
    ("$TOUR >out.txt && grep -q '3 PASS' out.txt", 0),
    ("$TOUR | head -3; exit ${PIPESTATUS[0]}", 141),
])
def test_no_home_and_odd_streams(tmp_path, command, status):
  process = _bash(command, tmp_path)
  assert (process.returncode, process.stderr) == (status, ""), process


@pytest.mark.parametrize("name", ["renamed.py", "link.py"])
def test_another_name(script, tmp_path, name):
  path = tmp_path / name
  if name == "link.py":
    path.symlink_to(SCRIPT)
  else:
    path.write_text(SCRIPT.read_text())
  _passes(script("--only", "6", "16", path=path), 2)


def test_a_folder_that_cannot_be_written_and_an_ordinary_user():
  if os.getuid() != 0:
    pytest.skip("only root can become another user")
  # The system's own interpreter, as root's may be out of reach.
  version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
  python = shutil.which(version, path=os.defpath) or sys.executable
  try:
    process = subprocess.run(
        [python, SCRIPT, *LIGHT], user=65534, extra_groups=[], cwd="/",
        env={"PYTHONPATH": sysconfig.get_path("purelib"),
             "PATH": os.environ["PATH"]},
        text=True, capture_output=True, check=False)
  except PermissionError:
    pytest.skip("an ordinary user cannot run this Python")
  assert (process.returncode, process.stderr) == (0, ""), process


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 64 KiB, or of any size if it is read-only."""
  folder = tmp_path / "disk"
  folder.mkdir()

  def mount(options):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
                      check=False, capture_output=True).returncode:
      pytest.skip("no file system can be mounted here")
    return folder

  yield mount
  subprocess.run(["umount", folder], check=False, capture_output=True)


def test_a_full_temporary_folder(script, small_disk):
  process = script("--only", "6", TMPDIR=str(small_disk("size=64k")))
  assert process.returncode == 2, process
  assert process.stderr.count("\n") == 1
  assert "TMPDIR" in process.stderr
  assert process.left_behind == []


def test_a_temporary_folder_with_a_space(script, tmp_path):
  folder = tmp_path / "a folder"
  folder.mkdir()
  _passes(script("--only", "6", TMPDIR=str(folder)), 1)
  assert list(folder.iterdir()) == []


def test_a_read_only_current_folder(small_disk):
  process = _bash("$TOUR", small_disk("ro"))
  assert (process.returncode, process.stderr) == (0, ""), process


def test_a_read_only_work_directory(script, small_disk):
  folder = small_disk("ro")
  process = script("--only", "6", "--workdir", str(folder))
  assert process.returncode == 2, process
  assert process.stderr.count("\n") == 1
  assert "Read-only" in process.stderr


def test_workdir_in_the_home_folder_and_again(script, tmp_path):
  for count in (1, 2):
    process = script("--only", "12", "--workdir", "~/out", HOME=str(tmp_path))
    _passes(process, 1)
    moved = list((tmp_path / "out").glob("moved_*"))
    assert len(moved) == count
    assert all((path / "config.json").exists() for path in moved)


def test_two_tours_at_once_in_one_work_directory(tmp_path):
  command = [sys.executable, SCRIPT, "--only", "6", "--workdir", tmp_path]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
    second = subprocess.run(
        command, capture_output=True, text=True, check=False)
    assert (second.returncode, second.stderr) == (0, "")
    first.communicate()
  assert first.returncode == 0
  assert len(list(tmp_path.glob("get_config_*"))) == 2


def test_sigterm_leaves_nothing(tmp_path):
  command = [sys.executable, "-u", SCRIPT, "--only", "6", "9"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                        env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
    # The next of six variants is being trained.
    assert any(line.startswith("  base ") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    process.communicate()
  assert process.returncode == 128 + signal.SIGTERM
  assert list(tmp_path.iterdir()) == []


def test_the_installed_packages_agree_with_each_other():
  command = [sys.executable, "-m", "pip", "check"]
  if importlib.util.find_spec("pip") is None:  # As in what uv makes.
    command = ["uv", "pip", "check", "--python", sys.executable]
  check = subprocess.run(command, capture_output=True, text=True, check=False)
  assert check.returncode == 0, check
