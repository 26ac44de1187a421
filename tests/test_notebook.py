"""The tour in a real IPython kernel: pasted, run and opened as a notebook."""

import base64
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import kauldron_tour
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(kauldron_tour.__file__).parent
SOURCE = (ROOT / "kauldron_tour.py").read_text()
NUMBERS = {name: i for i, name in enumerate(kauldron_tour.SECTIONS)}


def _environment(folder):
  """Returns the environment without what the tests set, with a new TMPDIR."""
  ours = {name: value for name, value in os.environ.items()
          if not name.startswith(("JAX_", "TF_CPP_", "TQDM_"))}
  (folder / "tmp").mkdir(exist_ok=True)
  return ours | {"TMPDIR": str(folder / "tmp")}


@pytest.fixture
def execute(tmp_path):
  """Executes cells in a new kernel, which is to leave nothing behind.

  Returns the notebook's cells, with their outputs.
  """
  def run(*sources):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(
        notebook, timeout=600, allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=_environment(tmp_path))
    return notebook.cells

  yield run
  assert os.listdir(tmp_path) == ["tmp"]
  assert os.listdir(tmp_path / "tmp") == []


def _pasted(*names):
  """Returns the tour's source, restricted to some sections."""
  options = "parse_options(sys.argv[1:] if IS_SCRIPT else [])"
  assert SOURCE.count(options) == 1
  return SOURCE.replace(options, f"parse_options({['--only', *names]})")


def _text(cell):
  """Returns what a cell printed."""
  return "".join(out.get("text", "") for out in cell.outputs)


def _ended(text):
  """Returns the name of each section that ran -> how it ended, in order."""
  ended = re.findall(r"\n\[(\d+)/.*?\n  (PASS|SKIP|FAIL) ", text, re.DOTALL)
  return {kauldron_tour.SECTIONS[int(i)]: status for i, status in ended}


def _shown(cells, kind):
  """Returns what the cells displayed or returned as a MIME type."""
  return [out.data[kind] for cell in cells for out in cell.outputs
          if kind in out.get("data", {})]


def _assert_clean(cells):
  """Checks that nothing was raised or said on stderr."""
  for out in (out for cell in cells for out in cell.outputs):
    assert out.output_type != "error" and out.get("name") != "stderr", out


def _assert_one_full_bar(cells, count):
  bars = [html for html in _shown(cells, "text/html") if "<progress" in html]
  assert len(bars) == 1, bars
  assert f"max='{count}' value='{count}'" in bars[0]


def _assert_pictures(cells, count):
  pictures = _shown(cells, "image/png")
  assert len(pictures) == count
  for picture in pictures:
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_pasted_whole_and_pasted_again(execute, whole_tour):
  facts = "print(json.dumps({k: v['facts'] for k, v in RESULTS.items()}))"
  called = "print(list(RESULTS) == SECTIONS, key_paths())"
  cells = execute(SOURCE, facts, called, "RESULTS", "display(1)",
                  "first = RESULTS\n" + SOURCE, called, "first is RESULTS")
  first, facts, *_, again, _, same = cells
  count = len(NUMBERS)
  _assert_clean(cells)
  for pasted, called in ((first, cells[2]), (again, cells[6])):
    text = _text(pasted)
    statuses = dict.fromkeys(NUMBERS, "PASS") | {"config_file": "SKIP"}
    assert list(_ended(text).items()) == list(statuses.items())
    assert f"{count - 1} PASS, 1 SKIP, 0 FAIL of {count} sections" in text
    assert "SKIP config_file: the tour was pasted" in text
    assert "True {'wrong'" in _text(called)
    _assert_one_full_bar([pasted], count)
    _assert_pictures([pasted], len(re.findall(r"^  draw\(", SOURCE, re.M)))
  (table,) = _shown([cells[3]], "text/plain")
  assert table in _text(first)
  assert len(table.splitlines()) == count + 1
  assert _shown([same], "text/plain") == ["False"]
  for name, pasted in json.loads(_text(facts)).items():
    if name != "config_file":
      as_script = whole_tour[1]["sections"][name]["facts"]
      assert kauldron_tour.differences(as_script, pasted) == {}


def test_built_and_run_cell_by_cell(tmp_path):
  """`make notebook` in a copy of the project, with these packages."""
  for name in ("Makefile", "requirements.txt", "kauldron_tour.py"):
    shutil.copy(ROOT / name, tmp_path)
  (tmp_path / ".venv").mkdir()
  (tmp_path / ".venv" / "bin").symlink_to(pathlib.Path(sys.executable).parent)
  (tmp_path / ".venv" / ".installed").touch()
  environ = _environment(tmp_path)
  process = subprocess.run(
      ["make", "notebook"], cwd=tmp_path, env=environ, check=False,
      capture_output=True, text=True)
  assert process.returncode == 0, process
  assert os.listdir(environ["TMPDIR"]) == []
  cells = nbformat.read(tmp_path / "kauldron_tour.ipynb", 4).cells
  _assert_clean(cells)
  _assert_one_full_bar(cells, len(NUMBERS))
  title = re.compile(r"(\d+)\. ")
  sections = {}
  for cell in cells:
    number = title.match(cell.metadata.get("title", ""))
    if number:
      sections[kauldron_tour.SECTIONS[int(number[1])]] = cell
    else:
      assert _ended(_text(cell)) == {}
  assert list(sections) == list(NUMBERS)
  for name, cell in sections.items():
    status = "SKIP" if name == "config_file" else "PASS"
    assert _ended("\n" + _text(cell)) == {name: status}
    _assert_pictures([cell], len(re.findall(r"^  draw\(", cell.source, re.M)))
  assert _shown(cells, "image/png")
  assert "1 SKIP, 0 FAIL" in _text(cells[-1])


def test_magic_run_takes_options(execute):
  tour = f"%run {ROOT / 'kauldron_tour.py'} "
  cells = execute(
      tour + "--only key_paths 4", "RESULTS", "print(shape_checker())",
      tour + "--list", tour + "--only nonsense", tour + "--no-such-option",
      "1 / 0")
  *right, unknown, wrong, mistake = cells
  _assert_clean(right)
  assert _ended(_text(cells[0])) == {"key_paths": "PASS",
                                     "shape_checker": "PASS"}
  _assert_one_full_bar(cells, 2)
  assert len(_shown([cells[1]], "text/plain")[0].splitlines()) == 3
  assert "argument" in _text(cells[2])
  assert "19 type_checkers" in _text(cells[3])
  for cell, word in ((unknown, "'nonsense'"), (wrong, "--no-such-option")):
    (error,) = cell.outputs
    assert error.ename == "CannotRun"
    (line,) = error.traceback
    assert re.fullmatch(r"kauldron_tour: .+\.", line)
    assert word in line
  (error,) = mistake.outputs  # The reader's own tracebacks are left alone.
  assert error.ename == "ZeroDivisionError"


def test_jax_and_a_loop_that_are_running_already(execute):
  """With one device and the arguments of another program."""
  before = ("import asyncio, jax, sys; asyncio.get_running_loop()\n"
            "sys.argv = ['launcher.py', '-f', 'kernel.json']\n"
            "print(jax.devices())")
  names = ["where_we_are", "real_trainer", "sharding"]
  cells = execute(before, _pasted(*names))
  _assert_clean(cells)
  assert "[CpuDevice(id=0)]" in _text(cells[0])
  assert _ended(_text(cells[1])) == dict.fromkeys(names, "PASS") | {
      "sharding": "SKIP"}
  assert "SKIP sharding: 1 devices" in _text(cells[1])


def test_a_section_that_fails(execute):
  broken = _pasted("1", "2", "3").replace("cfg[1].learning_rate = 0.4",
                                          "cfg[1].learning_rate = 0.3")
  cells = execute("sys_modules = __import__('sys').modules\n"
                  "sys_modules['matplotlib'] = None", broken)
  _assert_clean(cells)
  text = _text(cells[1])
  assert _ended(text) == {"config_tree": "FAIL", "config_references": "PASS",
                          "key_paths": "PASS"}
  failure = text[text.index("[01/"):text.index("[02/")]
  assert "Traceback" not in text[text.index("[02/"):]
  assert "assert updates[0] == updates[1]" in failure
  assert "AssertionError" in failure
  assert "again: config_tree()" in text
  _assert_one_full_bar(cells, 3)
  _assert_pictures(cells, 0)  # There is no matplotlib.


def test_a_section_that_is_interrupted_and_run_again(execute):
  line = '  show("cfg", cfg)\n'
  assert line in SOURCE
  slow = _pasted("1", "2").replace(
      line, "  if not RESULTS: os.kill(os.getpid(), 2); time.sleep(9)\n")
  cells = execute(slow, *(f"run_section({name})" for name in (
      "config_references", "config_tree", "config_references")))
  _assert_clean(cells)
  assert "FAIL config_tree: interrupted" in _text(cells[0])
  assert [_ended("\n" + _text(cell)) for cell in cells] == [
      {"config_tree": "FAIL"}, {}, {"config_tree": "PASS"},
      {"config_references": "PASS"}]


# Hides Kauldron, installs a package `pinned`, and stands in for pip.
PIP = """
import itertools, pathlib, subprocess, sys, tempfile
class Hide:
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] == "kauldron":
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
site = tempfile.TemporaryDirectory()
info = pathlib.Path(site.name, "pinned-1.dist-info")
info.mkdir()
(info / "top_level.txt").write_text("pinned")
(info / "METADATA").write_text("Name: pinned\\nVersion: 1\\n")
(info.parent / "pinned.py").touch()
sys.path.insert(0, site.name)

newer = itertools.count(2)
def pip(command, **kwargs):
  print("ran", command)
  return subprocess.CompletedProcess(command, *outcome())

subprocess.run = pip
"""
FAILS = """
def outcome():
  return 1, "", '''WARNING: Retrying after 'NewConnectionError: refused'.
\033[31mERROR: No matching distribution found for kauldron>=1.4.2\033[0m

[notice] A new release of pip is available.
\033[0m'''
"""
REPLACES = """
def outcome():
  (info / "METADATA").write_text(f"Name: pinned\\nVersion: {next(newer)}\\n")
  return 0, "", ""
"""
INSTALLS = REPLACES.replace("return", "sys.meta_path.pop(0)\n  return")


def test_kauldron_is_missing(execute):
  """pip fails; replaces what is not in use, then what is; and installs."""
  light = _pasted("1")
  cells = execute(
      PIP + FAILS, light, "import pinned\n" + REPLACES, light,
      "del sys.modules['pinned']\n" + INSTALLS, light, light,
      "site.cleanup()")
  failed, replaced, installed, nothing = cells[1:7:2] + [cells[6]]
  for cell in (failed, replaced, installed):
    first, ran = _text(cell).splitlines()[:2]
    assert first.startswith("Kauldron is not installed."), first
    assert ran == "ran " + str([
        sys.executable, "-m", "pip", "install", *kauldron_tour.REQUIREMENTS])
  for cell, sentence in (
      (failed, "pip could not install Kauldron: ERROR: No matching distribution"
               " found for kauldron>=1.4.2"),
      (replaced, "restart the runtime and run this again: pip replaced pinned,"
                 " which had been imported.")):
    error = cell.outputs[-1]
    assert (error.ename, error.evalue) == ("CannotRun", sentence)
    assert error.traceback == [f"kauldron_tour: {sentence}"]
    assert len(_text(cell).splitlines()) == 2
  _assert_clean([installed, nothing])
  for cell in (installed, nothing):
    assert _ended(_text(cell)) == {"config_tree": "PASS"}
  assert "not installed" not in _text(nothing)
