"""The tour as a command: options, exit statuses, and what it leaves behind."""

import ast
import json
import os
import pathlib
import re
import shlex
import sys
import tomllib

import kauldron_tour
import pytest

SCRIPT = pathlib.Path(kauldron_tour.__file__)


def _is_refused(process, *words):
  """Checks for exit status 2 and one sentence, with nothing left behind."""
  assert process.returncode == 2, process
  assert process.stdout == ""
  assert process.stderr.count("\n") == 1, process.stderr
  assert re.match(r"kauldron_tour: .+\.$", process.stderr), process.stderr
  for word in words:
    assert word in process.stderr
  assert process.left_behind == []


def test_whole_tour(whole_tour):
  process, _ = whole_tour
  assert process.stderr == ""
  assert process.returncode == 0, process.stdout
  last = len(kauldron_tour.SECTIONS)
  assert f"{last} PASS, 0 SKIP, 0 FAIL of {last} sections" in process.stdout
  assert max(map(len, process.stdout.splitlines())) <= 80
  assert process.stdout.endswith("sections\n"), "something came afterwards"
  assert process.left_behind == []


def test_the_pinned_packages_differ_in_nothing_from_themselves(
    script, whole_tour):
  process = script("--baseline", whole_tour[0].report_path)
  assert process.returncode == 0, process.stdout
  assert "\n0 facts changed\n" in process.stdout
  assert "\n0 public names changed\n" in process.stdout


def test_another_folder_and_a_space_in_the_path(script, tmp_path):
  copy = tmp_path / "a folder" / "kauldron_tour.py"
  copy.parent.mkdir()
  copy.write_text(SCRIPT.read_text())
  process = script("--only", "1", "6", path="a folder/kauldron_tour.py")
  assert process.returncode == 0, process
  assert process.stderr == ""
  assert os.listdir(copy.parent) == [copy.name]


def test_part_one_is_on_screen_before_tensorflow(script):
  process = script("--only", "1", "real_trainer")
  before, _, after = process.stdout.partition("Importing TensorFlow")
  assert "PASS" in before
  assert "PASS" in after


@pytest.mark.parametrize("name", ["0", "1", "2", "3", "4", "5"])
def test_part_one_does_not_import_tensorflow(script, name, tmp_path):
  probe = tmp_path / "sitecustomize.py"
  probe.write_text("import atexit, sys\natexit.register("
                   "lambda: print('tensorflow' in sys.modules))\n")
  process = script("--only", name, PYTHONPATH=str(tmp_path))
  assert process.returncode == 0, process
  assert process.stdout.endswith("\nFalse\n")


def test_list(script):
  process = script("--list")
  assert process.returncode == 0, process
  names = [line.split()[1] for line in process.stdout.splitlines()]
  assert names == kauldron_tour.SECTIONS


def test_only_and_skip_by_name_and_number(script):
  process = script("--only", "0", "key_paths", "4", "--skip", "shape_checker")
  assert process.returncode == 0, process
  ran = re.findall(r"^\[(\d+)/", process.stdout, re.MULTILINE)
  assert ran == ["00", "03"]


@pytest.mark.parametrize("arguments, word", [
    (["--only", "no_such_section"], "'no_such_section'"),
    (["--only", "99"], "'99'"),
    (["--skip", "no_such_section"], "'no_such_section'"),
    (["--only", "0", "--skip", "where_we_are"], "no section"),
    (["--no-such-option"], "--no-such-option"),
    (["--only"], "--only"),
    (["--only", "0", "--workdir", str(SCRIPT / "below_a_file")], "--workdir"),
])
def test_wrong_usage(script, arguments, word):
  _is_refused(script(*arguments), word)


def test_optimized_python(script):
  _is_refused(script("--list", python=["-O"]), "-O")


def test_kauldron_is_missing(script):
  """The command that is printed installs what the PEP 723 block asks for."""
  process = script(python=["-S"])
  _is_refused(process, "kauldron is not installed", "3.11 to 3.13")
  _, command, _ = process.stderr.split("`")
  comment = SCRIPT.read_text().partition("# /// script\n")[2]
  block = re.sub("^# ?", "", comment.partition("# ///\n")[0], flags=re.M)
  needed = tomllib.loads(block)["dependencies"]
  assert shlex.split(command) == [
      sys.executable, "-m", "pip", "install", *needed]
  assert kauldron_tour.REQUIREMENTS == needed


def test_an_old_python_is_told_which_will_do(script, tmp_path):
  ast.parse(SCRIPT.read_text(), feature_version=(3, 8))  # It gets that far.
  old = tmp_path / "sitecustomize.py"
  old.write_text("import sys\nsys.version_info = (3, 10, 13)\n")
  _is_refused(script(PYTHONPATH=str(tmp_path)), "3.11 to 3.13")


def test_a_failing_section_ends_with_1_and_the_others_run(script, tmp_path):
  broken = tmp_path / "renamed.py"
  broken.write_text(SCRIPT.read_text().replace(
      "cfg[1].learning_rate = 0.4", "cfg[1].learning_rate = 0.3"))
  process = script("--only", "1", "2", path=broken)
  assert process.returncode == 1, process
  assert process.stderr == ""
  assert "1 PASS, 0 SKIP, 1 FAIL of 2 sections" in process.stdout
  assert "assert updates[0] == updates[1]" in process.stdout
  assert process.left_behind == []
  assert "--only config_tree" in process.stdout


@pytest.mark.parametrize("strict, status", [([], 0), (["--strict"], 1)])
def test_a_skip_fails_only_when_strict(script, tmp_path, strict, status):
  skipping = tmp_path / "kauldron_tour.py"
  skipping.write_text(SCRIPT.read_text().replace(
      "  packages = ", '  raise unittest.SkipTest("no reason")\n  packages = '))
  process = script("--only", "0", *strict, path=skipping)
  assert process.returncode == status, process
  assert "0 PASS, 1 SKIP, 0 FAIL of 1 sections" in process.stdout
  assert "SKIP where_we_are: no reason" in process.stdout


@pytest.mark.parametrize("line, counts", [
    ('  show("cfg", cfg)\n', "1 PASS, 0 SKIP, 1 FAIL of 3 sections"),
    # Outside a section nothing would catch what is raised.
    ("  seconds = time.perf_counter() - start\n",
     "1 PASS, 0 SKIP, 0 FAIL of 3 sections"),
    ('  print(f"  {status} ', "1 PASS, 0 SKIP, 0 FAIL of 3 sections"),
])
def test_interrupt_ends_with_130_and_the_summary(
    script, tmp_path, line, counts):
  interrupted = tmp_path / "kauldron_tour.py"
  source = SCRIPT.read_text()
  assert source.count(line) == 1
  interrupted.write_text(source.replace(
      line, f"  os.kill(os.getpid(), 2)\n  time.sleep(1)\n{line}"))
  process = script("--only", "0", "1", "2", path=interrupted)
  assert process.returncode == 130, process
  assert process.stderr == ""
  assert counts in process.stdout
  assert ("FAIL config_tree: interrupted" in process.stdout) == (
      "1 FAIL" in counts)
  assert "[02/" not in process.stdout


def test_workdir_keeps_runs_and_pictures(script, tmp_path):
  foreign = tmp_path / "out" / "watched" / "foreign"
  foreign.parent.mkdir(parents=True)
  foreign.write_text("mine")
  process = script("--only", "2", "8", "9", "--workdir", "out")
  assert process.returncode == 0, process
  for name in ("schedule", "inner_layer", "sweep"):
    picture = tmp_path / "out" / f"{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
  (run,) = (tmp_path / "out").glob("watched_*")
  assert (run / "config.json").exists()
  assert list(foreign.parent.iterdir()) == [foreign]
  assert process.left_behind == []


def test_without_matplotlib_there_is_no_picture(script, tmp_path):
  lacking = tmp_path / "sitecustomize.py"
  lacking.write_text("import sys\nsys.modules['matplotlib'] = None\n")
  process = script("--only", "2", "--workdir", "out", PYTHONPATH=str(tmp_path))
  assert process.returncode == 0, process
  assert "  follows   | @@#*+-:. |" in process.stdout
  assert list((tmp_path / "out").iterdir()) == []


def test_kauldron_main_takes_the_tour_as_its_config(script, tmp_path):
  process = script(
      f"--cfg={SCRIPT}", f"--cfg.workdir={tmp_path / 'run'}",
      "--cfg.num_train_steps=3", "--cfg.optimizer.learning_rate=0.1",
      "--cfg.model=py::kauldron_tour.MLP(image='batch.image', width=8)",
      python=["-m"], path="kauldron.main", PYTHONDONTWRITEBYTECODE="1")
  assert process.returncode == 0, process.stderr
  cfg = json.loads((tmp_path / "run" / "config.json").read_text())
  assert cfg["num_train_steps"] == 3
  assert cfg["optimizer"]["learning_rate"] == 0.1
  assert cfg["model"] == {"__qualname__": "kauldron_tour:MLP",
                          "image": "batch.image", "width": 8}


def test_what_is_logged_after_the_quiet_import_is_seen(script, tmp_path):
  log = tmp_path / "log.py"
  log.write_text(f"""if True:
    import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
    import kauldron_tour as tour
    tour.import_quietly("kauldron.train")
    from absl import logging
    logging.error("a save failed")
  """)
  process = script(path=log)
  assert process.returncode == 0, process
  assert process.stderr == "ERROR:absl:a save failed\n"


def test_a_run_is_rebuilt_by_another_process(script, tmp_path):
  """One process trains and ends, another one knows the directory alone."""
  train = tmp_path / "train.py"
  train.write_text(f"""if True:
    import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
    import kauldron_tour as tour, numpy as np
    cfg = tour.get_config()
    cfg.workdir, cfg.num_train_steps = {str(tmp_path / 'run')!r}, 4
    cfg.checkpointer = tour.lazy_kd.ckpts.Checkpointer(save_interval_steps=4)
    trainer = tour.konfig.resolve(cfg)
    state, _ = tour.stepped(cfg, 4)
    tour.konfig.resolve(cfg).train()
    image = tour.held_out_images()["image"]
    preds = trainer.model.apply({{"params": state.params}}, image)["logits"]
    np.save({str(tmp_path / 'preds.npy')!r}, preds)
  """)
  rebuild = tmp_path / "rebuild.py"
  rebuild.write_text(f"""if True:
    import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
    import json, pathlib, kauldron_tour as tour, numpy as np
    path = pathlib.Path({str(tmp_path / 'run')!r})
    cfg = tour.konfig.ConfigDict(json.loads((path / "config.json").read_text()))
    trainer, state = tour.konfig.resolve(cfg), tour.restored(cfg)
    image = tour.held_out_images()["image"]
    preds = trainer.model.apply({{"params": state.params}}, image)["logits"]
    expected = np.load({str(tmp_path / 'preds.npy')!r})
    print("step", int(state.step), "equal", np.array_equal(preds, expected))
  """)
  assert script(path=train).returncode == 0
  assert "step 4 equal True" in script(path=rebuild).stdout
