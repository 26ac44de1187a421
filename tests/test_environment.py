"""Strange but lawful surroundings: the tour passes, or says why it cannot."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from conftest import ROOT
from conftest import SCRIPT
from conftest import outside

LIGHT = ["--only", "config_tree", "key_paths", "shape_checker"]


def passes(process, count):
  """Checks that so many sections passed, with nothing said or left behind."""
  assert process.stderr == ""
  assert process.returncode == 0, process.stdout
  assert f"\n{count} PASS, 0 SKIP, 0 FAIL" in process.stdout
  assert process.left_behind == []


def run_in_shell(command, folder):
  """Runs a shell command in which $TOUR starts the tour's light sections."""
  tour = f"{sys.executable} {SCRIPT} {' '.join(LIGHT)}"
  return subprocess.run(
      ["bash", "-c", command.replace("$TOUR", tour)], cwd=folder,
      env=outside(folder), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("environ", [
    {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    {"TERM": "dumb", "COLUMNS": "40"},
    {"COLUMNS": "200"},
    {"PYTHONHASHSEED": "1"},
    {"PYTHONWARNINGS": "error"},
    {"PYTHONDONTWRITEBYTECODE": "1"},
    {"PYTHONSAFEPATH": "1"},
], ids=str)
def test_environment_variables(script, environ):
  passes(script(*LIGHT, **environ), 3)


def test_a_training_without_a_home_terminal_or_locale(script):
  passes(script(
      "--only", "real_trainer", HOME="/nonexistent", LANG="C", LC_ALL="C",
      PYTHONIOENCODING="ascii", TERM="dumb", COLUMNS="40",
      PYTHONWARNINGS="error", PYTHONDONTWRITEBYTECODE="1"), 1)


# Settings of JAX and Flax.


@pytest.mark.parametrize("environ", [
    {"JAX_ENABLE_X64": "1", "JAX_DEBUG_NANS": "1",
     "JAX_NUMPY_RANK_PROMOTION": "raise"},
    {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_CHECK_TRACER_LEAKS": "1",
     "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
], ids=str)
def test_settings_that_kauldron_supports(script, environ):
  passes(script("--only", "key_paths", "real_trainer", **environ), 2)


@pytest.mark.parametrize("setting", [
    "JAX_DISABLE_JIT=1", "FLAX_RETURN_FROZENDICT=1",
    "JAX_NUMPY_DTYPE_PROMOTION=strict"])
def test_settings_that_kauldron_does_not_support(script, setting):
  name, value = setting.split("=")
  sections = ["real_trainer", "resumed_run", "sharding", "own_experiment"]
  process = script("--only", "key_paths", *sections, **{name: value})
  assert process.returncode == 0, process
  assert process.stderr == ""
  assert "\n1 PASS, 4 SKIP, 0 FAIL of 5 sections\n" in process.stdout
  summary = process.stdout.partition("\nSummary\n")[2]
  assert summary.count(name) == 1
  assert summary.partition(" --only ")[2].split() == sections


def test_another_setting_is_named_where_something_fails(script):
  process = script(*LIGHT, JAX_TRANSFER_GUARD="disallow")
  assert process.returncode == 1, process
  assert process.stderr == ""
  assert process.stdout.endswith("\n  JAX_TRANSFER_GUARD=disallow\n")


def test_an_unknown_flag_of_xla(script):
  process = script(*LIGHT, XLA_FLAGS="--xla_no_such_flag=1")
  assert process.returncode == 1, process
  assert "XLA_FLAGS: --xla_no_such_flag=1" in process.stderr


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there(script, platform):
  process = script("--only", "config_references", JAX_PLATFORMS=platform)
  assert process.returncode == 1, process
  assert process.stderr == ""
  assert "\n0 PASS, 0 SKIP, 1 FAIL" in process.stdout
  assert process.stdout.endswith(f"\n  JAX_PLATFORMS={platform}\n")


@pytest.mark.parametrize("count", [1, 3, 4])
def test_numbers_of_devices(forked, count):
  flags = f"--xla_force_host_platform_device_count={count}"
  process = forked("--only", "sharding", XLA_FLAGS=flags)
  assert process.returncode == 0, process.stdout
  if count == 4:
    assert "1 PASS, 0 SKIP, 0 FAIL" in process.stdout
  else:
    assert re.search(rf"SKIP: {count} devices?\b", process.stdout)


def test_a_compilation_cache_of_the_callers_is_used_and_kept(script, tmp_path):
  cache = tmp_path / "cache"
  passes(script(*LIGHT, JAX_COMPILATION_CACHE_DIR=str(cache)), 3)
  assert list(cache.iterdir())


# What an installation may lack, or hide.


def test_numpy_without_float128(script, tmp_path):
  startup = tmp_path / "sitecustomize.py"
  startup.write_text("import numpy\ndel numpy.float128\n")
  process = script("--only", "where_we_are", "shape_checker",
                   PYTHONPATH=str(tmp_path))
  passes(process, 2)
  assert "  numpy.float128 was mended: " in process.stdout


@pytest.mark.parametrize("name, module", [
    ("jax.py", "jax"), ("flax.py", "flax"), ("random.py", "random"),
    ("token.py", "token"), ("grain.py", "grain"), ("google.py", "google"),
    ("tensorflow/__init__.py", "tensorflow")])
def test_a_file_that_hides_a_module(script, tmp_path, name, module):
  shutil.copy(SCRIPT, tmp_path)
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  path.write_text("x = 1\n")
  process = script(path="kauldron_tour.py")
  assert process.returncode == 2, process
  assert process.stdout == ""
  assert re.fullmatch(r"kauldron_tour: .+\.\n", process.stderr)
  assert f"{path} hides the module {module!r}" in process.stderr


def test_files_that_hide_nothing(script, tmp_path):
  shutil.copy(SCRIPT, tmp_path)
  for name in ("test.py", "experiment.py", "random.txt", ".env"):
    (tmp_path / name).write_text("")
  for name in ("jax", "tests"):
    (tmp_path / name).mkdir()
  (tmp_path / "tests" / "__init__.py").write_text("")
  passes(script(*LIGHT, path="kauldron_tour.py", PYTHONPATH=str(tmp_path)), 3)


@pytest.mark.parametrize("module", ["grain", "tensorflow"])
def test_a_module_that_cannot_be_imported(script, tmp_path, module):
  package = tmp_path / module
  package.mkdir()
  (package / "__init__.py").write_text(
      f"raise ImportError('{module} does not load here')\n")
  process = script("--only", "config_tree", "paths", "real_trainer",
                   "data_pipeline", PYTHONPATH=str(tmp_path))
  assert process.returncode == 1, process
  assert process.stderr == ""
  assert "\n2 PASS, 0 SKIP, 2 FAIL" in process.stdout
  summary = process.stdout.partition("\nSummary\n")[2]
  assert summary.count(f"{module} does not load here") == 1
  assert "--only real_trainer data_pipeline\n" in summary


def test_the_installed_packages_agree_with_each_other():
  command = [sys.executable, "-m", "pip", "check"]
  if importlib.util.find_spec("pip") is None:  # As in what uv makes.
    command = ["uv", "pip", "check", "--python", sys.executable]
  check = subprocess.run(command, capture_output=True, text=True, check=False)
  assert check.returncode == 0, check


# Streams, users, folders and limits.


@pytest.mark.parametrize("command, status", [
    ("env -u HOME $TOUR", 0),
    ("$TOUR <&-", 0),
    ("$TOUR >&-", 0),
    ("$TOUR >out.txt && grep -q '3 PASS' out.txt", 0),
    ("$TOUR | head -3; exit ${PIPESTATUS[0]}", 141),
    ("ulimit -n 256; $TOUR", 0),
    ("taskset -c 0 $TOUR", 0),
])
def test_streams_and_limits(tmp_path, command, status):
  process = run_in_shell(command, tmp_path)
  assert (process.returncode, process.stderr) == (status, ""), process
  if status != 141:  # Then the process has no time to tidy up.
    assert os.listdir(tmp_path / "tmp") == []


def test_no_network(tmp_path):
  if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
    pytest.skip("unshare -n is not allowed here")
  process = run_in_shell("unshare -n $TOUR", tmp_path)
  assert (process.returncode, process.stderr) == (0, ""), process


def test_a_user_without_a_name_or_a_home():
  if os.getuid() != 0:
    pytest.skip("only root can become another user")
  # The system's own interpreter, as root's may be out of reach.
  version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
  python = shutil.which(version, path=os.defpath) or sys.executable
  try:
    process = subprocess.run(
        [python, SCRIPT, *LIGHT], user=54321, extra_groups=[], cwd="/",
        env={"PYTHONPATH": sysconfig.get_path("purelib"),
             "PATH": os.environ["PATH"]},
        text=True, capture_output=True, check=False)
  except PermissionError:
    pytest.skip("an ordinary user cannot run this Python")
  assert (process.returncode, process.stderr) == (0, ""), process


def test_a_temporary_folder_with_a_space(forked, tmp_path):
  folder = tmp_path / "a folder"
  folder.mkdir()
  passes(forked("--only", "real_trainer", TMPDIR=str(folder)), 1)
  assert list(folder.iterdir()) == []


@pytest.fixture
def read_only(tmp_path):
  """A folder that not even root can write to."""
  folder = tmp_path / "read_only"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]
  if subprocess.run(mount, check=False, capture_output=True).returncode:
    pytest.skip("no file system can be mounted here")
  yield folder
  subprocess.run(["umount", folder], check=False, capture_output=True)


def test_a_read_only_current_folder_and_home(tmp_path, read_only):
  process = run_in_shell(f"cd {read_only}; HOME={read_only} $TOUR", tmp_path)
  assert (process.returncode, process.stderr) == (0, ""), process


@pytest.mark.parametrize("option", ["--workdir", "--report"])
def test_a_read_only_target(script, read_only, option):
  process = script(*LIGHT, option, str(read_only / "out"))
  assert process.returncode == 2, process
  assert process.stderr.count("\n") == 1
  assert "Read-only" in process.stderr


# A clone elsewhere, and make.


def test_line_ends_in_a_clone(tmp_path):
  source = tmp_path / "source"
  source.mkdir()
  shutil.copy(ROOT / ".gitattributes", source)
  for name in ("script.sh", "Makefile", "kauldron_tour.py", ".ci"):
    (source / name).write_bytes(b"a\nb\n")
  git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
  for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "m"]):
    subprocess.run([*git, *command], cwd=source, check=True)
  for settings in ("core.autocrlf=true", "core.eol=crlf"):
    clone = tmp_path / settings
    subprocess.run(["git", "clone", "-q", "-c", settings, source, clone],
                   check=True)
    for name in ("script.sh", "Makefile", "kauldron_tour.py", ".ci"):
      assert (clone / name).read_bytes() == b"a\nb\n"


def test_a_tour_with_other_line_ends(script, tmp_path):
  path = tmp_path / "kauldron_tour.py"
  path.write_bytes(SCRIPT.read_bytes().replace(b"\n", b"\r\n"))
  passes(script(*LIGHT, path=path), 3)


@pytest.mark.parametrize("file, text", [
    ("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "-W error"\n'
     'filterwarnings = ["error"]\n'),
    ("pytest.ini", "[pytest]\naddopts = --no-such-option\n"),
    ("setup.cfg", "[tool:pytest]\nfilterwarnings = error\n"),
])
def test_pytest_settings_of_a_project_around(tmp_path, file, text):
  (tmp_path / file).write_text(text)
  tests = tmp_path / "clone" / "tests"
  tests.mkdir(parents=True)
  shutil.copy(ROOT / ".pytest.ini", tests.parent)
  (tests / "test_it.py").write_text(
      "import warnings\ndef test_it():\n  warnings.warn('of others')\n")
  process = subprocess.run(
      [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
      cwd=tests.parent, capture_output=True, text=True, check=False)
  assert process.returncode == 0, process
  assert "1 passed, 1 warning" in process.stdout


@pytest.fixture
def project(tmp_path):
  """The Makefile, with a tour and a Kauldron that take no time to install."""
  folder = tmp_path / "project"
  folder.mkdir()
  shutil.copy(ROOT / "Makefile", folder)
  wheel = folder / "kauldron-1.0-py3-none-any.whl"
  with zipfile.ZipFile(wheel, "w") as file:
    file.writestr("kauldron.py", "")
    file.writestr("kauldron-1.0.dist-info/METADATA",
                  "Metadata-Version: 2.1\nName: kauldron\nVersion: 1.0\n")
    file.writestr("kauldron-1.0.dist-info/WHEEL",
                  "Wheel-Version: 1.0\nGenerator: test\n"
                  "Root-Is-Purelib: true\nTag: py3-none-any\n")
    file.writestr("kauldron-1.0.dist-info/RECORD", "")
  (folder / "requirements.txt").write_text(f"./{wheel.name}\n")
  (folder / "kauldron_tour.py").write_text(
      "import kauldron\nprint(kauldron.__file__)\n")
  return folder


def make(folder, *arguments, **environ):
  """Runs make as a user whose Python is this one's base."""
  base = os.path.join(sys.base_prefix, "bin", "python3")
  clean = {name: value for name, value in os.environ.items()
           if not name.startswith(("UV_", "PIP_", "JAX_", "PYTHON"))
           and name not in ("MAKEFLAGS", "VIRTUAL_ENV")}
  if "PYTHON" not in environ:
    clean["PYTHON"] = base
  return subprocess.run(
      ["make", *arguments], cwd=folder, env=clean | environ,
      capture_output=True, text=True, check=False)


def without_uv(folder):
  """Returns a PATH on which there is all that make needs, but no uv."""
  tools = folder / "tools"
  tools.mkdir()
  for name in ("sh", "touch", "sed", "awk", "make", "env"):
    (tools / name).symlink_to(shutil.which(name))
  return str(tools)


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_make_installs_into_venv_whatever_is_set(project, tmp_path, installer):
  if installer == "uv" and not shutil.which("uv"):
    pytest.skip("uv is not installed")
  elsewhere = str(tmp_path / "elsewhere")
  environ = {"UV_SYSTEM_PYTHON": "1", "UV_PYTHON": "/usr/bin/python3",
             "UV_PROJECT": elsewhere, "VIRTUAL_ENV": elsewhere,
             "CONDA_PREFIX": elsewhere, "PIP_TARGET": elsewhere,
             "PIP_PREFIX": elsewhere, "PIP_USER": "1"}
  if installer == "pip":
    environ["PATH"] = without_uv(tmp_path)
  process = make(project, "tour", **environ)
  assert process.returncode == 0, process
  assert f"{project}/.venv/" in process.stdout.splitlines()[-1]
  assert (project / ".venv" / ".installed").exists()
  assert not os.path.exists(elsewhere)


def test_make_does_not_believe_an_installation_that_cannot_be_imported(project):
  (project / "requirements.txt").write_text("")
  for _ in range(2):
    process = make(project, "tour")
    assert process.returncode == 2, process
    assert "the packages are not in .venv" in process.stderr
    assert not (project / ".venv" / ".installed").exists()


def shim(folder, text, status):
  """Returns the path of a program that says something and fails."""
  path = folder / "python3.99"
  path.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {status}\n")
  path.chmod(0o755)
  return str(path)


def test_make_shows_what_an_interpreter_says(project, tmp_path):
  python = shim(tmp_path, "shim: version 3.99 is not installed", 127)
  process = make(project, "tour", PYTHON=python)
  assert process.returncode == 2, process
  assert "shim: version 3.99 is not installed" in process.stderr
  assert "is not Python" not in process.stderr

  # The same where .venv is there already.
  (project / ".venv").mkdir()
  (project / ".venv" / ".installed").touch()
  process = make(project, "tour", PYTHON=python)
  assert process.returncode == 2, process
  assert "shim: version 3.99 is not installed" in process.stderr
  assert "does not run" in process.stderr


def test_make_refuses_an_old_python(project, tmp_path):
  python = tmp_path / "python_old"
  python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '\n"
                    "import sys\nsys.version_info = (3, 9, 1)\n"
                    "exec(sys.argv[2])' \"$@\"\n")
  python.chmod(0o755)
  process = make(project, "tour", PYTHON=str(python))
  assert process.returncode == 2, process
  assert "is Python 3.9, not 3.11, 3.12 or 3.13" in process.stderr


def test_make_keeps_what_is_compiled(project):
  (project / "kauldron_tour.py").write_text(
      "import os\nprint(os.environ['JAX_COMPILATION_CACHE_DIR'])\n")
  for chosen, expected in (({}, f"{project}/.venv/compiled"),
                           ({"JAX_COMPILATION_CACHE_DIR": "/mine"}, "/mine")):
    process = make(project, "tour", **chosen)
    assert process.stdout.splitlines()[-1] == expected, process
