"""Reports, their comparison, and real releases that break something."""

import importlib
import json
import pathlib
import re
import subprocess
import sys
import sysconfig

import kauldron_tour
import pytest

ROOT = pathlib.Path(kauldron_tour.__file__).parent


@pytest.fixture(scope="module")
def light(tmp_path_factory):
  """A report of two light sections, as a dict and as the path of its file."""
  path = tmp_path_factory.mktemp("report") / "report.json"
  run = subprocess.run(
      [sys.executable, ROOT / "kauldron_tour.py", "--only", "0", "key_paths",
       "--report", path], capture_output=True, text=True, check=True)
  assert run.stderr == ""
  assert list(path.parent.iterdir()) == [path]
  return json.loads(path.read_text()), path


def test_report(light):
  report, _ = light
  assert report["schema"] == kauldron_tour.SCHEMA
  assert report["versions"]["kauldron"] in "1.4.2 1.4.4"
  assert report["patches"] == {}
  assert list(report["sections"]) == ["where_we_are", "key_paths"]
  section = report["sections"]["key_paths"]
  assert section["status"] == "PASS"
  assert section["seconds"] > 0
  assert "preds.heads[1].logits" in section["facts"]["wrong"]
  assert report["surface"] == {}, "Part I needs no TensorFlow"


def test_report_on_stdout_comes_last(script):
  process = script("--only", "1", "--report", "-")
  assert process.returncode == 0, process
  text = process.stdout[process.stdout.index("\n{"):]
  assert json.loads(text)["sections"]["config_tree"]["status"] == "PASS"


def test_report_of_a_failure(script, tmp_path):
  broken = tmp_path / "kauldron_tour.py"
  broken.write_text((ROOT / "kauldron_tour.py").read_text().replace(
      "before = konfig.resolve(cfg)",
      'before = konfig.resolve({"__qualname__": "optax:no_such_name"})'))
  process = script("--only", "0", "1", "--report", "r.json", path=broken)
  assert process.returncode == 1
  sections = json.loads((tmp_path / "r.json").read_text())["sections"]
  assert sections["where_we_are"]["status"] == "PASS"
  failed = sections["config_tree"]
  assert failed["status"] == "FAIL"
  assert failed["reason"].startswith("AttributeError: ")
  assert failed["frame"].startswith("config_tree: before = ")
  assert re.fullmatch(r"optax\S+\.py, \w+", failed["library"])


def test_report_of_an_interrupted_run(script, tmp_path):
  interrupted = tmp_path / "kauldron_tour.py"
  interrupted.write_text((ROOT / "kauldron_tour.py").read_text().replace(
      '  show("cfg", cfg)\n', "  os.kill(os.getpid(), 2)\n  time.sleep(9)\n"))
  process = script("--only", "0", "1", "--report", "r.json", path=interrupted)
  assert process.returncode == 130
  sections = json.loads((tmp_path / "r.json").read_text())["sections"]
  assert sections["config_tree"]["reason"] == "interrupted"


def _compared(script, tmp_path, report):
  baseline = tmp_path / "baseline.json"
  baseline.write_text(json.dumps(report))
  return script("--only", "0", "key_paths", "--baseline", "baseline.json")


def test_nothing_changed(script, tmp_path, light):
  process = _compared(script, tmp_path, light[0])
  assert process.returncode == 0, process.stdout
  for line in ("0 versions changed", "0 sections changed", "0 facts changed",
               "0 public names changed"):
    assert line in process.stdout


def test_a_changed_fact_is_shown_old_and_new(script, tmp_path, light):
  report = json.loads(json.dumps(light[0]))
  report["sections"]["key_paths"]["facts"]["missing"] = "another text"
  process = _compared(script, tmp_path, report)
  assert process.returncode == 3, process.stdout
  assert "1 facts changed\n  key_paths.missing: another text ->" in (
      process.stdout)


def test_versions_sections_mended_and_gone(script, tmp_path, light):
  report = json.loads(json.dumps(light[0]))
  report["versions"]["optax"] = "0.0.1"
  report["sections"]["key_paths"]["status"] = "FAIL"
  report["sections"]["abolished"] = report["sections"].pop("where_we_are")
  process = _compared(script, tmp_path, report)
  assert process.returncode == 0, process.stdout
  for text in ("1 versions changed\n  optax: 0.0.1 ->",
               "3 sections changed\n  abolished: PASS -> absent\n"
               "  key_paths: FAIL -> PASS\n  where_we_are: absent -> PASS"):
    assert text in process.stdout, text


def test_a_broken_section_is_named_with_its_exception(capsys, tour, light):
  old, new = light[0], json.loads(json.dumps(light[0]))
  new["sections"]["key_paths"].update(
      status="FAIL", reason="KeyError: gone\nand more")
  assert not tour.compare(old, new)
  assert "1 sections changed\n  key_paths: PASS -> FAIL KeyError: gone\n" in (
      capsys.readouterr().out)


def test_a_section_that_is_newly_skipped_counts_as_a_change(tour, light):
  old, new = light[0], json.loads(json.dumps(light[0]))
  new["sections"]["key_paths"].update(status="SKIP", reason="no reason")
  assert tour.compare(old, new)


@pytest.mark.parametrize("old, new, is_changed", [
    (1.0, 1.0005, False), (1.0, 1.01, True), (0.0, 0.0, False),
    (0.0, 1e-9, True), (1, 2, True), (True, 1.0, False), ("a", "b", True),
    (1.0, float("inf"), True),
])
def test_floats_are_compared_within_the_tolerance(tour, old, new, is_changed):
  changed = tour.differences({"x": old}, {"x": new})
  assert changed == ({"x": (old, new)} if is_changed else {})


@pytest.mark.parametrize("text, word", [
    (None, "No such file"), ("{", "JSON"), ("[]", "TypeError"),
    ('{"schema": 2}', "schema is not 1"),
])
def test_a_baseline_that_cannot_be_read(script, tmp_path, text, word):
  if text is not None:
    (tmp_path / "old.json").write_text(text)
  process = script("--only", "0", "--baseline", "old.json")
  assert process.returncode == 2
  assert process.stdout == ""
  assert process.stderr.count("\n") == 1
  assert word in process.stderr


def test_a_report_that_cannot_be_written(script):
  process = script("--only", "0", "--report", "no/such/folder/r.json")
  assert process.returncode == 2
  assert "No such file or directory" in process.stderr


def test_public_surface(tour):
  importlib.import_module("kauldron.train")
  importlib.import_module("kauldron.data.py")
  surface = tour.public_surface()
  assert "num_train_steps: 'Optional[int]' = None" in (
      surface["kauldron.train.Trainer"])
  assert "(self)" in surface["kauldron.train.trainer_lib.Trainer.train"]
  checkpointer = surface["kauldron.checkpoints.checkpointer.Checkpointer"]
  assert re.search(r"max_to_keep: .* = 3\b", checkpointer)
  assert "frozen=True" in checkpointer
  for name in ("kauldron.checkpoints.SimpleCheckpointLoader",
               "kauldron.data.py.DataSource", "kauldron.konfig.ConfigDict",
               "kauldron.data.py.transform_utils.PyGrainCallableAdapter"):
    assert name in surface
  folder = "kauldron.checkpoints.checkpointer.CHECKPOINT_FOLDER_NAME"
  assert surface[folder] == "'checkpoints'"
  assert not any(" at 0x" in text for text in surface.values())
  assert "default=None" in surface["kauldron.konfig.placeholder"]  # Wrapped.


def test_a_name_that_a_section_uses_is_marked(tour, capsys, light):
  old, new = (json.loads(json.dumps(light[0])) for _ in range(2))
  old["surface"] = {"kauldron.checkpoints.Checkpointer": "(a)",
                    "kauldron.modules.ViT": "(a)", "kauldron.losses.L1": "()"}
  new["surface"] = {"kauldron.checkpoints.Checkpointer": "(a, b=1)",
                    "kauldron.losses.L1": "()"}
  assert tour.compare(old, new)
  out = capsys.readouterr().out
  used = "kauldron.checkpoints.Checkpointer (used here): (a) -> (a, b=1)\n"
  assert used in out
  assert "  kauldron.modules.ViT: (a) -> absent\n" in out
  assert "L1" not in out


# Real releases, each installed in seconds over this environment.


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
  """Returns a Python that sees a release in place of the pinned one."""

  def install(requirement):
    folder = tmp_path_factory.mktemp("layered")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / version / "site-packages"
    (site / "pinned.pth").write_text(sysconfig.get_path("purelib"))
    pip = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", requirement],
        capture_output=True, text=True, check=False)
    if pip.returncode != 0:
      pytest.skip(f"no registry could be reached: {pip.stderr[-200:]}")
    return python

  return install


def _tour(python, *arguments):
  """Runs the tour on an interpreter; returns its exit status and its text."""
  run = subprocess.run([python, ROOT / "kauldron_tour.py", *arguments],
                       capture_output=True, text=True, check=False)
  return run.returncode, run.stdout


def test_etils_1_14_is_patched_and_says_so(layered, tmp_path):
  python = layered("etils==1.14.0")
  path = tmp_path / "r.json"
  status, text = _tour(python, "--only", "0", "6", "--report", path)
  assert status == 0, text
  assert "patched etils.enp.array_spec =>" in text
  assert "etils.enp.array_spec" in json.loads(path.read_text())["patches"]

  status, text = _tour(python, "--only", "0", "6", "--no-patch")
  assert status == 1
  assert "0 PASS, 0 SKIP, 2 FAIL" in text
  assert "cause: etils < 1.15.0" in text


def test_kauldron_1_4_1_is_diagnosed(layered):
  status, text = _tour(layered("kauldron==1.4.1"))
  assert status == 1
  assert "cause: kauldron < 1.4.2" in text
  assert "FAIL config_tree: TypeError: unsupported operand type(s)" in text
  for name in ("config_references", "key_paths", "loss_and_metric"):
    assert f"FAIL {name}" not in text


def test_with_kauldron_1_3_everything_runs_that_can(layered):
  status, text = _tour(layered("kauldron==1.3.0"))
  assert status == 1
  assert "Not defined: " in text
  count = len(kauldron_tour.SECTIONS)
  assert f" FAIL of {count} sections" in text
  assert "This Kauldron is older than 1.4" in text.partition("[00/")[0]
  for name in ("where_we_are", "config_references"):
    assert f"FAIL {name}" not in text
