"""Says on one screen what an upgrade breaks, why, and what it changes.

  python tests/smoke.py 'jax==0.10.1' 'flax>=0.12'   # try releases
  python tests/smoke.py ../kauldron                  # or a source folder
  python tests/smoke.py OLD.json NEW.json            # compare two reports

A candidate is what pip installs: requirements, a wheel, a source folder, an
archive. It goes into an environment of its own, `.smoke/env`, that sees the
packages of this interpreter through a `.pth` file: only what changes is
installed, and this environment stays as it is. The tour and
tests/test_kauldron.py run in both. What does not fit on the screen is in
`.smoke/report.md`, beside the two reports.

Exit status: 0 nothing differs, 1 something fails that passes here, 2 it could
not be tried, 3 nothing fails but something differs.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import sysconfig
import textwrap
import venv
import xml.etree.ElementTree

import griffe
from packaging import requirements
from packaging import utils

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOUR = ROOT / "kauldron_tour.py"
TESTS = ROOT / "tests" / "test_kauldron.py"
OUT = ROOT / ".smoke"
SCHEMA = 2
TOLERANCE = 1e-3  # Of floats, relative.
WIDTH, HEIGHT = 80, 40  # Of the screen.
PROGRESS = 2  # Lines that are printed before it.
TIME_LIMIT = 900  # Seconds that one run may take.
MEANING = {
    0: "nothing differs",
    1: "something fails that did not",
    2: "it could not be tried",
    3: "nothing fails, something differs",
}


class Untried(Exception):
  """Says in one sentence why there is nothing to compare."""


# Two reports.


@dataclasses.dataclass
class Differences:
  """What a candidate's report has that the baseline's has not."""

  versions: list[str]
  broken: dict[str, dict]  # Sections and tests that fail only now.
  failing_in_both: list[str]
  statuses: list[str]  # Newly skipped, mended, new or gone.
  facts: list[tuple[str, object, object]]


def outcomes(report):
  """Returns what is known of each section and test, by name."""
  return report["sections"] | report.get("tests", {})


def stable(text):
  """Returns a text without folders and addresses, which differ by the run."""
  folders = r"/[^\s'\"]*/(kauldron_tour_\w+[\w/]*|site-packages/)"
  return re.sub(r"\b0x[0-9a-f]+", "0x", re.sub(folders, "", text))


def is_same(old, new):
  """Compares two facts: floats within the tolerance, all else exactly."""
  if type(old) is not type(new):
    return False
  if isinstance(old, str):
    return stable(old) == stable(new)
  if not isinstance(old, float):
    return old == new
  if math.isnan(old) or math.isnan(new):
    return math.isnan(old) and math.isnan(new)
  return math.isclose(old, new, rel_tol=TOLERANCE)


def changed_facts(old, new):
  """Yields label, old and new value of a section's facts that differ."""
  labels = old["facts"] | new["facts"]
  if new["status"] == "FAIL":
    labels = new["facts"]  # It ended early: what is missing says nothing.
  for label in labels:
    before = old["facts"].get(label, "(absent)")
    after = new["facts"].get(label, "(absent)")
    if not is_same(before, after):
      yield label, before, after


def compare(old, new):
  """Returns the `Differences` of two reports."""
  found = Differences([], {}, [], [], [])
  before, after = ({"Python": report["python"].split()[0], **report["versions"]}
                   for report in (old, new))
  for name in sorted(before | after, key=str.lower):
    was, now = before.get(name, "absent"), after.get(name, "absent")
    if was != now:
      found.versions.append(f"{name} {was} -> {now}")

  olds, news = outcomes(old), outcomes(new)
  for name in olds | news:
    was = olds.get(name, {}).get("status", "absent")
    now = news.get(name, {}).get("status", "absent")
    if now == "FAIL" and was == "FAIL":
      found.failing_in_both.append(name)
    elif now == "FAIL":
      found.broken[name] = news[name]
    elif was != now:
      reason = news.get(name, {}).get("reason", "")
      found.statuses.append(f"{name}: {was} -> {now} {reason}".rstrip())

  for name in new["sections"]:
    if name in old["sections"]:
      for label, was, now in changed_facts(
          old["sections"][name], new["sections"][name]):
        if (was, now) != (before.get(label), after.get(label)):  # No version.
          found.facts.append((f"{name}: {label}", was, now))
  return found


def groups(broken):
  """Groups failures by error and the library's line: (outcome, names)."""
  found = {}
  for name, outcome in broken.items():
    kind, _, reason = outcome["reason"].partition(":")
    place = outcome["library"]
    cause = kind, place or reason.partition(". Did you mean")[0]
    found.setdefault(cause, (outcome, []))[1].append(name)
  return sorted(found.values(), key=lambda group: -len(group[1]))


def read_report(path):
  """Returns a report of the tour, or raises `Untried`."""
  try:
    report = json.loads(pathlib.Path(path).read_text())
  except (OSError, ValueError) as error:
    raise Untried(f"{path} cannot be read: {error}") from error
  if not isinstance(report, dict) or report.get("schema") != SCHEMA:
    raise Untried(f"{path} is no report of schema {SCHEMA}.")
  return report


# Causes: what an installed package still uses and another no longer has.

# What ty says, and what we make of it.
SENTENCES = (
    (r"Module `(?P<module>.+)` has no member `(?P<name>.+)`",
     "uses {module}.{name}, which {owner} does not have"),
    (r"Cannot resolve imported module `(?P<module>.+)`",
     "imports {module}, which {owner} does not have"),
    (r"Argument `(?P<name>.+)` does not match any .* of .*`(?P<callee>.+)`",
     "passes {name}, which {top}.{callee} does not take"),
    (r"No argument provided for .*`(?P<name>.+)` of .*`(?P<callee>.+)`",
     "calls {top}.{callee} without {name}, which it requires"),
)
RULES = ("missing-attribute", "missing-module-member", "unknown-argument",
         "missing-argument", "import-not-found")
# A finding's rule, text and place, and where what it uses is defined.
FINDING = re.compile(
    r"error\[[\w-]+\]: (?P<text>.+)\n +--> (?P<file>.+?):(?P<line>\d+):\d+\n"
    r"(?:(?!error\[|info: ).*\n)*"
    r"(?:info: .*\n +--> (?P<defined>.+?):\d+:\d+\n)?")
TEST_FILE = re.compile(r"(^|[/_])tests?([/_.]|ing)")


def in_site(path):
  """Returns a path below site-packages, or the path as it is."""
  return path.rpartition("site-packages/")[2]


def findings(environment, packages, env):
  """Returns what ty says of packages, by file and message."""
  files = [file for file in map(environment.find, sorted(packages)) if file]
  rules = [part for rule in RULES for part in ("--error", rule)]
  run = subprocess.run(
      [sys.executable, "-I", "-m", "ty", "check", "--python",
       environment.python.parents[1],
       "--project", OUT / "empty", "--no-respect-ignore-files", "--exit-zero",
       "--no-progress", "--output-format", "full", "--ignore", "all", *rules,
       *files],
      env=env | {"XDG_CONFIG_HOME": str(OUT / "empty")},
      capture_output=True, text=True, check=False)
  if run.returncode != 0:
    raise Untried(f"ty cannot check the sources: {last_line(run.stderr)}")
  found = {}
  for match in FINDING.finditer(run.stdout):
    file = in_site(match["file"])
    if not TEST_FILE.search(file):
      found.setdefault((file, match["text"]), match)
  return found


def owners(path, changes):
  """Returns which changed distributions have a file or module, by its path."""
  while path:
    found = {name for name, change in changes.items()
             if path in change.files or f"{path}.py" in change.files
             or any(file.startswith(f"{path}/") for file in change.files)}
    if found:
      return found
    path = path.rpartition("/")[0]
  return set()


def cause(file, match, changes, after):
  """Returns a finding as a sentence and the name in question, or None.

  It counts where it lies between two distributions, at least one of which has
  changed: that is the one to move.
  """
  matches = ((re.fullmatch(pattern, match["text"]), sentence)
             for pattern, sentence in SENTENCES)
  found, sentence = next(filter(lambda pair: pair[0], matches), (None, ""))
  if found is None:
    return None
  words = found.groupdict()
  module = words.get("module", "")
  used = in_site(match["defined"] or module.replace(".", "/"))
  words["top"] = re.split(r"[/.]", used)[0]
  user, provider = owners(file, changes), owners(used, changes)
  if user == provider or words["top"] in sys.stdlib_module_names:
    return None
  owner = min(provider, default=words["top"])
  version = after.distributions.get(owner, {}).get("version", "as installed")
  words["owner"] = f"{owner} {version}"
  move = " or ".join(sorted(user | provider))
  name = words.get("name") or module.rpartition(".")[2]
  return f"{sentence.format(**words)}: move {move}", name


def causes(broken, before, after, changes, env):
  """Returns sentences on names that are gone: those involved, and the others.

  Kauldron's sources are checked, and those of each package that a failure's
  traceback touches. What counts is new in the candidate's environment.
  """
  text = "\n".join(f"{outcome['reason']}\n{outcome['library']}\n"
                   f"{outcome.get('traceback', '')}"
                   for outcome in broken.values())
  touched = {in_site(file) for file in re.findall(r"[\w./-]+\.py\b", text)}
  packages = {"kauldron"} | {file.partition("/")[0] for file in touched}
  packages -= {""}  # The files that are not in site-packages.
  (OUT / "empty").mkdir(exist_ok=True)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    old, new = pool.map(
        lambda environment: findings(environment, packages, env),
        (before, after))

  found = collections.defaultdict(list)
  for (file, message), match in new.items():
    if (file, message) in old:
      continue
    sentence, name = cause(file, match, changes, after) or ("", "")
    if sentence:
      is_named = re.search(rf"\b{re.escape(name)}\b", text) is not None
      rank = -2 * is_named - (file in touched)
      found[sentence].append((rank, f"{file}:{match['line']} {sentence}"))
  involved, others = [], []
  for places_of_it in sorted(found.values(), key=min):
    rank, line = min(places_of_it)
    if len(places_of_it) > 1:
      line += f" ({len(places_of_it)} places)"
    (involved if rank else others).append(line)
  return involved, others


def conflicts(changes, after):
  """Returns what installed packages demand and the candidate does not meet."""
  found = []
  for name, entry in sorted(after.distributions.items()):
    for text in entry["requires"]:
      demand = requirements.Requirement(text)
      wanted = utils.canonicalize_name(demand.name)
      if wanted not in changes or demand.marker and not demand.marker.evaluate(
          {"extra": ""}):
        continue
      version = after.distributions[wanted]["version"]
      if not demand.specifier.contains(version, prereleases=True):
        found.append(f"{name} {entry['version']} demands "
                     f"{demand.name}{demand.specifier}, here is {version}")
  return sorted(found, key=lambda line: not line.startswith("kauldron"))


# Kauldron's API.


def public_objects(module):
  """Yields path and object of what is public in a package, without aliases."""
  for name, member in module.members.items():
    if (member.is_alias or not member.is_public
        or name.endswith("_test") or name == "__version__"):
      continue
    yield member.path, member
    if member.is_module or member.is_class:
      yield from public_objects(member)


def used_names():
  """Returns all names that the tour and its tests use."""
  names = set()
  for path in (TOUR, TESTS):
    if path.exists():
      for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "arg", "name"):
          names.add(getattr(node, field, None))
  return names


def api(old_site, new_site):
  """Returns what is broken, path -> what, and the names added to Kauldron."""
  old, new = (griffe.load("kauldron", search_paths=[site],
                          try_relative_path=False, allow_inspection=False)
              for site in (old_site, new_site))
  broken = {}
  for breakage in griffe.find_breaking_changes(old, new):
    path = breakage.obj.canonical_path.removesuffix(".__init__")
    was, now = breakage.old_value, breakage.new_value
    what = str(breakage).lower()
    if isinstance(was or now, griffe.Parameter):
      path += f"({(was or now).name})"
      what = "was removed" if now is None else (
          f"{what.removeprefix('parameter ')}: {value(was)} -> {value(now)}")
    elif isinstance(breakage, griffe.ObjectRemovedBreakage):
      what = "was removed"
    else:
      was, now = (", ".join(map(str, x)) if isinstance(x, list) else x
                  for x in (was, now))
      what += f": {was} -> {now or 'none'}"
    broken.setdefault(path, what)

  # griffe passes over the values of attributes: fields, constants.
  olds, news = dict(public_objects(old)), dict(public_objects(new))
  for path, member in olds.items():
    after = news.get(path)
    parameter = f"{path.rpartition('.')[0]}({member.name})"
    if parameter in broken:
      broken.pop(path, None)  # A field of a dataclass: once is enough.
    elif after and member.is_attribute and after.is_attribute:
      if str(member.value) != str(after.value):
        broken[path] = f"value: {member.value} -> {after.value}"
  added = set(news) - set(olds)
  return broken, [path for path in news if path in added
                  and path.rpartition(".")[0] not in added]


def value(parameter):
  """Returns a parameter's default, or what stands for it."""
  if parameter is None:
    return "absent"
  return "no default" if parameter.required else str(parameter.default)


def is_used(path, names):
  """Whether all of a name below its module occur in the tour."""
  parts = re.findall(r"\w+", path.removeprefix("kauldron."))
  return parts[0] in names and parts[-1] in names and all(
      part in names for part in parts if part[0].isupper())


# Environments.

# pip's settings that say where packages come from. All others, which say what
# is installed and where to, are not handed on.
SOURCES = {
    "index-url", "extra-index-url", "no-index", "find-links", "trusted-host",
    "cert", "client-cert", "proxy", "timeout", "default-timeout", "retries",
    "cache-dir", "no-cache-dir", "keyring-provider"}
# Variables that change which Python runs, what it imports, or how tests run.
FOREIGN = ("PIP_", "UV_", "PYTHON", "PYTEST_", "VIRTUAL_ENV", "CONDA_", "TY_",
           "__PYVENV", "MAKE", "CANDIDATE", "SETUPTOOLS_", "DISTUTILS_")
# Variables on which the baseline's report depends.
KEPT = ("JAX_", "XLA_", "TF_", "CUDA_", "LIBTPU")

# Prints what an interpreter would import; arguments name distributions of
# which also the files are wanted. Runs where the tour runs.
PROBE = """
import importlib.metadata, importlib.util, json, re, sys
found = {}
for dist in importlib.metadata.distributions():
  name = re.sub("[-_.]+", "-", dist.metadata["Name"] or "").lower()
  if not name or name in found:
    continue
  files, modules = {}, {}
  if name in sys.argv[1:]:
    files = {str(f): f.hash.value for f in dist.files or [] if f.hash}
    for file in files:
      top, slash, rest = file.partition("/")
      if rest == "__init__.py" or not slash and top.endswith(".py"):
        spec = importlib.util.find_spec(top.removesuffix(".py"))
        modules[top] = spec.origin if spec else None
  found[name] = {
      "version": dist.version, "site": str(dist.locate_file("")),
      "requires": dist.requires or [], "files": files, "modules": modules}
json.dump(found, sys.stdout)
"""


@dataclasses.dataclass
class Change:
  """A distribution that differs in the candidate's environment."""

  text: str
  files: set[str]  # Of both versions.


@dataclasses.dataclass
class Environment:
  """A Python and what it would import."""

  python: pathlib.Path
  sites: list[pathlib.Path]  # Its site-packages, in order.
  distributions: dict[str, dict]

  def find(self, package):
    """Returns the folder of a package, or None."""
    for site in self.sites:
      if (site / package).is_dir():
        return site / package
    return None


def clean_environ():
  """Returns the variables for all that runs: the caller's, less the foreign."""
  kept = {name: value for name, value in os.environ.items()
          if not name.startswith(FOREIGN)}
  return kept | {"PYTHONNOUSERSITE": "1", "PYTHONHASHSEED": "0"}


def pip_command():
  """Returns the path of a pip that another interpreter can run."""
  installed = importlib.util.find_spec("pip")
  if installed:
    return pathlib.Path(installed.origin).with_name("__pip-runner__.py")
  bundled = sysconfig.get_config_var("WHEEL_PKG_DIR")
  if not bundled:
    bundled = pathlib.Path(sysconfig.get_path("stdlib"), "ensurepip/_bundled")
  wheels = sorted(pathlib.Path(bundled).glob("pip-*.whl"))
  if not wheels:
    raise Untried("there is no pip here: install it into .venv, or ensurepip.")
  return wheels[-1] / "pip"


def pip_settings(python, pip):
  """Returns, as variables, where the caller's pip takes packages from."""
  env = {name: value for name, value in os.environ.items()
         if not name.startswith("PYTHON")}
  run = subprocess.run([python, "-I", pip, "config", "list"], env=env,
                       capture_output=True, text=True, check=False)
  found = {}
  for section in ("global", "install", ":env:"):
    for name, text in re.findall(
        rf"^{section}\.([\w-]+)=(.+)$", run.stdout, re.MULTILINE):
      if name in SOURCES:
        variable = "PIP_" + name.replace("-", "_").upper()
        found[variable] = ast.literal_eval(text)
  return found | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1",
                  "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def probe(python, sites, env, names=()):
  """Returns an `Environment`, with the files of the distributions named."""
  run = subprocess.run([python, "-c", PROBE, *names], cwd=ROOT, env=env,
                       capture_output=True, text=True, check=False)
  if run.returncode != 0:
    raise Untried(f"{python} does not run: {last_line(run.stderr)}")
  return Environment(python, sites, json.loads(run.stdout))


def make_environment(env):
  """Makes `.smoke/env` over this environment; returns its Python and site."""
  folder = OUT / "env"
  if os.statvfs(OUT).f_flag & getattr(os, "ST_NOEXEC", 0):
    raise Untried(f"{OUT} is mounted noexec: nothing can be imported from it.")
  venv.create(folder, clear=True, symlinks=os.name != "nt", with_pip=False)
  scheme = sysconfig.get_paths("venv", {
      "base": str(folder), "platbase": str(folder)})
  python = pathlib.Path(scheme["scripts"], "python")
  site = pathlib.Path(scheme["purelib"])
  (site / "pinned.pth").write_text(sysconfig.get_path("purelib") + "\n")
  try:
    subprocess.run([python, "-c", ""], env=env, check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    raise Untried(f"{python} does not run: {error}") from error
  return python, site


def is_path(text):
  """Whether pip takes a candidate as a file or folder, not as a name."""
  path = pathlib.Path(text).expanduser()
  return path.is_file() or path.is_dir() and (
      text.startswith(".") or os.sep in text)


def parsed(text):
  """Returns the candidates in one text, which is quoted as for a shell."""
  if is_path(text):
    return [text]
  try:
    requirements.Requirement(text)  # One, which may hold spaces and quotes.
    return [text.strip()]
  except requirements.InvalidRequirement:
    pass
  try:
    return shlex.split(text)
  except ValueError as error:
    raise Untried(f"{text} cannot be split: {error}.") from error


def checked(candidates):
  """Returns candidates as pip takes them, or raises `Untried`."""
  if not candidates:
    raise Untried("name a candidate, as in CANDIDATE='jax==0.10.1'.")
  found = []
  for text in candidates:
    if text.startswith("-"):
      raise Untried(f"{text} is an option of pip, not a candidate.")
    if is_path(text):
      found.append(str(pathlib.Path(text).expanduser().resolve()))
      continue
    try:
      demand = requirements.Requirement(text)
    except requirements.InvalidRequirement as error:
      if re.match(r"(git|hg|svn|bzr)\+|https?://|file://", text):
        found.append(text)
        continue
      hint = "there is no such file" if os.sep in text else (
          str(error).partition("\n")[0])
      raise Untried(f"{text} is no candidate: {hint}.") from error
    if demand.marker and not demand.marker.evaluate():
      raise Untried(f"{text} does not apply to this Python: nothing changes.")
    found.append(text)
  return found


def install(python, candidates, env):
  """Installs candidates; returns what pip installed: name -> version."""
  pip = pip_command()
  env = env | pip_settings(python, pip)
  record = OUT / "pip.json"
  done = {}

  def run(*arguments):
    record.unlink(missing_ok=True)
    try:
      process = subprocess.run(
          [python, "-I", pip, "install", "--quiet", "--report", record,
           *arguments], cwd=ROOT, env=env, capture_output=True, text=True,
          timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
      raise Untried(f"pip took more than {TIME_LIMIT} s.") from error
    if process.returncode != 0:
      if "No space left on device" in process.stderr:
        raise Untried(f"No space left on device: {OUT} is full.")
      errors = re.findall(r"^ *(?:ERROR|fatal|\w+Error): (.+)$",
                          process.stderr, re.MULTILINE)
      sentence = errors[0] if errors else last_line(process.stderr)
      sentence = re.sub(r" \(from versions: .*\)", "", sentence)
      if re.search(r"\b(git|hg|svn|bzr)\+", " ".join(candidates)):
        sentence += "; a VCS address needs its program and a network."
      raise Untried(f"pip cannot install this: {sentence}")
    for item in json.loads(record.read_text())["install"]:
      name = utils.canonicalize_name(item["metadata"]["name"])
      done[name] = item["metadata"]["version"]

  # pip leaves an installed version for a wheel of the same version.
  wheels = [text for text in candidates
            if text.endswith(".whl") and os.path.exists(text)]
  if wheels:
    run("--no-deps", "--force-reinstall", *wheels)
  run("--upgrade", *candidates)
  return done


def verified(candidates, installed, before, after, site):
  """Returns the changes, or raises `Untried` where it is not as asked for."""
  for name, version in installed.items():
    entry = after.distributions.get(name)
    if entry is None or pathlib.Path(entry["site"]) != site:
      raise Untried(f"pip installed {name} {version}, but not into {site}.")
    if entry["version"] != version:
      raise Untried(f"pip installed {name} {version}, but "
                    f"{entry['version']} would be imported.")
    for module, origin in entry["modules"].items():
      if origin is None or not pathlib.Path(origin).is_relative_to(site):
        raise Untried(f"{name} {version} is installed, but {module} would be "
                      f"imported from {origin}.")
  for text in candidates:
    try:
      demand = requirements.Requirement(text)
    except requirements.InvalidRequirement:
      continue  # A path: all that pip made of it is among the installed.
    entry = after.distributions.get(utils.canonicalize_name(demand.name))
    version = entry and entry["version"]
    if version is None or not demand.specifier.contains(
        version, prereleases=True):
      raise Untried(f"{text} was asked for, and {version} would be imported.")

  changes = {}
  for name in installed:
    now, was = after.distributions[name], before.distributions.get(name)
    files = set(now["files"]) | set(was["files"] if was else ())
    text = f"{name} {was['version'] if was else 'absent'} -> {now['version']}"
    if was and was["version"] == now["version"]:
      code = {file for file in files if file.endswith((".py", ".so"))
              and was["files"].get(file) != now["files"].get(file)}
      if not code:
        continue
      text = (f"{name} {now['version']} with {number(len(code), 'file')} "
              f"changed: {some(sorted(code), 3)}")
    changes[name] = Change(text, files)
  if not changes:
    raise Untried("this changes nothing: the pinned packages are what "
                  f"{shlex.join(candidates)} asks for.")
  return changes


# Runs.


def last_line(text):
  """Returns the last line that is not blank."""
  return text.strip().rpartition("\n")[2].strip()


def places(text):
  """Returns our last line and the library's last of a traceback's text."""
  where = library = ""
  # Python's own frames, and pytest's where a test cannot be imported.
  frame = r'^(?: *File "(.+?)", line (\d+), in|(.+?):(\d+): in) (\S+)\n +(.*)'
  for *parts, name, code in re.findall(frame, text, re.MULTILINE):
    file, line = filter(None, parts)
    if "site-packages" in file:
      library = f"{in_site(file)}:{line} in {name}"
    elif (ROOT / file).is_relative_to(ROOT):
      where = f"{pathlib.Path(file).name}:{line} in {name}: {code}"
      library = ""  # What stands above our line has called it.
  return {"where": where, "library": library}


def failure(output, status):
  """Returns the outcome of a run that ended without a report."""
  errors = re.findall(r"^E +(\w.*)$", output, re.MULTILINE)  # pytest's.
  reason = errors[-1] if errors else last_line(output)
  if status < 0:
    reason = f"ended by signal {-status}, after: {reason}"
  return {"status": "FAIL", "reason": reason, "seconds": 0.0, "facts": {},
          "title": "", "traceback": output[-5000:], **places(output)}


def run(command, log, env):
  """Runs a command; returns its exit status and what it printed."""
  try:
    process = subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIME_LIMIT,
        text=True, errors="replace", check=False)
  except subprocess.TimeoutExpired:
    return 1, f"It took more than {TIME_LIMIT} s."
  log.write_text(process.stdout)
  return process.returncode, process.stdout


def run_tour(environment, name, only, env):
  """Returns the report of the tour, or an outcome of all of it."""
  path = OUT / f"{name}.json"
  path.unlink(missing_ok=True)
  arguments = ["--only", *only] if only else []
  status, output = run([environment.python, TOUR, "--report", path, *arguments],
                       OUT / f"{name}_tour.txt", env)
  if path.exists() and path.stat().st_size:
    return read_report(path)
  return failure(output, status)


def run_tests(environment, name, env):
  """Returns the outcome of each of the tests of Kauldron."""
  path = OUT / f"{name}_tests.xml"
  path.unlink(missing_ok=True)
  status, output = run(
      [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider",
       "--tb=native", f"--junitxml={path}", TESTS],
      OUT / f"{name}_tests.txt", env)
  if not path.exists():
    return {TESTS.name: failure(output, status)}
  found = {}
  for case in xml.etree.ElementTree.parse(path).iter("testcase"):
    outcome = {"status": "PASS", "reason": "", "where": "", "library": ""}
    for child in case:
      text = child.text or ""
      if child.tag == "skipped":
        outcome.update(status="SKIP", reason=child.get("message"))
      elif child.tag in ("failure", "error"):
        reason = child.get("message") or last_line(text)
        if child.get("message") == "collection failure":
          reason = last_line(text)
        outcome.update(status="FAIL", reason=reason, traceback=text,
                       **places(text))
    found[case.get("name")] = outcome
  return found


def fingerprint(environment, only, env):
  """Returns a digest of all that the baseline's report depends on."""
  parts = [sys.version, *only]
  conftest = TESTS.with_name("conftest.py")
  for path in (TOUR, TESTS, conftest, pathlib.Path(__file__)):
    parts.append(path.read_text() if path.exists() else "")
  for site in environment.sites:
    parts += sorted(f"{path.name} {path.stat().st_mtime_ns}"
                    for path in site.glob("*.dist-info"))
  parts += sorted(f"{name}={value}" for name, value in env.items()
                  if name.startswith(KEPT) and not name.endswith("_CACHE_DIR"))
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def reports(before, after, only, env):
  """Returns both reports; the baseline's is kept while nothing changed."""
  key = fingerprint(before, only, env)
  path = OUT / "baseline.json"
  try:
    old = read_report(path)
  except Untried:
    old = {}
  env = {"JAX_COMPILATION_CACHE_DIR": str(OUT / "compiled")} | env
  jobs = {"baseline": before, "candidate": after}
  if old.get("fingerprint") == key:
    del jobs["baseline"]
  print(f"running the tour with the {' and the '.join(jobs)} packages ...",
        flush=True)
  tours, tests = {}, {}
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    # The candidate's tour comes last: much of it is compiled by then.
    if "baseline" in jobs:
      tours["baseline"] = pool.submit(run_tour, before, "baseline", only, env)
    if TESTS.exists() and not only:
      for name, environment in jobs.items():
        tests[name] = pool.submit(run_tests, environment, name, env)
    tours["candidate"] = pool.submit(run_tour, after, "candidate", only, env)
  new = tours["candidate"].result()
  if "baseline" in jobs:
    old = tours["baseline"].result()
    if "sections" not in old:
      raise Untried("the tour does not run with the pinned packages: "
                    f"{old['reason']}")
  if "sections" not in new:  # It ended without a report.
    sections = {name: new | {"title": section["title"]}
                for name, section in old["sections"].items()}
    new = old | {"sections": sections, "patches": {}}
  for name, environment in jobs.items():
    report = old if name == "baseline" else new
    report["versions"] = {
        distribution: entry["version"]
        for distribution, entry in environment.distributions.items()}
    found = tests[name].result() if name in tests else {}
    if name == "candidate" and list(found) == [TESTS.name]:  # None started.
      found = dict.fromkeys(old["tests"] or found, found[TESTS.name])
    report["tests"] = found
    report["fingerprint"] = key
    for outcome in outcomes(report).values():
      if "[Errno 28]" in outcome["reason"]:
        raise Untried(f"the disk is full: {outcome['reason']}")
    (OUT / f"{name}.json").write_text(json.dumps(report, indent=1))
  return old, new


# The screen and the page.


@dataclasses.dataclass
class News:
  """What is known beside the two reports."""

  changes: list[str] = dataclasses.field(default_factory=list)
  why: list[str] = dataclasses.field(default_factory=list)
  broken_names: dict[str, str] = dataclasses.field(default_factory=dict)
  added_names: list[str] = dataclasses.field(default_factory=list)


def number(count, noun):
  """Returns a count and its noun."""
  return f"{count} {noun}{'' if count == 1 else 's'}"


def some(names, count):
  """Returns a few names, and how many more there are."""
  more = f" and {len(names) - count} more" if len(names) > count else ""
  return ", ".join(names[:count]) + more


def difference(old, new):
  """Returns the lines in which two values differ, from shortly before it."""
  before, after = stable(str(old)), stable(str(new))
  same = len(os.path.commonprefix([before, after]))
  if "\n" not in before + after and same > 40:
    before, after = (f"...{text[same - 20:]}" for text in (before, after))
  lines = difflib.unified_diff(
      before.splitlines(), after.splitlines(), n=0, lineterm="")
  return [f"  {line[0]} {line[1:]}" for line in lines
          if not line.startswith(("---", "+++", "@@"))]


def failure_items(broken, new, count):
  """Returns the lines on each group of failures."""
  items = []
  for outcome, names in groups(broken):
    items.append([" ".join(outcome["reason"].split())])
    for noun in ("section", "test"):
      members = [name for name in names if name in new.get(noun + "s", {})]
      if members:
        items[-1].append(
            f"  {number(len(members), noun)}: {some(members, count)}")
    if outcome["where"]:
      items[-1].append(f"  our line: {outcome['where']}")
    if outcome["library"]:
      items[-1].append(f"  library:  {outcome['library']}")
  return items


def name_items(broken_names, added_names, count):
  """Returns the lines on Kauldron's API, on what the tour uses first."""
  names = used_names()
  grouped = collections.defaultdict(list)
  for path, what in broken_names.items():
    # Names of one parent that were removed share a line.
    parent, name = path, ""
    if what == "was removed":
      parent, name = re.fullmatch(r"(.+)([.(].+)", path).groups()
    parent = parent.removeprefix("kauldron.")
    mark = "*" if is_used(path, names) else " "
    grouped[mark, "contrib." in parent, parent, what].append(name)
  items = [
      [f"{mark} {parent}{some(members, count)} {what}"]
      for (mark, _, parent, what), members in sorted(
          grouped.items(), key=lambda item: (item[0][0] == " ", item[0]))]
  if added_names:
    added = [name.removeprefix("kauldron.") for name in added_names]
    items.append([f"  {len(added)} added: {some(added, count)}"])
  return items


def verdict(new, found):
  """Returns one sentence on sections and tests."""
  counts, totals = [], []
  for noun in ("section", "test"):
    names = new.get(noun + "s", {})
    failed = sum(name in names for name in found.broken)
    if names:
      totals.append(number(len(names), noun))
    if failed:
      counts.append(f"{failed} of {number(len(names), noun)}")
  if counts:
    return f"FAILS: {' and '.join(counts)}, which pass as pinned."
  return f"PASSES: of {' and '.join(totals)} none fails that did not before."


def parts(new, found, news, count):
  """Returns titles and items, which are lists of lines; lists have a length."""
  versions = news.changes or found.versions or ["no version changed"]
  facts = [[label, *difference(was, now)] for label, was, now in found.facts]
  titled = {
      verdict(new, found): [["; ".join(versions)]],
      "What fails": failure_items(found.broken, new, count),
      "Why": [[line] for line in news.why],
      "What behaves otherwise": facts + [[text] for text in found.statuses],
      "Kauldron's API (* used by the tour)": name_items(
          news.broken_names, news.added_names, count),
      "Fails with the pinned packages too, which is not the candidate's fault":
          [[name] for name in found.failing_in_both],
  }
  return [(title, items) for title, items in titled.items() if items]


def rendered(titled, counts):
  """Returns the lines of the first items of each part, to fit the width."""
  lines = []
  for (title, items), count in zip(titled, counts, strict=True):
    lines += ["", title[:WIDTH]]
    for first, *others in items[:count]:
      lines += textwrap.wrap(
          first, WIDTH, max_lines=3, initial_indent="  ", placeholder=" ...",
          subsequent_indent="    ", break_on_hyphens=False)
      lines += [f"  {line}"[:WIDTH] for line in others[:6]]
    if len(items) > count:
      lines.append(f"  ... and {len(items) - count} more")
  return lines[1:]


def screen(titled, status):
  """Returns lines that fit the screen: all parts grow alike."""
  ending = ["", f"exit status {status}: {MEANING[status]} (.smoke/report.md)"]
  height = HEIGHT - PROGRESS - len(ending)
  counts = [1] * len(titled)
  while True:
    # The shortest part that has one more item for which there is room.
    lengths = {}
    for index, (part, count) in enumerate(zip(titled, counts, strict=True)):
      grown = counts[:index] + [count + 1] + counts[index + 1:]
      if count < len(part[1]) and len(rendered(titled, grown)) <= height:
        lengths[index] = len(rendered([part], [count]))
    if not lengths:
      break
    counts[min(lengths, key=lengths.get)] += 1
  return rendered(titled, counts)[:height] + ending


def page(titled, found, news):
  """Returns the text of the page, with all that the screen leaves out."""
  text = ["# What the candidate breaks and changes"]
  for title, items in titled:
    text += ["", f"## {title}", "", "```"]
    text += [line for item in items for line in item] + ["```"]
  text += ["", "## All versions", "", "```", *found.versions, "```"]
  text += ["", "## All broken names", "", "```"]
  text += [f"{path} {what}" for path, what in news.broken_names.items()]
  text += ["```"]
  for name, outcome in found.broken.items():
    detail = outcome.get("traceback") or outcome["reason"]
    text += ["", f"## {name}", "", "```", detail.strip(), "```"]
  return "\n".join(text) + "\n"


def conclude(old, new, news):
  """Prints the screen, writes the page and returns the exit status."""
  found = compare(old, new)
  status = 0
  if found.facts or found.statuses or news.broken_names or news.added_names:
    status = 3
  if found.broken:
    status = 1
  OUT.mkdir(exist_ok=True)
  everything = parts(new, found, news, count=10_000)
  (OUT / "report.md").write_text(page(everything, found, news))
  print("\n".join(screen(parts(new, found, news, count=6), status)))
  return status


def prepared(candidates, env):
  """Installs candidates; returns both environments and the changes."""
  OUT.mkdir(exist_ok=True)
  candidates = checked(candidates)
  print(f"installing {shlex.join(candidates)} ...", flush=True)
  python, site = make_environment(env)
  installed = install(python, candidates, env)
  pinned = pathlib.Path(sysconfig.get_path("purelib"))
  before = probe(pathlib.Path(sys.executable), [pinned], env, installed)
  after = probe(python, [site, pinned], env, installed)
  changes = verified(candidates, installed, before, after, site)
  return before, after, changes


def try_candidates(candidates, only):
  """Installs, verifies, runs and compares; returns the exit status."""
  env = clean_environ()
  before, after, changes = prepared(candidates, env)
  old, new = reports(before, after, only, env)
  news = News([change.text for change in changes.values()],
              conflicts(changes, after))
  broken = compare(old, new).broken
  if broken:
    involved, others = causes(broken, before, after, changes, env)
    news.why = involved + news.why + others
  if "kauldron" in changes:
    news.broken_names, news.added_names = api(before.sites[0], after.sites[0])
  return conclude(old, new, news)


def main(arguments):
  """Prints what differs and returns the exit status."""
  parser = argparse.ArgumentParser(
      description=__doc__.partition("\n")[0], epilog="see the file's top")
  parser.add_argument("candidates", nargs="*", metavar="CANDIDATE")
  parser.add_argument("--only", nargs="+", default=[], metavar="SECTION",
                      help="run only these sections, and no tests")
  options = parser.parse_args(arguments)
  try:
    candidates = options.candidates or parsed(os.environ.get("CANDIDATE", ""))
    if len(candidates) == 2 and all(
        text.endswith(".json") for text in candidates):
      return conclude(*map(read_report, candidates), News())
    return try_candidates(candidates, options.only)
  except Untried as error:
    print(f"smoke: {error}", file=sys.stderr)
  except OSError as error:
    print(f"smoke: {error.strerror}: {error.filename}", file=sys.stderr)
  print(f"exit status 2: {MEANING[2]}", flush=True)
  return 2


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
