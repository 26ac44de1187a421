"""The tour as a command: options, exit statuses, and what it leaves behind."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib

import kauldron_tour
import pytest

from conftest import SCRIPT
from conftest import outside
from conftest import train_project

SOURCE = SCRIPT.read_text()
TITLES = {name: function.title
          for name, function in kauldron_tour.SECTIONS.items()}
PART_ONE = list(TITLES)[:list(TITLES).index("real_trainer")]
TRIO = ["--only", "config_tree", "mock_modules", "config_errors"]


def changed(folder, names, statement):
  """Returns a tour in which one or more sections begin with a statement."""
  start = re.compile(rf'(\ndef (?:{names})\(\):\n  """.*?"""\n)', re.DOTALL)
  source, count = start.subn(rf"\1  {statement}\n", SOURCE)
  assert count == len(names.split("|"))
  path = folder / "kauldron_tour.py"
  path.write_text(source)
  return path


def is_refused(process, *words):
  """Checks for exit status 2 and one sentence, with nothing left behind."""
  assert process.returncode == 2, process
  assert "Summary" not in process.stdout
  assert re.fullmatch(r"kauldron_tour: .+\.\n", process.stderr), process.stderr
  for word in words:
    assert word in process.stderr
  assert process.left_behind == []


def is_readable(text):
  """Checks that lines fit on a screen, without spaces at their ends."""
  for line in text.splitlines():
    assert len(line) <= 80, line
    assert line == line.rstrip(), line


def summary_of(process):
  """Returns what was printed below the heading of the summary."""
  _, heading, summary = process.stdout.partition("\nSummary\n-------\n")
  assert heading, process
  return summary


def test_whole_tour(whole_tour):
  process, _ = whole_tour
  assert process.returncode == 0, process
  assert process.stderr == ""
  count = len(TITLES)
  assert process.stdout.endswith(
      f"\n{count} PASS, 0 SKIP, 0 FAIL of {count} sections\n")
  is_readable(process.stdout)
  assert process.left_behind == []


def test_part_one_is_on_screen_before_tensorflow(whole_tour):
  before, _, after = whole_tour[0].stdout.partition("Importing TensorFlow")
  assert re.findall(r"^PASS (\w+)", before, re.MULTILINE) == PART_ONE
  assert "\nPASS real_trainer" in after


def test_part_one_does_not_import_tensorflow(script, tmp_path):
  probe = tmp_path / "sitecustomize.py"
  probe.write_text("import atexit, sys\natexit.register("
                   "lambda: print('tensorflow' in sys.modules))\n")
  process = script("--only", *PART_ONE, PYTHONPATH=str(tmp_path))
  assert process.returncode == 0, process
  assert process.stdout.endswith("\nFalse\n")


# Options.


def test_list(script):
  process = script("--list")
  assert process.returncode == 0, process
  assert process.stderr == ""
  lines = [line.split(maxsplit=2) for line in process.stdout.splitlines()]
  assert lines == [[str(number), name, title]
                   for number, (name, title) in enumerate(TITLES.items())]


def test_only_and_skip_by_name_and_number(script):
  process = script("--only", "0", "mock_modules", "1", "--skip", "config_tree")
  assert process.returncode == 0, process
  ran = re.findall(r"^PASS (\w+)", process.stdout, re.MULTILINE)
  assert ran == ["where_we_are", "mock_modules"]


@pytest.mark.parametrize("arguments, word", [
    (["--only", "no_such_section"], "'no_such_section'"),
    (["--only", "99"], "'99'"),
    (["--skip", "no_such_section"], "'no_such_section'"),
    (["--only", "0", "--skip", "where_we_are"], "no section"),
    (["--no-such-option"], "--no-such-option"),
    (["--only"], "--only"),
    (["--workdir", str(SCRIPT / "below_a_file")], "below_a_file"),
    (["--workdir", "gs://bucket/tour"], "gs://bucket/tour"),
    (["--workdir", "s3://bucket/tour"], "s3://bucket/tour"),
    (["--workdir", "~no_such_user/tour"], "home"),
    (["--report", "no/such/folder/r.json"], "No such file"),
    (["--report", "."], "Is a directory"),
    (["--report", "gs://bucket/r.json"], "No such file"),
], ids=" ".join)
def test_wrong_usage(script, arguments, word, tmp_path):
  is_refused(script(*arguments), word)
  assert os.listdir(tmp_path) == ["tmp"]


def test_kauldron_is_missing(script):
  """The command that is printed is part of what the PEP 723 block asks for."""
  process = script(python=["-S"])
  is_refused(process, "kauldron is not installed", "3.11 to 3.13")
  _, command, _ = process.stderr.split("`")
  comment = SOURCE.partition("# /// script\n")[2].partition("# ///\n")[0]
  needed = tomllib.loads(re.sub("^# ?", "", comment, flags=re.MULTILINE))
  pip, install, *asked = shlex.split(command)
  assert (pip, install) == ("pip", "install")
  assert "kauldron" in asked[0]
  assert set(asked) <= set(needed["dependencies"])


def test_an_old_python_gets_as_far_as_the_sentence():
  ast.parse(SOURCE, feature_version=(3, 8))


def test_workdir_keeps_runs_and_pictures(forked, tmp_path):
  foreign = tmp_path / "out" / "real_trainer" / "foreign"
  foreign.parent.mkdir(parents=True)
  foreign.write_text("mine")
  for count in (1, 2):
    process = forked("--only", "config_references", "real_trainer",
                     "--workdir", "out")
    assert process.returncode == 0, process
    assert process.stderr == ""
    assert process.left_behind == []
    runs = list((tmp_path / "out").glob("real_trainer_*"))
    assert len(runs) == count
    assert all((run / "config.json").exists() for run in runs)
  picture = tmp_path / "out" / "real_trainer.png"
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert list(foreign.parent.iterdir()) == [foreign]


@pytest.mark.parametrize(
    "name", ["#", "%20", "\u00e9\u2713", "?", "*", "{}", "'"])
def test_workdir_of_any_name(forked, tmp_path, name):
  process = forked("--only", "rebuilt_run", "--workdir", name)
  assert process.returncode == 0, process
  assert list((tmp_path / name).glob("moved_*"))


def test_two_tours_at_once_in_one_work_directory(tmp_path):
  command = [sys.executable, SCRIPT, "--only", "mock_modules", "real_trainer",
             "--workdir", tmp_path]
  environ = outside(tmp_path)
  with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as first:
    second = subprocess.run(command, env=environ, capture_output=True,
                            text=True, check=False)
    first.communicate()
  assert (second.returncode, second.stderr) == (0, "")
  assert first.returncode == 0
  assert len(list(tmp_path.glob("real_trainer_*"))) == 2


# What fails.


def test_a_failing_section_ends_with_1_and_the_others_run(script, tmp_path):
  path = changed(tmp_path, "config_tree", 'konfig.resolve(konfig.ConfigDict('
                 '{"__qualname__": "optax:no_such_name"}))')
  process = script(*TRIO, "--report", "r.json", path=path)
  assert process.returncode == 1, process
  assert process.stderr == ""
  assert process.left_behind == []
  summary = summary_of(process)
  is_readable(summary)
  assert "\n2 PASS, 0 SKIP, 1 FAIL of 3 sections\n" in summary
  assert "no_such_name" in summary
  assert "in config_tree: konfig.resolve(" in summary
  assert "again: python kauldron_tour.py --only config_tree\n" in summary

  sections = json.loads((tmp_path / "r.json").read_text())["sections"]
  assert sections["mock_modules"]["status"] == "PASS"
  failed = sections["config_tree"]
  assert failed["status"] == "FAIL"
  assert failed["reason"].startswith("AttributeError: ")
  assert "konfig.resolve(" in failed["where"]
  assert re.match(r"(kauldron|optax)/\S+\.py:\d+ in \w+", failed["library"])


def test_causes_are_grouped(script, tmp_path):
  """One cause, with the sections that it took, our line and the library's."""
  path = changed(tmp_path, "|".join(TRIO[1:]), "jnp.zeros(3).reshape(2)")
  process = script(*TRIO, path=path)
  assert process.returncode == 1, process
  summary = summary_of(process)
  is_readable(summary)
  assert summary.count("FAIL: TypeError: cannot reshape array") == 1
  assert summary.count("in config_tree: jnp.zeros(3).reshape(2)\n") == 1
  assert len(re.findall(r"^jax/\S+\.py:\d+ in \w+$", summary, re.M)) == 1
  assert summary.count("again: ") == 1
  assert "--only config_tree mock_modules config_errors" in summary


def test_assertions_without_a_message_are_not_one_cause(script, tmp_path):
  path = changed(tmp_path, "|".join(TRIO[1:3]), "assert SEED")
  summary = summary_of(script(*TRIO, path=path))
  assert summary.count("again: ") == 2


def break_import(folder, name):
  """Makes an import of a module fail; returns the PYTHONPATH that does."""
  (folder / "sitecustomize.py").write_text(f"""if True:
    import sys
    class Broken:
      @staticmethod
      def find_spec(name, path=None, target=None):
        if name == {name!r}:
          raise AttributeError("this is gone")
    sys.meta_path.insert(0, Broken)
  """)
  return str(folder)


@pytest.mark.parametrize("only", [[], TRIO], ids=["all", "three"])
def test_an_import_that_all_sections_need(script, tmp_path, only):
  path = break_import(tmp_path, "kauldron.konfig")
  process = script(*only, "--report", "r.json", PYTHONPATH=path)
  assert process.returncode == 1, process
  assert process.stderr == ""
  assert process.left_behind == []
  summary = summary_of(process)
  is_readable(summary)
  names = only[1:] or list(TITLES)
  count = len(names)
  assert f"\n0 PASS, 0 SKIP, {count} FAIL of {count} sections\n" in summary
  assert summary.count("AttributeError: this is gone") == 1
  assert "from kauldron import kd, konfig" in summary
  command = summary.partition("again: ")[2].split()
  assert command == ["python", "kauldron_tour.py", "--only", *names]
  sections = json.loads((tmp_path / "r.json").read_text())["sections"]
  assert list(sections) == names
  assert {result["status"] for result in sections.values()} == {"FAIL"}


def test_a_definition_between_sections_fails_those_to_come(script, tmp_path):
  title = f'@section("{TITLES["mock_modules"]}")\n'
  assert SOURCE.count(title) == 1
  path = tmp_path / "kauldron_tour.py"
  path.write_text(SOURCE.replace(title, f"jax.no_such_name\n\n\n{title}"))
  process = script(*TRIO, path=path)
  assert process.returncode == 1, process
  assert process.stderr == ""
  summary = summary_of(process)
  assert "\n1 PASS, 0 SKIP, 2 FAIL of 3 sections\n" in summary
  assert summary.count("no_such_name") == 2, "the error, and our line"
  assert "--only mock_modules config_errors\n" in summary


@pytest.mark.parametrize("strict, status", [([], 0), (["--strict"], 1)])
def test_a_skip_fails_only_when_strict(script, tmp_path, strict, status):
  path = changed(tmp_path, "mock_modules",
                 'raise unittest.SkipTest("no reason")')
  process = script(*TRIO, *strict, path=path)
  assert process.returncode == status, process
  assert "\n2 PASS, 1 SKIP, 0 FAIL of 3 sections\n" in process.stdout
  assert "\nSKIP: no reason\n" in process.stdout


# Ctrl-C, and pipes.


def test_interrupted_in_a_section(script, tmp_path):
  path = changed(tmp_path, "mock_modules",
                 "os.kill(os.getpid(), 2); time.sleep(9)")
  process = script(*TRIO, "--report", "r.json", path=path)
  assert process.returncode == 130, process
  assert process.stderr == ""
  assert process.left_behind == []
  assert "\n1 PASS, 0 SKIP, 1 FAIL of 2 sections\n" in process.stdout
  assert "\nFAIL: interrupted\n" in process.stdout
  sections = json.loads((tmp_path / "r.json").read_text())["sections"]
  assert list(sections) == ["config_tree", "mock_modules"]
  assert sections["mock_modules"]["reason"] == "interrupted"


def test_interrupted_between_sections(script, tmp_path):
  path = tmp_path / "kauldron_tour.py"
  title = f'@section("{TITLES["mock_modules"]}")\n'
  path.write_text(SOURCE.replace(
      title, f"os.kill(os.getpid(), 2)\ntime.sleep(9)\n\n\n{title}"))
  process = script(*TRIO, path=path)
  assert process.returncode == 130, process
  assert process.stderr == ""
  assert "\n1 PASS, 0 SKIP, 0 FAIL of 1 sections\n" in process.stdout
  assert process.left_behind == []


# Reports.


def test_report(whole_tour):
  _, report = whole_tour
  assert report["schema"] == 2
  assert report["versions"]["kauldron"] in ("1.4.2", "1.4.4")
  assert report["patches"] == {}
  assert {name: result["title"] for name, result in
          report["sections"].items()} == TITLES
  for result in report["sections"].values():
    assert result["status"] == "PASS"
    assert result["seconds"] >= 0
    assert result["reason"] == result["where"] == result["library"] == ""


def test_report_to_a_file_that_exists(script, tmp_path):
  report = tmp_path / "r.json"
  report.write_text("x" * 10**6)
  link = tmp_path / "link.json"
  link.symlink_to(report)
  assert script("--only", "mock_modules", "--report", link).returncode == 0
  assert link.is_symlink()
  sections = json.loads(report.read_text())["sections"]
  assert list(sections) == ["mock_modules"]


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/dev/stderr"])
def test_report_to_a_stream_that_is_a_file(tmp_path, target):
  out = tmp_path / "out"
  with open(out, "w") as file:
    subprocess.run(
        [sys.executable, SCRIPT, "--only", "mock_modules", "--report", target],
        env=outside(tmp_path), stdout=file, stderr=file, check=True)
  text, brace, report = out.read_text().partition("\n{\n")
  assert "1 PASS" in text
  assert list(json.loads(brace + report)["sections"]) == ["mock_modules"]
  assert os.path.islink("/dev/stdout")


def test_report_to_a_device(script):
  process = script("--only", "mock_modules", "--report", "/dev/null")
  assert (process.returncode, process.stderr) == (0, ""), process
  assert not os.path.isfile("/dev/null")


def test_report_to_a_full_device(script):
  process = script("--only", "mock_modules", "--report", "/dev/full")
  assert process.returncode == 2, process
  assert "1 PASS" in process.stdout
  assert re.fullmatch(r"kauldron_tour: .*No space left.*\.\n", process.stderr)


def test_report_to_a_named_pipe(script, tmp_path):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  read = []
  thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
  thread.start()
  process = script("--only", "mock_modules", "--report", pipe)
  thread.join(timeout=10)
  assert process.returncode == 0, process
  assert list(json.loads(read[0])["sections"]) == ["mock_modules"]


# Other ways to start it.


FAILING = 'raise ValueError("on purpose")'


@pytest.mark.parametrize("launcher", [
    "python -m kauldron_tour", "python -m runpy kauldron_tour",
    "python -i kauldron_tour.py", "python -m IPython kauldron_tour.py --"])
def test_launchers_hand_the_status_on(tmp_path, launcher):
  changed(tmp_path, "mock_modules", FAILING)
  command = launcher.replace("python", sys.executable, 1).split()
  process = subprocess.run(
      [*command, *TRIO], cwd=tmp_path,
      env=outside(tmp_path) | {"IPYTHONDIR": str(tmp_path / "ipython")},
      input="import sys; sys.exit(len(RESULTS) == 3)\n",
      capture_output=True, text=True, check=False)
  assert process.returncode == 1, process
  assert process.stdout.count("1 FAIL of 3 sections") == 1


def test_a_failure_in_a_notebook_is_raised_at_the_end(tmp_path):
  """So what executes notebooks does not end with 0."""
  path = changed(tmp_path, "mock_modules", FAILING)
  first, second = SOURCE.index("\n# %% [markdown]\n# # Part II"), SOURCE.index(
      "\n# %% The command line")
  short = path.read_text()
  extra = len(short) - len(SOURCE)
  short = short[:first + extra] + short[second + extra:]
  process = subprocess.run(  # As in a notebook, the file has no name.
      [sys.executable], input=short, cwd=tmp_path, env=outside(tmp_path),
      capture_output=True, text=True, check=False)
  assert process.returncode == 1, process
  assert f"1 FAIL of {len(PART_ONE)} sections" in process.stdout
  assert process.stderr.endswith("\nRuntimeError: A section failed.\n")


@pytest.mark.parametrize("name", ["renamed.py", "link.py", "a folder/tour.py"])
def test_another_name(forked, tmp_path, name):
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  if name == "link.py":
    path.symlink_to(SCRIPT)
  else:
    shutil.copy(SCRIPT, path)
  process = forked("--only", "real_trainer", "project", path=name)
  assert process.returncode == 0, process
  assert process.stderr == ""
  assert os.listdir(path.parent).count("__pycache__") == 0


def test_kauldron_main_trains_the_project(tmp_path):
  """With overrides as in section `project`, and the older way of arguments."""
  cfg = train_project(
      tmp_path, kauldron_tour.PROJECT_FILE, kauldron_tour.CONFIG_FILE,
      "--cfg=configs/my_experiment.py:width=8", "--cfg.num_train_steps=3",
      "--cfg.optimizer=py::optax.sgd(learning_rate=0.1)")
  assert cfg["num_train_steps"] == 3
  assert cfg["model"]["width"] == 8
  assert cfg["optimizer"] == {
      "__qualname__": "optax:sgd", "learning_rate": 0.1}
