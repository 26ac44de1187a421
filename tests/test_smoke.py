"""What `make smoke` says of an upgrade, and what it does not believe."""

import copy
from importlib import metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest
import smoke

ROOT = pathlib.Path(smoke.__file__).resolve().parents[1]
SECTIONS = ("where_we_are", "config_tree", "real_trainer")


# Two reports, made by hand.


def outcome(status="PASS", reason="", facts=(), where="", library=""):
  return {"title": "a title", "status": status, "seconds": 0.1,
          "reason": reason, "facts": dict(facts), "where": where,
          "library": library}


def report(versions=(), tests=(), **sections):
  return {"schema": 2, "python": "3.11.7 (main)", "platform": "linux",
          "devices": ["cpu:0"], "versions": dict(versions), "patches": {},
          "sections": sections, "tests": dict(tests)}


def facts_that_differ(old, new):
  found = smoke.compare(report(a=outcome(facts={"x": old})),
                        report(a=outcome(facts={"x": new})))
  return found.facts


@pytest.mark.parametrize("old, new", [
    (1.0, 1.0005), (0.0, 0.0), (float("nan"), float("nan")), ("a", "a"),
    (3, 3), (True, True),
    ("/tmp/kauldron_tour_x1/run_a", "/tmp/kauldron_tour_y2/run_b"),
    ("File /a/site-packages/jax/x.py", "File /b/c/site-packages/jax/x.py"),
    ("<object at 0x7f00aa>", "<object at 0x7f00bb>"),
])
def test_same_fact(old, new):
  assert facts_that_differ(old, new) == []


@pytest.mark.parametrize("old, new", [
    (1.0, 1.01), (0.0, 1e-9), (1, 2), (True, 1.0), (1, 1.0), ("a", "b"),
    (1.0, float("inf")), (1.0, float("nan")),
])
def test_changed_fact(old, new):
  assert facts_that_differ(old, new) == [("a: x", old, new)]


def test_new_and_absent_facts():
  found = smoke.compare(report(a=outcome(facts={"x": 1})),
                        report(a=outcome(facts={"y": 2})))
  assert found.facts == [("a: x", 1, "(absent)"), ("a: y", "(absent)", 2)]


def test_facts_that_a_failure_did_not_reach_are_no_news():
  failed = outcome("FAIL", "ValueError: no", {"x": 2})
  found = smoke.compare(report(a=outcome(facts={"x": 1, "y": 1})),
                        report(a=failed))
  assert found.facts == [("a: x", 1, 2)]


def test_version_is_no_fact():
  old = report({"jax": "0.9"}, a=outcome(facts={"jax": "0.9"}))
  new = report({"jax": "0.10"}, a=outcome(facts={"jax": "0.10"}))
  found = smoke.compare(old, new)
  assert found.versions == ["jax 0.9 -> 0.10"]
  assert found.facts == []


@pytest.mark.parametrize("old, new, broken, both, statuses", [
    ("PASS", "PASS", 0, 0, 0),
    ("PASS", "FAIL", 1, 0, 0),
    ("SKIP", "FAIL", 1, 0, 0),
    (None, "FAIL", 1, 0, 0),
    ("FAIL", "FAIL", 0, 1, 0),
    ("FAIL", "PASS", 0, 0, 1),
    ("PASS", "SKIP", 0, 0, 1),
    ("PASS", None, 0, 0, 1),
    (None, "PASS", 0, 0, 1),
])
@pytest.mark.parametrize("is_test", [False, True], ids=["section", "test"])
def test_statuses(old, new, broken, both, statuses, is_test):
  def made(status):
    entry = {"a": outcome(status, "why")} if status else {}
    return report(tests=entry) if is_test else report(**entry)

  found = smoke.compare(made(old), made(new))
  assert len(found.broken) == broken
  assert len(found.failing_in_both) == both
  assert len(found.statuses) == statuses


def test_cause_is_told_once():
  place = "jax/a.py:1 in f"
  failed = outcome("FAIL", "TypeError: of shape (3,)", library=place)
  other = outcome("FAIL", "TypeError: of shape (4,)", library=place)
  third = outcome("FAIL", "ValueError: another")
  groups = smoke.groups({"a": failed, "b": third, "c": other})
  assert [names for _, names in groups] == [["a", "c"], ["b"]]


@pytest.mark.parametrize("old, new, lines", [
    ("a", "b", ["  - a", "  + b"]),
    ("one\ntwo\nthree", "one\n2\nthree", ["  - two", "  + 2"]),
    ("x" * 99 + "old", "x" * 99 + "new",
     ["  - ..." + "x" * 20 + "old", "  + ..." + "x" * 20 + "new"]),
    (1, 2.5, ["  - 1", "  + 2.5"]),
], ids=["word", "line", "end", "number"])
def test_difference_is_all_that_is_shown(old, new, lines):
  assert smoke.difference(old, new) == lines


def test_everything_at_once_fits_the_screen(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(smoke, "OUT", tmp_path)
  many = {f"section_{i}": outcome(facts={"x": "word " * 99}) for i in range(50)}
  old = report(**many)
  new = copy.deepcopy(old)
  for i, section in enumerate(new["sections"].values()):
    section["facts"]["x"] = "other " * 99
    if i % 2:
      section.update(outcome("FAIL", f"Error{i}: " + "long " * 99,
                             where="tour.py:1 in f: " + "code " * 99,
                             library="jax/_src/a.py:1 in g"))
  names = {f"kauldron.a.name_{i}(parameter)": "was removed" for i in range(99)}
  news = smoke.News(["jax 1 -> 2"] * 30, ["a cause " * 30] * 30, names, ["b"])
  assert smoke.conclude(old, new, news) == 1
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) + smoke.PROGRESS <= 40
  assert max(map(len, lines)) <= 80
  assert "FAILS: 25 of 50 sections" in lines[0]
  for title in ("What fails", "Why", "What behaves otherwise",
                "Kauldron's API (* used by the tour)"):
    assert title in lines
  text = (tmp_path / "report.md").read_text()
  assert text.count("a cause") >= 30
  assert all(name in text for name in names)


@pytest.mark.parametrize("text", [
    f'''
  File "{ROOT}/.venv/lib/python3.11/site-packages/pluggy/a.py", line 1, in call
    function()
  File "{ROOT}/tests/test_kauldron.py", line 12, in test_x
    train()
  File "{ROOT}/.venv/lib/python3.11/site-packages/jax/b.py", line 34, in g
    raise ValueError
''', '''
tests/test_kauldron.py:12: in test_x
    train()
.smoke/env/lib/python3.11/site-packages/jax/b.py:34: in g
    raise ValueError
'''], ids=["python", "pytest"])
def test_places_of_a_traceback(text):
  assert smoke.places(text) == {
      "where": "test_kauldron.py:12 in test_x: train()",
      "library": "jax/b.py:34 in g"}


def test_what_calls_our_line_is_no_librarys_line():
  text = f'''
  File "/x/site-packages/pluggy/a.py", line 1, in call
    function()
  File "{ROOT}/tests/test_kauldron.py", line 12, in test_x
    assert 1 == 2
'''
  assert smoke.places(text)["library"] == ""


# Comparing by the command line.


@pytest.fixture
def compared(tmp_path):
  """Runs smoke.py on two reports, or texts, from another folder."""
  shutil.copytree(ROOT / "tests", tmp_path / "tests",
                  ignore=lambda folder, names: set(names) - {"smoke.py"})

  def run(*contents):
    for name, content in zip(("old", "new"), contents, strict=True):
      text = content if isinstance(content, str) else json.dumps(content)
      (tmp_path / f"{name}.json").write_text(text)
    return subprocess.run(
        [sys.executable, "-I", tmp_path / "tests" / "smoke.py", "old.json",
         "new.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False)

  return run


@pytest.mark.parametrize("new, status, text", [
    (report(a=outcome()), 0, "PASSES: of 1 section none fails"),
    (report(a=outcome("FAIL", "KeyError: 'x'")), 1, "KeyError: 'x'"),
    (report(a=outcome(facts={"x": 1})), 3, "a: x"),
    (report(a=outcome("SKIP", "no disk")), 3, "a: PASS -> SKIP no disk"),
], ids=["same", "fails", "fact", "skipped"])
def test_exit_status_of_two_reports(compared, new, status, text):
  process = compared(report(a=outcome()), new)
  assert process.returncode == status
  assert text in process.stdout
  assert f"exit status {status}: " in process.stdout.splitlines()[-1]


def test_what_fails_in_both_is_not_the_candidates_fault(compared):
  failed = report(a=outcome("FAIL", "KeyError: 'x'"))
  process = compared(failed, failed)
  assert process.returncode == 0
  assert "not the candidate's fault\n  a\n" in process.stdout


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', ""])
def test_no_report(compared, text):
  process = compared(text, report())
  assert process.returncode == 2
  assert process.stderr.startswith("smoke: old.json ")
  assert process.stderr.count("\n") == 1


# What is asked for.


@pytest.mark.parametrize("text, candidates", [
    ("jax<0.10", ["jax<0.10"]),
    ("einops >= 0.8.1", ["einops >= 0.8.1"]),
    ("jax==0.10.1 'flax >= 0.12'", ["jax==0.10.1", "flax >= 0.12"]),
    ('etils[enp]; python_version > "3"', ['etils[enp]; python_version > "3"']),
    ("", []),
])
def test_candidates_of_one_text(text, candidates):
  assert smoke.parsed(text) == candidates


@pytest.mark.parametrize("candidates, word", [
    ([], "name a candidate"),
    (["-e", "."], "an option of pip"),
    (["./no_such_folder"], "there is no such file"),
    (["jax=0.1"], "no candidate"),
    (["etils; python_version < '3'"], "does not apply to this Python"),
])
def test_no_candidate(candidates, word):
  with pytest.raises(smoke.Untried, match=word):
    smoke.checked(candidates)


# Kauldron's API.


def test_names_that_changed(tmp_path, monkeypatch):
  old = """
import dataclasses
def renamed(a): ...
def shorter(a, b): ...
def other_default(a=1): ...
class Loss:
  weight: float = 1.0
@dataclasses.dataclass
class Trainer:
  seed: int = 0
  def train(self, steps): ...
"""
  new = old.replace("renamed", "as_it_is_now").replace("(a, b)", "(a)")
  new = new.replace("a=1", "a=2").replace("1.0", "2.0").replace("= 0", "= 42")
  new = new.replace("train(self, steps)", "train(self)")
  for name, text in (("old", old), ("new", new)):
    package = tmp_path / name / "kauldron"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from kauldron.train import renamed\n")
    (package / "train.py").write_text(text)
  broken, added = smoke.api(tmp_path / "old", tmp_path / "new")
  assert broken == {
      "kauldron.train.renamed": "was removed",
      "kauldron.train.shorter(b)": "was removed",
      "kauldron.train.other_default(a)": "default was changed: 1 -> 2",
      "kauldron.train.Loss.weight": "value: 1.0 -> 2.0",
      "kauldron.train.Trainer(seed)": "default was changed: 0 -> 42",
      "kauldron.train.Trainer.train(steps)": "was removed",
  }
  assert added == ["kauldron.train.as_it_is_now"]

  # What the tour uses comes first, and is marked.
  (tmp_path / "tour.py").write_text("kd.train.Trainer(seed=1).train(steps=2)")
  monkeypatch.setattr(smoke, "TOUR", tmp_path / "tour.py")
  monkeypatch.setattr(smoke, "TESTS", tmp_path / "none.py")
  items = [item[0] for item in smoke.name_items(broken, added, 6)]
  assert items[0].startswith("* train.Trainer(seed) default")
  assert items[1].startswith("* train.Trainer.train(steps) was removed")
  assert items[-1] == "  1 added: train.as_it_is_now"
  assert not any(item.startswith("*") for item in items[2:])


# Real releases, each installed in seconds over this environment.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """A wheel of an older release, fetched; without a registry all is skipped."""
  folder = tmp_path_factory.mktemp("wheel")
  run = subprocess.run(
      [sys.executable, smoke.pip_command(), "download", "--quiet", "--no-deps",
       "--dest", folder, "einops==0.8.0"],
      capture_output=True, text=True, check=False)
  if run.returncode != 0:
    pytest.skip(f"no registry could be reached: {run.stderr[-200:]}")
  return next(folder.iterdir())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  """A copy of the tour and smoke.py, where the baseline's report is kept."""
  folder = tmp_path_factory.mktemp("checkout")
  (folder / "tests").mkdir()
  for name in ("kauldron_tour.py", "Makefile", "requirements.txt",
               "tests/smoke.py"):
    shutil.copy(ROOT / name, folder / name)
  (folder / ".venv").symlink_to(sys.prefix)
  return folder


@pytest.fixture
def upgrade(checkout, wheel):
  """Tries candidates with a few sections; returns the finished process."""
  del wheel

  def run(*candidates, only=SECTIONS, prefix=(), **environ):
    process = subprocess.run(
        [*prefix, sys.executable, "tests/smoke.py", *candidates,
         "--only", *only],
        cwd=checkout, env=os.environ | environ, capture_output=True, text=True,
        check=False)
    lines = process.stdout.splitlines()
    assert len(lines) <= 40, process.stdout
    assert max(map(len, lines[2:]), default=0) <= 80, process.stdout
    status = f"exit status {process.returncode}: "
    assert lines[-1].startswith(status), process.stderr
    process.text = " ".join(process.stdout.split())
    return process

  return run


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pins of 3.11")
@pytest.mark.parametrize("candidate, status, texts", [
    ("etils==1.14.0", 3, [
        "etils 1.15.0 -> 1.14.0",
        "where_we_are: patches - none + etils.enp.array_spec"]),
    ("kauldron==1.4.1", 1, [
        "FAILS: 1 of 3 sections",
        "AttributeError: module 'jax._src.random' has no attribute",
        "library: kauldron/random/random.py:237 in _mock_jax",
        "kauldron/random/random.py:237 uses jax._src.random._check_prng_key, "
        "which jax 0.10.2 does not have: move kauldron",
        "konfig.configdict_base.ConfigDict.__or__ was removed"]),
    ("ml-collections==0.1.1", 1, [
        "3 sections: where_we_are, config_tree, real_trainer",
        "library: kauldron/konfig/configdict_base.py:81 in __init__",
        "kauldron/konfig/configdict_base.py:88 passes sort_keys, which "
        "ml_collections.ConfigDict.__init__ does not take: "
        "move ml-collections"]),
    ("etils==1.10.0", 1, [
        "3 sections: where_we_are, config_tree, real_trainer",
        "kauldron/konfig/fake_import_utils.py:365 uses etils.edc.ContextStack, "
        "which etils 1.10.0 does not have: move etils"]),
    ("numpy==1.26.4", 1, [
        "FAILS: 3 of 3 sections",
        "jax/_src/dtypes.py:639 uses numpy.dtypes.StringDType, which numpy "
        "1.26.4 does not have: move numpy",
        "jax 0.10.2 demands numpy>=2.0, here is 1.26.4"]),
    ("orbax-checkpoint==0.11.13", 1, [
        "FAILS: 1 of 3 sections",
        "uses jax.experimental.layout.DeviceLocalLayout, which jax 0.10.2 does "
        "not have: move orbax-checkpoint",
        "kauldron/checkpoints/checkpointer.py:214 uses "
        "orbax.checkpoint.checkpoint_managers.PreservationPolicy"]),
])
def test_release(upgrade, candidate, status, texts):
  process = upgrade(candidate)
  assert process.returncode == status, process.stdout
  for text in texts:
    assert text in process.text, process.stdout


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory):
  """The sources of the installed Kauldron, as a folder that pip can build."""
  folder = tmp_path_factory.mktemp("source")
  installed = pathlib.Path(sysconfig.get_path("purelib"), "kauldron")
  shutil.copytree(installed, folder / "kauldron",
                  ignore=shutil.ignore_patterns("__pycache__"))
  version = metadata.version("kauldron")
  (folder / "pyproject.toml").write_text(f"""
[build-system]
requires = ["flit_core"]
build-backend = "flit_core.buildapi"
[project]
name = "kauldron"
version = "{version}"
description = "The installed one, with one function changed."
""")
  changed = folder / "kauldron" / "konfig" / "utils.py"
  text = changed.read_text()
  assert text.count("required: bool = False") == 1
  changed.write_text(text.replace("required: bool = False",
                                  "required: bool = True"))
  return folder


def test_source_folder_with_one_function_changed(upgrade, source_folder):
  process = upgrade(str(source_folder), only=["where_we_are"])
  assert process.returncode == 3, process.stdout
  assert "with 1 file changed: kauldron/konfig/utils.py" in process.text
  line = "konfig.utils.placeholder(required) default was changed: False -> True"
  assert line in process.text


def test_what_fails_already_is_not_the_candidates_fault(checkout, upgrade):
  tour = checkout / "kauldron_tour.py"
  text = tour.read_text()
  line = '  show("cfg", cfg)\n'
  assert text.count(line) >= 1
  tour.write_text(text.replace(line, "  cfg.no_such_method()\n", 1))
  try:
    process = upgrade("einops==0.8.0", only=["where_we_are", "config_tree"])
  finally:
    tour.write_text(text)
  assert process.returncode == 0, process.stdout
  assert "Fails with the pinned packages too" in process.text
  assert "einops" in process.text


def test_tests_of_kauldron_run_too(checkout, wheel):
  """Both environments: one case fails in the candidate, one in both."""
  del wheel
  (checkout / "tests" / "test_kauldron.py").write_text("""
import importlib.metadata
import pytest
def test_version():
  assert importlib.metadata.version("einops") != "0.8.0", "it is the old one"
@pytest.mark.parametrize("n", [1, 2])
def test_number(n):
  assert n == 1
def test_skipped():
  pytest.skip("no reason")
""")
  tour = checkout / "kauldron_tour.py"
  text = tour.read_text()
  tour.write_text(
      "import json, sys\n"
      "json.dump({'schema': 2, 'python': '3', 'sections': {}, 'patches': {},"
      " 'versions': {}, 'devices': []}, open(sys.argv[2], 'w'))\n")
  try:
    process = subprocess.run(
        [sys.executable, "tests/smoke.py", "einops==0.8.0"], cwd=checkout,
        capture_output=True, text=True, check=False)
  finally:
    tour.write_text(text)
    (checkout / "tests" / "test_kauldron.py").unlink()
  assert process.returncode == 1, process.stdout + process.stderr
  assert "FAILS: 1 of 4 tests" in process.stdout
  assert "AssertionError: it is the old one" in process.stdout
  assert "our line: test_kauldron.py:5 in test_version" in process.stdout
  assert "not the candidate's fault\n  test_number[2]\n" in process.stdout


# What is installed is what was asked for, whatever the caller's settings.


@pytest.fixture
def changed(tmp_path, monkeypatch, wheel):
  """Installs candidates and verifies them; returns name -> version."""
  del wheel
  monkeypatch.setattr(smoke, "OUT", tmp_path / ".smoke")

  def run(*candidates):
    _, after, changes = smoke.prepared(candidates, smoke.clean_environ())
    return {name: after.distributions[name]["version"] for name in changes}

  return run


def test_two_requirements_at_once(changed):
  found = changed("einops==0.8.0", "mediapy<1.2.3")
  assert found["einops"] == "0.8.0"
  assert "mediapy" in found


def test_extras_and_markers(changed):
  found = changed("etils[epath]==1.14.0; python_version >= '3'")
  assert found == {"etils": "1.14.0"}


def test_wheel(changed, wheel):
  assert changed(str(wheel)) == {"einops": "0.8.0"}


def test_archive(changed, wheel, tmp_path):
  subprocess.run(
      [sys.executable, smoke.pip_command(), "download", "--quiet", "--no-deps",
       "--no-binary", "mediapy", "--dest", tmp_path, "mediapy==1.2.0"],
      check=True)
  archive = next(tmp_path.glob("mediapy*"))
  assert changed(str(archive)) == {"mediapy": "1.2.0"}


@pytest.mark.parametrize("candidate", ["einops>=0.8.1", "etils[enp]>1.0"])
def test_request_that_changes_nothing(changed, candidate):
  with pytest.raises(smoke.Untried, match="changes nothing"):
    changed(candidate)


@pytest.mark.parametrize("candidate, word", [
    ("einops==99", "No matching|Could not find a version"),
    ("git+https://github.invalid/a/b", "VCS address needs"),
])
def test_request_that_cannot_be_met(changed, candidate, word):
  with pytest.raises(smoke.Untried, match=word):
    changed(candidate)


def test_settings_that_name_a_folder(changed, monkeypatch, tmp_path):
  """One that had an effect would have it beside the others, too."""
  folder = tmp_path / "elsewhere"
  (folder / "einops").mkdir(parents=True)
  (folder / "einops" / "__init__.py").write_text("__version__ = 'another'")
  (folder / "einops-0.7.dist-info").mkdir()
  (folder / "einops-0.7.dist-info" / "METADATA").write_text(
      "Metadata-Version: 2.1\nName: einops\nVersion: 0.7\n")
  before = sorted(folder.rglob("*"))
  for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH"):
    monkeypatch.setenv(name, str(folder))
  config = tmp_path / "pip.conf"
  config.write_text(f"[install]\ntarget = {folder}\nno-deps = yes\n")
  monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
  assert changed("einops==0.8.0") == {"einops": "0.8.0"}
  assert sorted(folder.rglob("*")) == before


def test_settings(changed, monkeypatch):
  """One that had an effect would have it beside the others, too."""
  for name, value in {
      "PIP_DRY_RUN": "1", "PIP_USER": "1", "PIP_NO_DEPS": "1",
      "PIP_REQUIRE_VIRTUALENV": "1", "PIP_CONSTRAINT": "/no/such/file",
      "PYTHONHOME": "/no/such/folder", "UV_SYSTEM_PYTHON": "1"}.items():
    monkeypatch.setenv(name, value)
  assert changed("einops==0.8.0") == {"einops": "0.8.0"}


def test_where_packages_come_from_is_kept(monkeypatch, tmp_path):
  config = tmp_path / "pip.conf"
  config.write_text("[global]\nindex-url = https://a.invalid/simple\n"
                    "[install]\ntrusted-host = a.invalid\nuser = yes\n")
  monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
  monkeypatch.setenv("PIP_PROXY", "http://b.invalid")
  found = smoke.pip_settings(sys.executable, smoke.pip_command())
  assert found["PIP_INDEX_URL"] == "https://a.invalid/simple"
  assert found["PIP_TRUSTED_HOST"] == "a.invalid"
  assert found["PIP_PROXY"] == "http://b.invalid"
  assert "PIP_USER" not in found


def test_package_that_would_be_imported_from_elsewhere(changed, monkeypatch,
                                                       tmp_path):
  """A file beside the tour hides what pip has installed."""
  (tmp_path / "einops.py").write_text("")
  monkeypatch.setattr(smoke, "ROOT", tmp_path)
  with pytest.raises(smoke.Untried, match="would be imported from"):
    changed("einops==0.8.0")


@pytest.fixture
def make_smoke(checkout, wheel):
  """Runs `make smoke` where the tour ends at once, so that it is not tried."""
  del wheel
  tour = checkout / "kauldron_tour.py"
  text = tour.read_text()
  tour.write_text("raise SystemExit('this tour is none')")

  def run(candidate, **environ):
    return subprocess.run(
        ["make", "smoke", f"CANDIDATE={candidate}"], cwd=checkout,
        env=os.environ | environ, capture_output=True, text=True, check=False)

  yield run
  tour.write_text(text)


@pytest.mark.parametrize("candidate, text", [
    ("einops>=0.8.1", "changes nothing"),
    ("einops<0.8.1", "with the pinned packages: this tour is none"),
    ('einops<0.1; python_version < "3"', "does not apply"),
    ("$(touch made)", "no candidate"),
    ("einops #<1", "no candidate"),
])
def test_quotes_survive_make_and_the_shell(make_smoke, checkout, candidate,
                                           text):
  process = make_smoke(candidate)
  assert process.returncode == 2
  assert text in process.stderr
  assert process.stdout.splitlines()[-1].startswith("exit status 2: ")
  assert not (checkout / "made").exists()
  assert not list(checkout.glob("=*"))


# Places where nothing can be installed.


@pytest.fixture
def mounted(tmp_path):
  """Returns a command that runs another with a file system of its own."""
  folder = tmp_path / "mounted"
  folder.mkdir()

  def prefix(options):
    mount = f"mount -t tmpfs -o {options} tmpfs {folder}"
    start = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    try:
      subprocess.run([*start, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
      pytest.skip("no file system can be mounted here")
    return start, folder

  return prefix


SMOKE_IN = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import smoke
smoke.OUT = pathlib.Path(sys.argv[2])
sys.exit(smoke.main(["einops==0.8.0"]))
"""


@pytest.mark.parametrize("options, word", [
    ("noexec", "is mounted noexec"), ("size=200k", "No space left on device")])
def test_smoke_where_nothing_can_be_installed(mounted, wheel, options, word):
  del wheel
  start, folder = mounted(options)
  process = subprocess.run(
      [*start, sys.executable, "-c", SMOKE_IN, ROOT / "tests", folder],
      capture_output=True, text=True, check=False)
  assert process.returncode == 2, process.stderr
  assert word in process.stderr
  assert process.stderr.count("\n") == 1


def test_temporary_folder_may_be_noexec(mounted, wheel, checkout):
  del wheel
  start, folder = mounted("noexec")
  process = subprocess.run(
      [*start, "env", f"TMPDIR={folder}", sys.executable, "tests/smoke.py",
       "einops==0.8.0", "--only", "config_tree"],
      cwd=checkout, capture_output=True, text=True, check=False)
  assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("options", ["noexec", "size=4k"])
def test_matrix_where_nothing_can_be_installed(mounted, options):
  start, folder = mounted(options)
  if options == "size=4k":
    start = [*start[:-1], "sh", "sh", "-c",
             f'head -c 9000 /dev/zero >{folder}/full 2>/dev/null; exec "$@"',
             "sh"]
  process = subprocess.run(
      [*start, "env", f"TMPDIR={folder}", "sh", ROOT / "tests" / "matrix.sh",
       sys.executable],
      capture_output=True, text=True, check=False)
  assert process.returncode == 2
  assert "matrix: nothing can be installed in" in process.stderr
  assert "is it full, or mounted noexec?" in process.stderr


def test_matrix_says_what_an_interpreter_says(tmp_path):
  shim = tmp_path / "python3.13"
  shim.write_text("#!/bin/sh\necho 'shim: python3.13: version not set' >&2\n"
                  "exit 127\n")
  shim.chmod(0o755)
  process = subprocess.run(
      ["sh", ROOT / "tests" / "matrix.sh", shim, "no_such_python"],
      capture_output=True, text=True, check=False)
  assert process.returncode == 2
  assert "cannot be run: shim: python3.13: version not set" in process.stdout
  assert "no_such_python: not found" in process.stdout
