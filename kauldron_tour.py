#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["kauldron>=1.4.2", "jax", "flax", "optax", "etils", "numpy",
#   "google-cloud-bigquery>=3.20"]  # Without this one pip backtracks for long.
# ///
"""A tour of Kauldron, the JAX training library, that proves what it says.

Read it from top to bottom beside its output. Every section makes one claim,
shows it and asserts it: what passes is true of the versions you have. It is not
a reference, benchmark or good model: the data is synthetic, a CPU trains it.

Run (about 20 seconds on two cores, 5 of them importing TensorFlow):
  python kauldron_tour.py                   # everything
  python kauldron_tour.py --only key_paths  # some of it; --list names all
  python kauldron_tour.py --workdir out     # keep checkpoints, events, pictures
"""

import argparse
import atexit
import builtins
from collections.abc import Generator
import contextlib
import dataclasses
import functools
import gc
import importlib
from importlib import metadata, util
import inspect
import io
import itertools
import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import unittest.mock
import warnings

# %% Plumbing (skip on a first read)
# Short names used throughout: cfg (config), ds (dataset), preds (what a model
# returned), interms (what its inner layers returned), aux (auxiliaries: states
# of losses, metrics and summaries), kt (kauldron.ktyping).
SECTIONS = """where_we_are config_tree config_references key_paths shape_checker
loss_and_metric real_trainer readable_loop inner_layer sweep resumed_run
evaluators rebuilt_run partial_training event_files sharding config_file
random_streams data_pipeline type_checkers base_classes""".split()
SEED, NUM_CLASSES, WIDTH, BATCH_SIZE = 0, 4, 32, 48
NUM_STEPS, LOG_EVERY, SAVE_EVERY, LEARNING_RATE, PEAK = 100, 10, 30, 0.005, 0.1
INTERRUPTS = []  # Of Ctrl-C: after the first, no further section is started.
IN_NOTEBOOK = hasattr(builtins, "__IPYTHON__")
PROGRESS = None  # A notebook's bar: sections that have ended, of all.
wrap = functools.partial(
    textwrap.fill, subsequent_indent="    ", break_on_hyphens=False)

class Results(dict):
  """Section name -> title, status, seconds, reason, facts. Shows as a table."""
  def __repr__(self):
    return "\n".join([f"{'':8}{'seconds':>8}  what was proved", *(
        f"  {x['status']:4} {x['seconds']:9.1f}  {SECTIONS.index(name):2} "
        f"{x['title']}" for name, x in self.items())])
RESULTS = Results()

def section(title):
  """Registers a section, which the main program runs here."""
  def register(function):
    function.title = title
    if RUNS and function.__name__ in OPTIONS.sections:
      run_section(function)
    return function
  return register

def run_section(function):
  """Runs a section, prints how it ended and records that in RESULTS."""
  name, claim = function.__name__, function.__doc__.splitlines()[0]
  if INTERRUPTS not in ([], [name]):  # Of a notebook, its cell may run again.
    return
  INTERRUPTS.clear()
  print(f"\n[{SECTIONS.index(name):02}/{len(SECTIONS) - 1:02}] "
        f"{function.title}\n  {claim}", flush=True)
  status, reason, facts, where = "PASS", "", {}, {}
  start = time.perf_counter()
  try:
    facts = function()
  except unittest.SkipTest as skip:
    status, reason = "SKIP", str(skip)
  except KeyboardInterrupt:
    status, reason = "FAIL", "interrupted"
    INTERRUPTS.append(name)
  except Exception as error:  # Whatever it is, the other sections still run.
    status, reason = "FAIL", f"{type(error).__name__}: {error}"
    where = print_traceback(error)
  seconds = time.perf_counter() - start
  jax.clear_caches()  # Programs are no longer needed, their memory is.
  RESULTS[name] = {"title": function.title, "status": status, "facts": facts,
                   "seconds": seconds, "reason": reason, **where}
  if facts:
    print(wrap("  facts: " + ", ".join(
        f"{key}: {textwrap.shorten(str(value), 44, placeholder='...')}"
        for key, value in facts.items()), 78))
  print(f"  {status} {seconds:.1f}s {first_line(reason)}".rstrip(), flush=True)
  if PROGRESS:
    PROGRESS.progress = len(RESULTS)

def first_line(error):
  """Returns the first line of a message, and the last one after a colon."""
  lines = str(error).strip().splitlines() or [""]
  return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]

def print_traceback(error):
  """Prints the tour's frames and the last one; returns where that was."""
  trace = error.__traceback__.tb_next  # Without `run_section`.
  ours = [frame.f_globals is globals() for frame, _ in traceback.walk_tb(trace)]
  lines = traceback.extract_tb(trace)
  own = list(itertools.compress(lines, ours))
  text = traceback.format_list(own + [lines[-1]] * (not ours[-1]))
  text += traceback.format_exception_only(error)
  print(textwrap.indent("\n".join("".join(text).splitlines()[:40]), "  "))
  path = lines[-1].filename.rpartition(f"site-packages{os.sep}")[2]
  return {"frame": f"{own[-1].name}: {own[-1].line}",
          "library": f"{path}, {lines[-1].name}"}

def show(label, value):
  """Prints `label => value`, below the label if it is long or has lines."""
  text = value if isinstance(value, str) else repr(value)
  if "\n" in text or len(label + text) > 74:
    lines = "\n" + "\n".join(wrap(line, 74) for line in text.splitlines())
    text = textwrap.indent(lines, "    ")
  print(f"  {label} => {text}")

def draw(name, curves, **axes):
  """Draws label -> (steps, values >= 0) as text, and if it can as a picture."""
  top = max(max(y) for _, y in curves.values())
  for label, (_, y) in curves.items():
    dots = "".join(" .:-=+*#@"[round(8 * value / top)] for value in y)
    print(f"  {label:9} |{dots}|")
  if not (util.find_spec("matplotlib") and (IN_NOTEBOOK or OPTIONS.workdir)):
    return
  from matplotlib import figure
  picture = figure.Figure(figsize=(7, 4), layout="constrained")
  plot = picture.subplots()
  plot.set(**axes)
  plot.locator_params(axis="x", integer=True)  # There is no step 2.5.
  for label, (x, y) in curves.items():
    plot.plot(x, y, label=label)
  plot.legend()
  path = pathlib.Path(OPTIONS.workdir or temporary_dir(), f"{name}.png")
  picture.savefig(path)
  if IN_NOTEBOOK:
    from IPython import display
    display.display(display.Image(path))

# %% 0. Where we are
class CannotRun(RuntimeError):
  """Ends a cell; IPython shows its sentence in place of a traceback."""
  def _render_traceback_(self):
    return [f"kauldron_tour: {self}"]

def stop(sentence):
  """Ends a run that cannot start: one sentence, exit status 2."""
  if IN_NOTEBOOK:
    raise CannotRun(sentence)
  print(f"kauldron_tour: {sentence}", file=sys.stderr)
  sys.exit(2)

def on_signal(number, frame):
  """Ctrl-C ends the section that runs, another signal ends the whole run."""
  if number != signal.SIGINT:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # No one may be listening.
    sys.exit(128 + number)
  INTERRUPTS.append(number)
  if any(x.f_code.co_name in SECTIONS for x, _ in traceback.walk_stack(frame)):
    raise KeyboardInterrupt

def parse_options(argv):
  """Returns the options; `sections` names the sections that are to run."""
  parser = argparse.ArgumentParser("kauldron_tour.py", epilog="A NAME may be a"
      " number. Exit status: 0 passed, 1 a section failed, 2 wrong usage or"
      " environment, 3 passed but not as in the baseline, 130 Ctrl-C.")
  parser.error = lambda message: stop(f"{message}; --help explains.")
  add = parser.add_argument
  add("--list", action="store_true", help="list the sections and exit")
  add("--only", nargs="+", metavar="NAME", default=SECTIONS, help="run these")
  add("--skip", nargs="+", metavar="NAME", default=[], help="leave these out")
  add("--strict", action="store_true", help="a SKIP counts as a failure")
  add("--workdir", metavar="DIR", help="keep runs and pictures below DIR")
  add("--report", metavar="FILE", help="write a report as JSON; - is stdout")
  add("--baseline", metavar="FILE", help="compare with an earlier report")
  add("--no-patch", action="store_true", help="apply no compatibility patch")
  options = parser.parse_args(argv)
  numbered = {str(number): name for number, name in enumerate(SECTIONS)}
  only, skip = ({numbered.get(text, text) for text in texts}
                for texts in (options.only, options.skip))
  for unknown in (only | skip) - set(SECTIONS):
    stop(f"there is no section {unknown!r}; --list shows them all.")
  options.sections = [name for name in SECTIONS if name in only - skip]
  if not options.sections:
    stop("--only and --skip leave no section to run.")
  return options

REQUIREMENTS = """kauldron>=1.4.2 jax flax optax etils numpy
google-cloud-bigquery>=3.20""".split()  # As at the top of the file.

@functools.cache
def temporary_dir():
  """Returns the path of a directory that is removed at exit, no sooner."""
  path = tempfile.mkdtemp(prefix="kauldron_tour_")
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path

def versions():
  """Returns the name of each installed package -> its version."""
  return {x.name: x.version for x in reversed([*metadata.distributions()])}

def install():
  """Installs Kauldron where this is a notebook, and else says how to."""
  command = [sys.executable, "-m", "pip", "install", *REQUIREMENTS]
  if not IN_NOTEBOOK:
    stop("kauldron is not installed: with Python 3.11 to 3.13, "
         f"`{shlex.join(command)}` installs it.")
  print("Kauldron is not installed. Installing it takes minutes.", flush=True)
  before = versions()
  pip = subprocess.run(command, capture_output=True, text=True, check=False)
  if pip.returncode:
    why = re.findall(r"(?:ERROR|error): [^\x1b\n]*|.*\Z", pip.stderr.strip())
    stop(f"pip could not install Kauldron: {why[0]}")
  importlib.invalidate_caches()
  homes = metadata.packages_distributions()
  changed = dict(before.items() - versions().items()).keys()
  in_use = {x for name in sys.modules for x in homes.get(name, ())}
  if replaced := changed & in_use:
    stop("restart the runtime and run this again: pip replaced "
         f"{', '.join(sorted(replaced))}, which had been imported.")

IS_SCRIPT = os.path.realpath(sys.argv[0]) == os.path.realpath(
    stop.__code__.co_filename)  # If not, the arguments are not for us.
OPTIONS = parse_options(sys.argv[1:] if IS_SCRIPT else [])
RUNS = __name__ == "__main__" and not OPTIONS.list  # An import only defines.
SCHEMA, TOLERANCE = 1, 1e-3  # Of reports; relative, between floats of two.
if sys.version_info < (3, 11):
  stop(f"Python {sys.version.split()[0]} is too old: use 3.11 to 3.13.")
if not __debug__:
  stop("python -O strips the assertions this tour is made of: leave out -O.")
try:
  importlib.import_module("kauldron")
except ModuleNotFoundError:
  install()
try:
  assert shutil.disk_usage(tempfile.gettempdir()).free > 5e7, "TMPDIR is full"
  if OPTIONS.workdir:
    OPTIONS.workdir = pathlib.Path(OPTIONS.workdir).expanduser().absolute()
    OPTIONS.workdir.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=OPTIONS.workdir).close()
  if OPTIONS.baseline:
    OPTIONS.baseline = json.loads(pathlib.Path(OPTIONS.baseline).read_text())
    assert OPTIONS.baseline["schema"] == SCHEMA, f"its schema is not {SCHEMA}"
  if OPTIONS.report:
    tempfile.TemporaryFile(dir=pathlib.Path(OPTIONS.report).parent).close()
except (OSError, ValueError, TypeError, KeyError, AssertionError) as error:
  stop(f"cannot use --workdir, --baseline, --report or TMPDIR: {error!r}.")
if RUNS and IN_NOTEBOOK:
  from IPython.display import ProgressBar
  PROGRESS = ProgressBar(len(OPTIONS.sections))
  PROGRESS.display()
elif RUNS:
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)
  sys.excepthook = lambda kind, *error: (
      on_signal(signal.SIGPIPE, None) if kind is BrokenPipeError
      else sys.__excepthook__(kind, *error))
  print(f"A tour of Kauldron: {len(OPTIONS.sections)} sections.", flush=True)

# So that configs say `kauldron_tour:MLP` also where this is called `__main__`.
sys.modules["kauldron_tour"] = sys.modules[__name__]
if IN_NOTEBOOK and IS_SCRIPT:  # `%run` takes the module's own name away.
  sys.modules[__name__].__class__ = type(
      "Tour", (type(sys),), {"__name__": "kauldron_tour"})

# Libraries read these when they are imported. What the caller has set stays.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # Compile faster.
os.environ.setdefault("TQDM_DISABLE", "1")  # Bars would cut up what is printed.

from etils import enp
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
from kauldron import kd, konfig, kontext  # kd is lazy: no TensorFlow yet.
import numpy as np
import optax

# Section 15 needs two devices: virtual ones, unless the caller has a say in it.
if (RUNS and jax.config.jax_num_cpu_devices < 0
    and "device_count" not in os.environ.get("XLA_FLAGS", "")):
  with contextlib.suppress(RuntimeError):  # A notebook's JAX may be running.
    jax.config.update("jax_num_cpu_devices", 2)
try:
  jax.devices()
except (RuntimeError, AssertionError):
  stop(f"JAX finds no device for JAX_PLATFORMS={jax.config.jax_platforms}.")

if not util.find_spec("kauldron.ktyping"):
  print("This Kauldron is older than 1.4: sections that need ktyping fail.")
PATCHES = {}  # What was mended -> the fault that made it necessary.

if not OPTIONS.no_patch:  # Whether a patch is needed shows when it is tried.
  try:
    enp.ArraySpec(shape=(), dtype=np.float32)
  except AttributeError as error:  # etils <= 1.14.0 reads a lost module of JAX.
    enp.array_spec._is_jax_random_dtype = lambda dtype: (
        jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
    PATCHES["etils.enp.array_spec"] = str(error)
  if not hasattr(np, "float128"):  # As on ARM Macs and on Windows.
    np.float128 = np.longdouble
    PATCHES["numpy.float128"] = "NumPy has no float128 on this machine"

@section("Where we are")
def where_we_are():
  """What follows is proved for these versions, devices and patches."""
  packages = "kauldron jax flax optax etils orbax-checkpoint numpy".split()
  versions = {name: metadata.version(name) for name in packages}
  show(f"python {sys.version.split()[0]}",
       ", ".join(f"{name} {version}" for name, version in versions.items()))
  for name, fault in PATCHES.items():
    show(f"patched {name}", fault)
  for module in (jax, flax, optax, np):  # What is imported is what is listed.
    assert module.__version__ == versions[module.__name__], module.__file__
  spec = enp.ArraySpec.from_array(jnp.zeros((2, 3), jnp.float32))
  assert (spec.shape, spec.dtype) == ((2, 3), np.float32), spec
  return dict(backend=jax.default_backend(), devices=jax.device_count(),
              patches=", ".join(PATCHES) or "none")

# %% Part I: the three mechanisms (TensorFlow comes in Part II)
# %% 1. A config is a call tree, and a call tree is a dict
with konfig.imports():  # Import lines only: in all threads they are replaced.
  from kauldron import kd as lazy_kd
  import kauldron_tour as lazy_tour
  import optax as lazy_optax

def raises(kind, call, *args, **kwargs):
  """Returns the error of class `kind` that the call must raise."""
  with unittest.TestCase().assertRaises(kind) as caught:
    call(*args, **kwargs)
  return caught.exception

@section("A config is a call tree, and a call tree is a dict")
def config_tree():
  """Calls are recorded as dicts that survive JSON and become objects later.

  In `konfig.imports()` an import is a stand-in that records calls (`lazy_...`).
  optax has no base class or registry for that: `konfig.resolve` looks up
  "optax:sgd" by name and calls it. A part used twice stays one, also in JSON. A
  value of another type is refused when set, a misspelt argument in that call.
  """
  cfg = lazy_optax.chain(lazy_optax.clip_by_global_norm(1.0),
                         lazy_optax.sgd(learning_rate=0.5, momentum=0.9))
  show("cfg", cfg)
  show("cfg[0]", (type(cfg[0]).__name__, cfg[0].__qualname__))
  before = konfig.resolve(cfg)
  cfg[1].learning_rate = 0.4  # Still a dict, so everything in it can change.
  late = raises(TypeError, konfig.resolve, cfg[-1] | {"learning_rat": 1.0})
  show("konfig.resolve(cfg[-1] | {'learning_rat': 1.0})", str(late))
  assert "argument 'learning_rat'" in str(late), late
  made = [x.name for x in traceback.extract_tb(late.__cause__.__traceback__)]
  assert "config_tree" in made[-2:], made  # The cause is where it was written.
  show("cfg.to_json()", textwrap.fill(cfg.to_json(), 72))
  twice = konfig.ConfigDict({"train": cfg, "eval": cfg})
  read = konfig.ConfigDict(json.loads(twice.to_json()))  # A dict would not do.
  assert read.train is read.eval and "*id001" in repr(read), read
  by_hand = optax.chain(optax.clip_by_global_norm(1.0),
                        optax.sgd(learning_rate=0.4, momentum=0.9))
  params = np.array([1.0, -2.0, 3.0])
  grads = jax.jit(jax.grad(lambda x: (x**4).sum()))(params)
  updates = [jax.jit(x.update)(grads, x.init(params))[0].tolist()
             for x in (konfig.resolve(read.train), by_hand, before)]
  assert updates[0] == updates[1] != updates[2], updates
  early = [raises(TypeError, setattr, cfg[1], "momentum", "high"),
           raises(ValueError, setattr, cfg, "object", len)]
  return dict(cfg=repr(cfg), json=cfg.to_json(), errors=f"{late} {early}")

# %% 2. Change one number, and everything downstream follows
@section("Change one number, and everything downstream follows")
def config_references():
  """`cfg.ref.x` stays tied to x, `cfg.x` copies the value it has now.

  A reference survives arithmetic and, by `konfig.ref_fn`, any function. JSON
  stores values only: what is read back no longer follows. Tuples become lists,
  which `konfig.resolve` freezes again.
  """
  def schedule(steps):
    return lazy_optax.warmup_cosine_decay_schedule(
        0.0, PEAK, warmup_steps=steps // 10, decay_steps=steps)
  cfg, rates = konfig.ConfigDict({"num_train_steps": 1000, "crop": (6, 6)}), []
  cfg.follows = schedule(cfg.ref.num_train_steps)
  cfg.frozen = schedule(cfg.num_train_steps)
  cfg.name = konfig.ref_fn("{} steps".format, cfg.ref.num_train_steps).upper()
  raises(NotImplementedError, bool, cfg.ref.name)  # Too early for an `if`.
  for num_steps, name in itertools.product((1000, 200), ("follows", "frozen")):
    cfg.num_train_steps = num_steps
    rate, steps = konfig.resolve(cfg[name]), np.arange(10) * num_steps // 10
    rates.append(np.array(jax.jit(jax.vmap(rate))(steps), float))
    show(f"{name} at 10, 50, 90 % of {num_steps:4} steps",
         rates[-1][[1, 5, 9]].round(3).tolist())
  draw("schedule", {"follows": (steps, rates[2]), "frozen": (steps, rates[3])},
       xlabel="step", ylabel="learning rate")
  expected = PEAK * (1 + np.cos(np.pi * np.arange(9) / 9)) / 2  # After warm-up.
  assert np.allclose(rates[:3], [0, *expected], atol=1e-6), rates
  assert np.isclose(rates[3][1], PEAK * 20 / 100), rates  # Frozen, of 200.
  read_back = konfig.ConfigDict(json.loads(cfg.to_json()))
  read_back.num_train_steps = 1000
  found = read_back.name, read_back.follows.decay_steps, read_back.crop
  assert (cfg.name, found) == ("200 STEPS", ("200 STEPS", 200, [6, 6])), found
  assert konfig.resolve(read_back.crop) == (6, 6), read_back
  return dict(json=cfg.to_json())

# %% 3. Parts are wired by string key paths
@section("Parts are wired by string key paths")
def key_paths():
  """One loss scores two unlike models, and only its key path differs.

  A context is any tree of dicts, lists, arrays and objects. A field annotated
  `kontext.Key` holds the path at which its value will be found there. `**` is
  any depth. A misspelt key fails when it is looked up: inside `train()`.
  """
  logits, path = np.array([[2.0, 0, 1], [0, 1, 3]]), "preds.heads[1].logits"
  preds = {"heads": [{"logits": -logits}, {"logits": logits}]}
  context = {"batch": {"label": np.c_[[0, 2]]}, "step": 0, "preds": preds}
  def score(preds=preds, **keys):
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(
        labels="batch.label", **keys)
    return float(jax.jit(loss)(context=context | {"preds": preds}))
  nested = str(kontext.path_builder_from("preds", dict).heads[1].logits)
  losses = score(logits, logits="preds"), score(logits=nested)
  by_hand = np.log(np.exp(logits).sum(-1)) - logits[[0, 1], [0, 2]]
  assert np.allclose(losses, by_hand.mean()), (losses, by_hand)
  for text, x in {path: logits, f"{path}[1]": logits[1], "batch.label.size": 2,
                  f"{path}[...,None,::2]": logits[..., None, ::2]}.items():
    parts = kontext.Path.from_str(text)  # A sequence: "preds", "heads", 1, ...
    assert np.array_equal(parts.get_from(context), x), text
    assert (kontext.Path(*parts), text) == (parts, str(parts)), parts
  wrong = str(raises(KeyError, score, logits="preds.head[1].logits"))
  show("a wrong path", wrong)
  assert path in wrong.partition("Did you mean")[2], wrong
  missing = str(raises(ValueError, score))
  assert "required keys: ['logits']" in missing, missing
  raises(KeyError, kontext.set_by_path, context, "preds.heads[2]", {})
  found = kontext.set_by_path(context, "**.logits", 0), preds["heads"]
  assert found == (["preds.heads[0].logits", path], [{"logits": 0}] * 2), found
  return dict(wrong=wrong, missing=missing)

# %% 4. Shapes are checked at run time, by named axes
@contextlib.contextmanager
def definitions():
  """Lets the sections that can do without the definitions run all the same."""
  try:
    yield
  except Exception as error:
    print(f"\nNot defined: {type(error).__name__}: {error}")

with definitions():
  kt = kd.ktyping
  @kt.typechecked
  @dataclasses.dataclass
  class Noise:
    __module__ = "kauldron_tour"  # A notebook's `__main__` has no source.
    mean: kt.Float["n"] | kt.Int["n"]
    scale: kt.Float["n"] | kt.Int["n"]
    key: kt.PRNGKey
  def centered(x: kt.Float["*b n"], mean: kt.Float["*b 1"],
               transpose: bool = False) -> kt.Float["*b n"]:
    return (x - mean).T if transpose else x - mean
  @kt.typechecked
  def norms(
      tree: kt.PyTree[kt.Float["n _"], "$T"],
      scales: kt.PyTree[kt.Float["n"], "$T"]) -> Generator[kt.Float["n"]]:
    for leaf, scale in zip(*map(jax.tree.leaves, (tree, scales)), strict=True):
      yield np.linalg.norm(leaf, axis=-1) * scale

@section("Shapes are checked at run time, by named axes")
def shape_checker():
  """An axis name stands for one size throughout a call, results included.

  `*b` is any number of leading axes. A wrong call may run and return nonsense:
  it broadcasts. What a generator yields is not checked, what it is given is.
  """
  x, rows, checked = np.ones((5, 5)), np.ones((3, 5)), kt.typechecked(centered)
  assert [checked(y, y[..., :1]).shape for y in (x, x[0])] == [(5, 5), (5,)], x
  assert centered(x, x[0]).shape == (5, 5), "it does not broadcast"
  assert [y.shape for y in norms([x, x[:, :3]], [x[0]] * 2)] == [(5,), (5,)], x
  with kt.typechecked():  # A block is a scope as well.
    kt.check_type(rows, kt.Float["*b n"])
    kt.dim["half"] = kt.dim["n"] // 2  # From here on an axis like the others.
    bound = kt.dim["*b"], kt.shape("*b half"), "half: 2" in str(kt.dim), [
        "m" in kt.dim, kt.isinstance((3, 2), kt.Shape["*b half"]),
        kt.isinstance(2, kt.ScalarInt), kt.isinstance(x, kt.Float["*b half"])]
  assert bound == ((3,), (3, 2), True, [False, True, True, False]), bound
  raises(kt.NoActiveScopeError, lambda: kt.dim["n"])  # Nothing is bound here.
  noise = Noise(x[0].astype(int), x[0], jax.random.key(SEED))
  wrong = {word: raises(kt.KTypeCheckError, *call) for word, *call in (
      ("argument mean", checked, x, x[0]),
      ("return value", checked, rows, rows[:, :1], True),
      ("'scale'", lambda: dataclasses.replace(noise, scale=x[0, :2])),
      ("'mean'", lambda: dataclasses.replace(noise, mean=x[0] > 0)),
      ("'key'", lambda: dataclasses.replace(noise, key=3)),
      ("structure", lambda: [*norms([x], [x[0]] * 2)]))}
  assert all(word in first_line(wrong[word]) for word in wrong), wrong
  report = re.sub(" at .*|\n(?=\n)", "", str(wrong["argument mean"])).strip()
  show("the report", report)
  assert "> mean: Float['*b 1']" in report and "{b: 5, n: 5}" in report, report
  return dict(wrong=" ".join(map(first_line, wrong.values())), report=report)

# %% 5. A loss and a metric are states that merge
with definitions():
  @dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
  class FocalLoss(kd.losses.Loss):
    """-(1 - p)^gamma log p, in nats: arXiv:1708.02002, p of the right class."""
    logits: kontext.Key = kontext.REQUIRED
    labels: kontext.Key = kontext.REQUIRED
    gamma: float = 1.0
    @kt.typechecked
    def get_values(self, logits: kt.Float["*b n"],
                   labels: kt.Int["*b 1"]) -> kt.Float["*b 1"]:
      log_probs = jax.nn.log_softmax(logits)
      log_p = jnp.take_along_axis(log_probs, labels, axis=-1)
      return -((1 - jnp.exp(log_p)) ** self.gamma) * log_p
  @dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
  class BalancedAccuracy(kd.metrics.Metric):
    """Mean recall of the classes, in [0, 1], which no mean of batches gives."""
    logits: kontext.Key = kontext.REQUIRED
    labels: kontext.Key = kontext.REQUIRED
    mask: kontext.Key | None = None
    @flax.struct.dataclass
    class State(kd.metrics.AutoState["BalancedAccuracy"]):
      hits: kt.Float["n"] = kd.metrics.sum_field()
      seen: kt.Float["n"] = kd.metrics.sum_field()
      def compute(self):  # Runs outside `jit`, so shapes may depend on values.
        occurs = self.seen > 0
        return float((self.hits[occurs] / self.seen[occurs]).mean())
    @kt.typechecked
    def get_state(self, logits: kt.Float["*b n"], labels: kt.Int["*b 1"],
                  mask: kt.Float["*b 1"] | None = None) -> State:
      weights = jnp.ones(labels.shape) if mask is None else mask
      seen = weights * jax.nn.one_hot(labels[..., 0], logits.shape[-1])
      hit = logits.argmax(-1, keepdims=True) == labels
      batch = tuple(range(labels.ndim - 1))
      return self.State(hits=(hit * seen).sum(batch), seen=seen.sum(batch))

def focal_loss_by_hand(logits, labels, mask, xp=np):
  """Returns the masked mean focal loss of arrays (b, n), (b, 1) and (b, 1)."""
  probs = xp.exp(logits) / xp.exp(logits).sum(-1, keepdims=True)
  p = xp.take_along_axis(probs, labels, -1)
  return (mask * -(1 - p) * xp.log(p)).sum() / mask.sum()

def recall_by_hand(logits, labels, mask):
  """Returns the mean recall over the classes, from the same arrays."""
  kept = mask[:, 0] > 0
  right, label = logits[kept].argmax(-1) == labels[kept, 0], labels[kept, 0]
  return np.mean([right[label == x].mean() for x in np.unique(label)])

@section("A loss and a metric are states that merge")
def loss_and_metric():
  """Both turn arrays into a state, and merged states are the state of all.

  A loss gives values, to be masked, averaged and weighted; a metric its state.
  A state computes an array or a float: a NumPy scalar fails at a checkpoint.
  """
  rng = np.random.default_rng(SEED)
  logits = rng.normal(size=(30, 3)).astype(np.float32)
  labels = rng.integers(3, size=(30, 1)).astype(np.int32)
  some = rng.integers(2, size=(30, 1)).astype(np.float32) / 64  # Weights.
  def context(rows):
    batch = {"label": labels[rows], "mask": some[rows]}
    return {"step": 3, "preds": logits[rows], "batch": batch}
  keys = dict(logits="preds", labels="batch.label")
  loss = FocalLoss(**keys, weight=optax.linear_schedule(0, 2, 6))  # 1 at 3.
  for part, by_hand in ((loss, focal_loss_by_hand),
                        (BalancedAccuracy(**keys), recall_by_hand)):
    masked = dataclasses.replace(part, mask="batch.mask")
    whole, first, rest = (jax.jit(masked.get_state_from_context)(context(x))
                          for x in (slice(30), slice(10), slice(10, 30)))
    every = jax.jit(part.get_state_from_context)(context(slice(30)))
    values = [x.finalize().compute() for x in (every, whole, first.merge(rest))]
    show(f"{type(part).__name__} of all, of some", [*map(float, values[:2])])
    expected = [by_hand(logits, labels, x) for x in (some**0, some, some)]
    assert np.allclose(values, expected), (values, expected)
    mean = (first.finalize().compute() + rest.finalize().compute()) / 2
    assert not np.isclose(values[1], mean), "a mean of batch values would do"
  error = raises(kt.KTypeCheckError, loss.get_values, logits, labels[:, 0])
  assert "labels" in first_line(error) and "(30,)" in first_line(error), error
  return dict(refused=first_line(error))

# %% Part II: a real Trainer
def import_quietly(module):
  """Imports a module, keeping from stderr what TensorFlow says on the way."""
  importlib.import_module("absl.logging")  # It keeps the stderr that it finds.
  stderr = os.dup(2)
  gc.disable()  # So much is loaded that it would run all the time.
  unseen = unittest.mock.patch.object(logging.root, "handlers", [])
  with open(os.devnull, "w") as null, unseen, contextlib.redirect_stderr(null):
    os.dup2(null.fileno(), 2)  # For what does not go through `sys.stderr`.
    try:
      importlib.import_module(module)
      if "tensorflow" in sys.modules:  # It looks for a GPU later, and says so.
        sys.modules["tensorflow"].config.list_physical_devices()
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      gc.freeze()  # Half a second less each time: modules are no garbage.
      gc.enable()

if RUNS and not {*OPTIONS.sections} <= {*SECTIONS[:6]}:
  print("\nImporting TensorFlow: 5 to 15 seconds, once ...", flush=True)
  with definitions():
    import_quietly("kauldron.train")
  if not jax.config.jax_compilation_cache_dir:  # The runs share programs.
    jax.config.update("jax_compilation_cache_dir", temporary_dir())

def run_dir(name):
  """Returns the path of a new work directory, which starts with the name."""
  return tempfile.mkdtemp("", f"{name}_", OPTIONS.workdir or temporary_dir())

# %% The task of Part II: which way do the stripes run?
@functools.cache
def stripes(num_images, seed):
  """Returns image, float32 (n, 8, 8, 1) in [-1, 1], and label, int32 (n, 1)."""
  rng = np.random.default_rng(seed)
  label = rng.integers(NUM_CLASSES, size=(num_images, 1))  # Times 45 degrees.
  angle, phase = label * np.pi / 4, rng.uniform(0, 2 * np.pi, label.shape)
  y, x = np.mgrid[:8, :8].reshape(2, 1, -1)
  wave = np.cos(np.pi / 2 * (np.cos(angle) * x + np.sin(angle) * y) + phase)
  image = 0.5 * wave + rng.normal(scale=0.2, size=wave.shape)
  image = image.clip(-1, 1).reshape(num_images, 8, 8, 1)
  return {"image": image.astype(np.float32), "label": label.astype(np.int32)}

train_images = functools.partial(stripes, 1024, seed=SEED)
held_out_images = functools.partial(stripes, 240, seed=SEED + 1)

class MLP(nn.Module):
  """Two dense layers; `image` is a key path, like those of a loss."""
  image: kontext.Key = kontext.REQUIRED
  width: int = WIDTH
  @nn.compact
  def __call__(self, image):
    dense = functools.partial(nn.Dense, use_bias=False)
    x = dense(self.width, name="encoder")(image.reshape(len(image), -1))
    return {"logits": dense(NUM_CLASSES, name="head")(nn.relu(x))}

def get_config():
  """Returns the config that the rest of the tour starts from."""
  devices, examples = jax.device_count(), len(train_images()["label"])
  assert BATCH_SIZE % devices == 0 and BATCH_SIZE <= examples, (
      f"{BATCH_SIZE=} must be a multiple of {devices=}, at most {examples=}")
  cfg = lazy_kd.train.Trainer(seed=SEED, workdir="unused")
  cfg.train_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.train_images, batch_size=BATCH_SIZE, shuffle=True)
  cfg.model = lazy_tour.MLP(image="batch.image", width=WIDTH)
  keys = dict(logits="preds.logits", labels="batch.label")
  cfg.train_losses = {"focal": lazy_tour.FocalLoss(**keys, gamma=1.0)}
  cfg.train_metrics = {"accuracy": lazy_tour.BalancedAccuracy(**keys)}
  cfg.optimizer = lazy_optax.adam(learning_rate=LEARNING_RATE)
  cfg.num_train_steps, cfg.log_metrics_every = NUM_STEPS, LOG_EVERY
  cfg.log_summaries_every = cfg.ref.log_metrics_every  # One program less.
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(save_interval_steps=SAVE_EVERY)
  cfg.profiler = None  # By default every run is traced.
  return cfg

def mlp_by_hand(params, image):
  """Returns what encoder (num_images, width) and head of an MLP put out."""
  encoder, head = (np.array(params[x]["kernel"]) for x in ("encoder", "head"))
  encoded = image.reshape(len(image), -1) @ encoder
  return encoded, np.maximum(encoded, 0) @ head

def scores_by_hand(params, data=None):
  """Returns tag -> loss or metric of these or of held-out images, by NumPy."""
  data = data or held_out_images()
  encoded, logits = mlp_by_hand(params, data["image"])
  assert np.isfinite(logits).all(), "training has diverged: it predicts NaN"
  arrays = logits, data["label"], np.ones((len(logits), 1))
  return {"losses/total": float(focal_loss_by_hand(*arrays)),
          "metrics/accuracy": float(recall_by_hand(*arrays)),
          "metrics/norm": np.linalg.norm(encoded, axis=-1).mean(),
          "metrics/spread": encoded.std()}

# %% 6. A Trainer joins model, data, losses and optimizer
@functools.cache
def train_once(make_config):
  """Trains what `make_config` returns; returns that config, state and aux."""
  cfg = make_config()
  cfg.workdir = run_dir(make_config.__name__)  # Absolute, or it fails late.
  return cfg, *konfig.resolve(cfg).train()

def restored(cfg, step=-1):
  """Returns the state that a run saved at a step, by default at its last."""
  trainer = konfig.resolve(cfg)  # A trainer that has trained cannot restore.
  return trainer.checkpointer.restore(trainer.init_state(), step=step)

@section("A Trainer joins model, data, losses and optimizer")
def real_trainer():
  """A resolved config trains, and takes one step more than it says.

  `num_train_steps=N` runs steps 0 to N, the returned state has taken N + 1. A
  checkpoint labelled K holds the state before step K; three are kept, and steps
  after the newest are in none. `workdir` has no default and must be absolute.
  `aux` is of the last step, and empty unless `log_metrics_every` divides N.
  """
  cfg, state, _ = train_once(get_config)
  trainer = konfig.resolve(cfg)
  steps = int(state.step), int(state.opt_state[0].count)
  saved = list(trainer.checkpointer.all_steps)
  show("steps taken by state and optimizer; with a checkpoint", (steps, saved))
  assert steps == (NUM_STEPS + 1, NUM_STEPS + 1), steps
  assert saved == [SAVE_EVERY, 2 * SAVE_EVERY, 3 * SAVE_EVERY], saved
  (before, *_), (loss, accuracy, *_) = (
      scores_by_hand(x.params).values() for x in (trainer.init_state(), state))
  show("held-out data", f"{loss=:.3f} (was {before:.3f}) {accuracy=:.3f}")
  raises(TypeError, konfig.resolve, get_config() | {"workdir": None})
  assert loss < before / 10, (before, loss)
  assert accuracy > 0.95, accuracy
  return dict(loss=loss, accuracy=accuracy, config=get_config().to_json())

# %% 7. The training loop is one you could write yourself
def distance(tree, other):
  """Returns the largest absolute difference between two trees' leaves."""
  far = jax.tree.map(lambda x, y: np.abs(np.subtract(x, y)).max(), tree, other)
  return float(max(jax.tree.leaves(far)))

def loop(trainer, state, batches, **wanted):
  """Returns the state after a step on each batch, and the aux of each step."""
  auxs = []  # A state that is passed is used up: its buffers hold the next one.
  for batch in batches:
    batch = kd.sharding.device_put(batch, trainer.sharding.batch)
    state, aux = trainer.trainstep.step(state, batch, **wanted)
    auxs.append(aux)
  return state, auxs

@functools.partial(jax.jit, static_argnums=0)
def plain_step(optimizer, params, opt_state, batch):
  """Returns new params, optimizer state and the loss, without any Kauldron."""
  def loss_fn(params):
    logits = MLP().apply({"params": params}, batch["image"])["logits"]
    mask = jnp.ones((len(logits), 1))
    return focal_loss_by_hand(logits, batch["label"], mask, jnp)
  loss, grads = jax.value_and_grad(loss_fn)(params)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss

@section("The training loop is one you could write yourself")
def readable_loop():
  """`train()`, a loop over `trainstep.step` and plain JAX end up the same.

  The first two run the same program and agree bit for bit. The third shares
  only the batches and the first parameters, and agrees to rounding.
  """
  cfg, trained, aux = train_once(get_config)
  trainer = konfig.resolve(cfg)
  batches = list(itertools.islice(trainer.train_ds, NUM_STEPS + 1))
  state = trainer.init_state()
  params = jax.device_get(state.params)
  by_steps, _ = loop(trainer, state, batches)
  optimizer = optax.adam(LEARNING_RATE)
  opt_state = optimizer.init(params)
  for batch in batches:
    before = params
    params, opt_state, loss = plain_step(optimizer, params, opt_state, batch)
  to_plain, step = distance(trained.params, params), distance(before, params)
  show("distance to plain JAX", f"{to_plain:.1e} (its last step: {step:.1e})")
  assert distance(trained, by_steps) == 0, distance(trained, by_steps)
  assert to_plain < 1e-4 < step, (to_plain, step)
  losses = aux.compute().loss_values["losses/total"], loss
  assert np.isclose(*losses, rtol=1e-4), losses
  return dict(distance_to_step=distance(trained, by_steps), loss=float(loss))

# %% 8. An inner layer is watched through a key path
def stepped(cfg, num_steps, state=None, **wanted):
  """Returns state and auxs after so many training steps, taken one by one."""
  trainer = konfig.resolve(cfg)
  batches = itertools.islice(trainer.train_ds, num_steps)
  return loop(trainer, state or trainer.init_state(), batches, **wanted)

@functools.cache
def first_steps():
  """Returns params before steps 0 to LOG_EVERY of a base run; last batch."""
  trainer, params = konfig.resolve(get_config()), []
  state = trainer.init_state()
  for batch in itertools.islice(trainer.train_ds, LOG_EVERY + 1):
    params.append(jax.device_get(state.params))
    state, _ = loop(trainer, state, [batch])
  return params, batch

def watched_config():
  """Returns a config with metrics and summaries of what is inside the step."""
  layer, norm = "interms.encoder.__call__[0]", lazy_kd.metrics.Norm
  cfg = get_config()
  cfg.checkpointer = lazy_kd.ckpts.NoopCheckpointer()
  cfg.num_train_steps, cfg.log_summaries_every = LOG_EVERY, 1
  cfg.train_metrics.update(
      norm=norm(tensor=layer), spread=lazy_kd.metrics.Std(values=layer),
      kernels=lazy_kd.metrics.TreeMap(metric=norm(tensor="params.**.kernel")),
      grads=lazy_kd.metrics.SkipIfMissing(norm(tensor="grads.head.kernel")))
  cfg.train_summaries = {
      "layer": lazy_kd.summaries.HistogramSummary(tensor=layer),
      "images": lazy_kd.summaries.ShowImages(
          images="batch.image", in_vrange=(-2, 2), cmap="gray", num_images=60)}
  cfg.optimizer = lazy_kd.optim.named_chain(  # An average for section 11.
      adam=cfg.optimizer, ema=lazy_kd.optim.ema_params(decay=.5, debias=False))
  return cfg

def read_events(workdir, tag, collection="train"):
  """Returns the steps and the values that a run wrote under a tag."""
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.util import tensor_util
  events = event_accumulator.EventAccumulator(  # 0: keep all, not ten.
      os.path.join(workdir, collection), size_guidance={"tensors": 0})
  tensors = events.Reload().Tensors(tag)
  values = [tensor_util.make_ndarray(t.tensor_proto).tolist() for t in tensors]
  return [t.step for t in tensors], values

@section("An inner layer is watched without touching the model")
def inner_layer():
  """What a layer returns is in the context, at `interms.<layer>.__call__[0]`.

  A step's metrics and summaries see its parameters before their update.
  """
  (cfg, *_, aux), (params, batch) = train_once(watched_config), first_steps()
  expected = scores_by_hand(params[-1], batch)
  encoded, logits = mlp_by_hand(params[-1], batch["image"])
  grads = jax.jit(jax.grad(focal_loss_by_hand), static_argnums=3)(
      logits, batch["label"], np.ones((len(logits), 1)), jnp)
  arrays = {"grads": np.maximum(encoded, 0).T @ grads} | {
      f"kernels/{x}/kernel": params[-1][x]["kernel"] for x in params[-1]}
  for tag, array in arrays.items():
    expected[f"metrics/{tag}"] = np.linalg.norm(array, axis=-1).mean()
  found = {tag: read_events(cfg.workdir, tag) for tag in expected}
  steps, buckets = map(np.array, read_events(cfg.workdir, "summaries/layer"))
  draw("inner_layer", {"largest": (steps, buckets[:, -1, 1])},
       xlabel="step", ylabel="largest output of the encoder")
  for tag, (steps, values) in found.items():
    show(tag, f"{values[-1]:.3f} at step {steps[-1]}")
    assert steps[-1] == LOG_EVERY, (tag, steps)
    assert np.isclose(values[-1], expected[tag], rtol=1e-4), (tag, expected)
  state = aux.summary_states["layer"]  # It concatenates: not under `jit`.
  raises(RuntimeError, jax.jit(lambda x: x.merge(x)), state)
  tensor = state.compute().tensor
  assert np.allclose(tensor, encoded.ravel(), atol=1e-4), encoded
  counts, edges = np.histogram(tensor, bins=30)  # As many by default.
  assert np.allclose(buckets[-1], np.c_[edges[:-1], edges[1:], counts]), edges
  context = read_events(cfg.workdir, "context_spec")[1][0].decode()
  return dict(norm=aux.metric_states["norm"].compute().item(), context=context)

# %% 9. A sweep changes one line at a time
VARIANTS = {  # Name -> the path that it changes in the config, and to what.
    "base": {}, "shuffled": {"train_ds.seed": SEED + 1},
    "slow": {"optimizer.learning_rate": LEARNING_RATE / 5},
    "rmsprop": {"optimizer.__qualname__": "optax:rmsprop"},
    "narrow": {"model.width": 8}, "sharp": {"train_losses.focal.gamma": 3.0}}

@section("A sweep changes one line of the config at a time")
def sweep():
  """Variants differ from the base in one path, and so in what they learn."""
  flat, curves = kontext.flatten_with_path(get_config()), {}
  print(f"  {'variant':9} {'changed line':42} held-out accuracy")
  for name, change in VARIANTS.items():
    cfg = get_config()
    for path, value in change.items():
      kontext.set_by_path(cfg, path, value)
    changed = set(kontext.flatten_with_path(cfg).items()) ^ set(flat.items())
    assert {path for path, _ in changed} == set(change), changed
    state, auxs = stepped(cfg, NUM_STEPS // 5, return_losses=True,
                          return_metrics=True, return_summaries=True)  # Cached.
    curves[name] = range(len(auxs)), [
        float(aux.compute().loss_values["losses/total"]) for aux in auxs]
    accuracy = scores_by_hand(state.params)["metrics/accuracy"]
    print(f"  {name:9} {str(change)[1:-1]:42} {accuracy:.3f}")
  draw("sweep", curves, xlabel="step", ylabel="training loss (nats)")
  _, base = curves["base"]
  for name, (_, losses) in curves.items():
    assert (losses == base) == (name == "base"), (name, losses)
    assert (losses[0] == base[0]) == (  # Nothing is updated yet.
        name in ("base", "slow", "rmsprop")), (name, losses)
  return {name: losses[-1] for name, (_, losses) in curves.items()}

# %% 10. A run resumes where it stopped, if its data can
def train_examples():
  """Returns the training images one by one: all PyGrain needs is a sequence."""
  pairs = zip(*train_images().values(), strict=True)
  return [dict(image=x, label=y) for x, y in pairs]

@section("A run resumes where it stopped, if its data can")
def resumed_run():
  """A checkpoint restores bit for bit; whether the batches go on is the data's.

  `InMemoryPipeline` starts over with its first batch after a resume. A PyGrain
  `DataSource` saves its position, and the run ends as if never interrupted.
  """
  cfg, half = get_config(), LOG_EVERY
  cfg.train_ds = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.train_examples(), batch_size=BATCH_SIZE,
      shuffle=True, num_workers=0)
  whole, _ = stepped(cfg, 2 * half + 1)
  cfg.checkpointer.save_interval_steps = half
  cfg.workdir, cfg.writer = run_dir("resumed"), None  # Checkpoints only.
  cfg.num_train_steps, cfg.stop_after_steps = 2 * half, half + 1
  konfig.resolve(cfg).train()  # Stops after a checkpoint and one more step.
  cfg.stop_after_steps = None
  facts = {"pygrain": distance(konfig.resolve(cfg).train()[0], whole)}
  base, whole, _ = train_once(get_config)  # No checkpoint has its last steps.
  cfg = base.copy_and_resolve_references()
  cfg.workdir, cfg.writer = shutil.copytree(
      base.workdir, run_dir("resumed_in_memory"), dirs_exist_ok=True), None
  resumed, _ = konfig.resolve(cfg).train()
  facts["in_memory"] = distance(resumed, whole)
  assert facts["pygrain"] == 0 < facts["in_memory"], facts
  state = restored(base)  # From here on with the first batches.
  replayed, _ = stepped(base, NUM_STEPS + 1 - state.step, state)
  assert distance(resumed, replayed) == 0, distance(resumed, replayed)
  return facts

# %% Part III: what a real project needs next
# %% 11. Held-out data is scored along the way
held_out_ds = functools.partial(
    lazy_kd.data.InMemoryPipeline, loader=lazy_tour.held_out_images,
    batch_size=BATCH_SIZE, num_epochs=1)

def scored_config():
  """Returns a config that scores held-out data, once by averaged parameters."""
  evals, cfg = lazy_kd.evals, watched_config()
  cfg.eval_ds = held_out_ds()
  cfg.evals = {
      "held_out": evals.Evaluator(run=evals.EveryNSteps(LOG_EVERY // 2)),
      "averaged": evals.Evaluator(
          run=evals.Once(LOG_EVERY), num_batches=5, cache=True,
          init_transform=lazy_kd.optim.UseEmaParams(),
          metrics={"accuracy": cfg.train_metrics.accuracy})}
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(
      save_interval_steps=LOG_EVERY // 2, max_to_keep=1, best_mode="min",
      best_metric_path="held_out.accuracy")  # "max" would keep the newest.
  return cfg

@section("Held-out data is scored along the way")
def evaluators():
  """Every n steps an evaluator scores the state of that moment on its data.

  It uses the losses and metrics of training if given none, and writes them
  under its own name. Data that ends (`num_epochs`) is read to its end. One of
  the metrics can decide which checkpoints are kept.
  """
  (cfg, *_), (params, _) = train_once(scored_config), first_steps()
  assert [*konfig.resolve(cfg).checkpointer.all_steps] == [0], "not the worst"
  by_hand = [scores_by_hand(params[step]) for step in (0, 5, 10)]
  found = {tag: read_events(cfg.workdir, tag, "held_out") for tag in by_hand[0]}
  for tag, (steps, values) in found.items():
    show(f"{tag} at steps {steps}", np.round(values, 3).tolist())
    assert steps == [0, 5, 10], steps
    assert np.allclose(values, [x[tag] for x in by_hand], rtol=1e-4), values
  raises(KeyError, read_events, cfg.workdir, "metrics/grads", "held_out")
  average = functools.reduce(lambda old, new: jax.tree.map(
      lambda x, y: (x + y) / 2, old, new), params)
  expected = scores_by_hand(average)["losses/total"]
  steps, (loss,) = read_events(cfg.workdir, "losses/total", "averaged")
  raises(KeyError, read_events, cfg.workdir, "metrics/norm", "averaged")
  _, images = read_events(cfg.workdir, "summaries/images", "held_out")
  assert len(images[-1]) == 2 + 60, "the first 60, from two batches"
  assert steps == [10] and np.isclose(loss, expected, rtol=1e-4), expected
  return dict(loss=found["losses/total"][1][-1], averaged=loss)

# %% 12. A work directory gives back its run
def continuous_eval(cfg):
  """Returns tag -> score of the checkpoint that an evaluator waits for."""
  cfg.evals = {"late": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.StandaloneEveryCheckpoint(), ds=held_out_ds())}
  # For another one it would wait 20 seconds: the clock it is given runs fast.
  clock = unittest.mock.Mock(time=itertools.count(step=9).__next__)
  with unittest.mock.patch("orbax.checkpoint.checkpoint_utils.time", clock):
    scores = konfig.resolve(cfg).continuous_eval("late")["late"].compute()
  return scores.loss_values | scores.metric_values

@section("A work directory gives back its run")
def rebuilt_run():
  """`config.json` gives the Trainer, and a checkpoint beside it the state.

  The steps after the newest checkpoint are taken again. A config without
  Checkpointer gives back the state it gets: look at its step. Of another config
  in this directory only other shapes are refused; `config.json` stays the same.
  """
  cfg, trained, _ = train_once(get_config)
  workdir = pathlib.Path(shutil.copytree(
      cfg.workdir, run_dir("moved"), dirs_exist_ok=True))
  cfg = konfig.ConfigDict(json.loads((workdir / "config.json").read_text()))
  cfg.workdir = str(workdir)
  trainer, state = konfig.resolve(cfg), restored(cfg)
  step = int(state.step)
  by_hand = scores_by_hand(state.params)
  batches = itertools.islice(trainer.train_ds, step, NUM_STEPS + 1)
  state, _ = loop(trainer, state, batches)
  assert (step, distance(state, trained)) == (3 * SAVE_EVERY, 0), step
  tags, scores = ("losses/total", "metrics/accuracy"), continuous_eval(cfg)
  late, expected = ([float(x[tag]) for tag in tags] for x in (scores, by_hand))
  show(f"loss and accuracy of step {step}, scored late", late)
  assert np.allclose(late, expected, rtol=1e-4), (late, expected)
  return dict(step=step, files=" ".join(sorted(os.listdir(workdir))),
              element_spec=(workdir / "element_spec.json").read_text())

# %% 13. Trained weights are loaded, part is frozen
@section("Trained weights are loaded, part is frozen")
def partial_training():
  """Frozen parameters keep every bit that was loaded, and the others move.

  `partial_updates` leaves alone what its mask does not select. The loader for
  parts of another model needs an orbax module that may be missing: it is tried.
  """
  pretrained, cfg = train_once(get_config)[0], get_config()
  source, workdir = restored(pretrained).params, pretrained.workdir
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(workdir=workdir)
  cfg.optimizer = lazy_kd.optim.partial_updates(
      lazy_optax.adam(LEARNING_RATE), mask=lazy_kd.optim.exclude("encoder"))
  with warnings.catch_warnings(action="ignore"):  # orbax: no sharding is given.
    loaded, tuned = (stepped(cfg, n)[0].params for n in (0, LOG_EVERY))
  assert distance(source, loaded) == 0, distance(source, loaded)
  moves = kontext.flatten_with_path(jax.tree.map(distance, source, tuned))
  for path, moved in moves.items():
    show(f"{path} moved by", f"{moved:.3f}")
    assert (moved > LEARNING_RATE) if "head" in path else moved == 0, path
  cfg.init_transform = lazy_kd.ckpts.PartialKauldronLoader(workdir=workdir)
  try:
    outcome = f"distance {distance(source, stepped(cfg, 0)[0].params)}"
  except Exception as error:  # Not a claim of this tour, but worth knowing.
    outcome = first_line(error)
  show("PartialKauldronLoader", outcome)
  return dict(partial_loader=outcome)

# %% 14. What a run wrote can be read back
@section("What a run wrote can be read back")
def event_files():
  """Event files hold the scalars, images and texts that TensorBoard shows.

  A summary that computes floats (n, h, w, c) is an image. Losses are written
  with metrics and with summaries, a table of the parameters once, as a text.
  """
  from matplotlib import image
  (cfg, *_, aux), (params, batch) = train_once(watched_config), first_steps()
  computed = aux.compute()
  for tag, value in (computed.loss_values | computed.metric_values).items():
    steps, values = read_events(cfg.workdir, tag)
    assert values[-1] == np.float32(value), (tag, values, value)
    assert steps == ([0, 10] if "metrics" in tag else [*range(11)]), steps
  steps, images = read_events(cfg.workdir, "summaries/images")
  pixels = np.array([image.imread(io.BytesIO(x)) for x in images[-1][2:]])
  error = np.abs(pixels[..., :3] - (batch["image"] + 2) / 4).max()
  assert error < 2 / 255 and steps == [*range(11)], (error, steps)
  _, (table,) = read_events(cfg.workdir, "parameters")
  size = sum(x.size for x in jax.tree.leaves(params[0]))
  assert f"\nTotal: {size:,} " in table.decode(), table.decode()
  return dict(table=re.sub(r"-?\d+\.\S+", "", table.decode()))

# %% 15. One config line shards the model
@section("One config line shards the model")
def sharding():
  """With `FSDPSharding` a device holds a part of each array, not a copy.

  By default it copies arrays up to 4 MB. Several hosts (not tried here) run the
  same config after `jax.distributed.initialize()`: JAX's multi-host runtime.
  """
  n, cfg, facts = jax.device_count(), get_config(), {}
  if n == 1 or 64 % n:
    raise unittest.SkipTest(f"{n} devices cannot share an axis of 64: start JAX"
                            " with JAX_NUM_CPU_DEVICES=2")
  fsdp = lazy_kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  cfg.sharding = lazy_kd.sharding.ShardingStrategy(params=fsdp, opt_state=fsdp)
  copied, spread = (stepped(x, LOG_EVERY)[0] for x in (get_config(), cfg))
  for name, state, parts in (("copied", copied, 1), ("spread", spread, n)):
    shards = [shard for tree in (state.params, state.opt_state[0].mu)
              for shard in tree["encoder"]["kernel"].addressable_shards]
    facts[name] = " ".join({str(shard.data.shape) for shard in shards})
    show(f"encoder.kernel {name}: shape on each device", facts[name])
    assert facts[name] == str((64 // parts, WIDTH)), facts
    assert {shard.device for shard in shards} == set(jax.devices()), shards
  assert distance(copied.params, spread.params) < 1e-5, "trained otherwise"
  at_most, more = map(kd.sharding.FSDPSharding(), map(np.zeros, (2**19, 2**20)))
  assert at_most.is_fully_replicated and not more.is_fully_replicated, more
  return facts

# %% 16. This file is a config file
@section("This file is a config file")
def config_file():
  """`python -m kauldron.main --cfg=kauldron_tour.py` trains `get_config()`.

  It wants `--cfg.workdir=DIR` as well. Flags change any field by its path, an
  object by `py::` and a call; what refers to a field follows.
  """
  from absl import flags
  path = get_config.__code__.co_filename
  if not os.path.isfile(path):
    raise unittest.SkipTest("the tour was pasted: there is no file to name")
  argv = ["kauldron.main", f"--cfg={path}", "--cfg.workdir=out",
          "--cfg.log_metrics_every=5", "--cfg.train_losses.focal.gamma=2.0",
          "--cfg.model=py::kauldron_tour.MLP(image='batch.image', width=8)",
          "--cfg.aux=py::{'a': [-2, -.5, a.b()], 'b': (False, None, 'x')}"]
  values = flags.FlagValues()
  flag = konfig.DEFINE_config_file(name="cfg", default=None, flag_values=values)
  patch = unittest.mock.patch.multiple(sys, argv=argv, dont_write_bytecode=True)
  with patch, unittest.mock.patch.dict(sys.modules):
    values(argv)  # This runs the file once more, which then is `kauldron_tour`.
  cfg, aux = flag.value, flag.value.aux
  assert (repr(aux.a), aux.b) == (
      "[-2, -0.5, <ConfigDict[a.b()]>]", (False, None, "x")), aux
  del cfg.aux
  flat, base = map(kontext.flatten_with_path, (cfg, get_config()))
  changed = dict(flat.items() - base.items())
  show("changed", "\n".join(f"{x} = {changed[x]}" for x in sorted(changed)))
  assert changed == {
      "workdir": "out", "log_metrics_every": 5, "log_summaries_every": 5,
      "train_losses.focal.gamma": 2.0, "model.width": 8}, changed
  return dict(changed=" ".join(sorted(changed)))

# %% 17. Dropout knows whether it trains
def dropout_config():
  """Returns a config whose model drops out its input; a summary keeps that."""
  cfg = get_config()
  cfg.model = lazy_kd.nn.Sequential(
      inputs="batch.image", layers=[lazy_kd.nn.Dropout(rate=0.25)])
  cfg.train_losses, cfg.train_metrics, cfg.train_summaries = {}, {}, {}
  cfg.train_summaries["x"] = lazy_kd.summaries.HistogramSummary(tensor="preds")
  cfg.evals = {"x": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.EveryNSteps(1), ds=cfg.train_ds)}
  return cfg

@section("Dropout knows whether it trains")
def random_streams():
  """No layer is handed a flag or a key: the step and the evaluator set them.

  `kd.nn.Dropout` asks `kd.nn.train_property()`, as any module may. The key of a
  stream is made from seed, name, step and mode, so a mask can be made again.
  """
  trainer = konfig.resolve(dropout_config())
  state, batch = trainer.init_state(), next(iter(trainer.train_ds))
  auxs = [trainer.evals["x"].step(step_nr=0, state=state, batch=batch)]
  auxs += loop(trainer, state, [batch, batch], return_summaries=True)[1]
  preds = np.array([aux.summary_states["x"].compute().tensor for aux in auxs])
  kept = preds != 0
  share = kept.mean(axis=-1)
  show("share kept by evaluator, step 0, step 1", share.round(3).tolist())
  assert np.allclose(share, [1, 0.75, 0.75], atol=0.03), share
  expected = kept * batch["image"].ravel() / [[1], [0.75], [0.75]]
  assert np.allclose(preds, expected), np.abs(preds - expected).max()
  key = kd.random.PRNGKey(jax.random.key(SEED)).fold_in("dropout").fold_in(1)
  again = trainer.model.apply({}, batch["image"], is_training_property=True,
                              rngs={"dropout": key.fold_in("train")})
  assert np.array_equal(again.ravel() != 0, kept[2]), "another mask at step 1"
  assert not np.array_equal(kept[1], kept[2]), "one mask for all steps"
  rngs = trainer.rng_streams.train_rngs(1)
  assert not np.array_equal(rngs["default"], rngs["dropout"]), rngs
  return dict(streams=" ".join(rngs))

# %% 18. A data pipeline is config too
def with_copy(example):
  """Adds a copy of the image: a transform is any function of an example."""
  return example | {"copy": example["image"].copy()}

@section("A data pipeline is config too")
def data_pipeline():
  """Transforms change one example after the other, then batches are formed.

  A source needs a length and an index, no more. The element spec is all that
  the Trainer has to know of a batch to initialise the model. What is left over
  from the last batch is dropped: from less than one batch nothing ever comes.
  """
  data, cfg = lazy_kd.data, get_config()
  cfg.train_ds = data.py.DataSource(
      data_source=lazy_tour.train_examples(), batch_size=BATCH_SIZE,
      shuffle=False, num_epochs=1, num_workers=0, transforms=[
          data.Elements(keep=["image"], rename={"label": "angle"}),
          data.ValueRange(key="image", in_vrange=(-1, 1), vrange=(0, 1)),
          lazy_tour.with_copy, data.py.RandomFlipLeftRight(key="copy"),
          data.py.RandomCrop(key="image", shape=(None, 6, None))])
  ds = konfig.resolve(cfg).train_ds
  spec = {key: str(array) for key, array in ds.element_spec.items()}
  assert len(ds) == 1024 // BATCH_SIZE, len(ds)
  batch = ds[1]
  assert distance(batch, list(itertools.islice(ds, 2))[1]) == 0, "not in order"
  source = {k: x[BATCH_SIZE:2 * BATCH_SIZE] for k, x in train_images().items()}
  image = (source["image"] + 1) / 2
  assert np.array_equal(batch["angle"], source["label"]), batch["angle"]
  for key, views in {"copy": [image, image[:, :, ::-1]],
                     "image": [image[:, :, x:x + 6] for x in range(3)]}.items():
    found = np.isclose(views, batch[key]).all((2, 3, 4))  # Of views, examples.
    assert (found.sum(0) == 1).all() and found.any(1).all(), (key, found)
  assert spec == {
      key: str(enp.ArraySpec.from_array(x)) for key, x in batch.items()}, spec
  return spec

# %% 19. The older type checker still agrees
SPECS = {  # Axes of y, with x of axes "a b", (2, 6) -> what fits and what not.
    "b a": ((6, 2), (2, 6)), "_ 6": ((9, 6), (9, 5)), "... b": ((1, 6), (6, 1)),
    "*c a": ((2,), (3,)), "#b a": ((1, 2), (3, 2)), "a*b": ((12,), (8,)),
    "a**2+1": ((5,), (4,)), "max(a,b)": ((6,), (2,)), "a|b": ((6,), (3,)),
    "+c a": ((5, 2), (2,)), "b? a": ((2,), (5, 2)), "a*c": ((12,), (3,))}
DTYPES = """Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16
BFloat16 Float32 Float64 Complex64 Complex128""".split()
TYPES = {x: [x] for x in DTYPES} | {  # Type -> dtypes of arrays of that type.
    "Int": DTYPES[1:9], "SInt": DTYPES[1:5], "UInt": DTYPES[5:9],
    "IntOrBool": DTYPES[:9], "Float": DTYPES[9:13], "Complex": DTYPES[13:],
    "Num": DTYPES[1:], "Array": DTYPES}

def dtypes_of(array_type):
  """Returns the dtypes that NumPy arrays of a type may have."""
  return [x for x in DTYPES if isinstance(
      np.ones(3, jnp.dtype(x.lower())), array_type["3"])]

def judge(checker, error, sizes):
  """Returns spec or type -> the shapes or dtypes that a checker accepts."""
  types = (getattr(checker, name, None) for name in TYPES)
  accepted = {x.__name__: dtypes_of(x) for x in types if x}
  for spec, (fits, wrong) in SPECS.items():
    @checker.typechecked
    def call(x: checker.Float["a b"], y: checker.Float[spec] | checker.Int[""],
             z) -> checker.Float[spec]:
      assert sizes("a b//a b**2-1 b%4 -a+8 7") == (2, 3, 35, 2, 6, 7), x.shape
      return z
    for y, z in ((fits, fits), (fits, wrong), (wrong, fits)):
      with contextlib.suppress(error):
        call(np.ones((2, 6)), np.ones(y), np.ones(z))
        accepted.setdefault(spec, []).append((y, z))
  return accepted

@section("The older type checker still agrees")
def type_checkers():
  """`kauldron.typing` judges as `ktyping` does, where it knows the notation.

  To it an `Int` is signed. In both, `*args: Float["b"]` refuses every call. An
  `XFloat` is of any library, a `TfFloat` of TensorFlow, and so for other types.
  """
  with kt.Config(typechecking_enabled=False):  # It stays so if this raises.
    assert kt.typechecked(centered)(np.eye(5), np.eye(1)).ndim == 2, "refused"
  t, newer = kd.typing, judge(kt, kt.KTypeCheckError, kt.shape)
  older = judge(t, t.TypeCheckError, t.Shape)
  assert newer == TYPES | {x: [(y, y)] for x, (y, _) in SPECS.items()}, newer
  agreed = {x for x in newer if newer[x] == older.get(x)}
  show("agreed on", " ".join(sorted(agreed)))
  assert agreed == {*SPECS} - {"+c a", "b? a", "a*c"} | {*"""Array Bool UInt8
      Num UInt32 Float Float32 Complex Complex64""".split()}, older
  for name, x in itertools.product(TYPES.keys() - {"BFloat16"}, ("X", "Tf")):
    found = getattr(kt, x + name).__name__, dtypes_of(getattr(kt, x + name))
    assert found == (x + name, TYPES[name] if x == "X" else []), found
  refused = raises(t.TypeCheckError, t.check_type, np.ones(3), t.Float["4"])
  return dict(older=str(older), newer=str(newer), refused=first_line(refused))

# %% 20. There is more, and each kind has a base class
PARTS = {  # Package and base class, if all have one -> names not used so far.
    "losses.Loss": "AbsoluteValue Huber L1 L2 SigmoidBinaryCrossEntropy Value",
    "metrics.Metric": """Accuracy Ari BinaryAccuracy LpipsVgg NoopMetric Psnr
        Precision1 RocAuc SingleDimension Ssim TreeReduce""",
    "metrics.State": "AverageState CollectFirstState CollectingState",
    "data.Pipeline": "py.HuggingFace py.Json py.Mix py.SelectFromDatasets",
    "data.MapTransform": "AddConstants Cast CenterCrop Gather Rearrange Resize",
    "ckpts": "BaseCheckpointer InitTransform MultiTransform NoopTransform",
    "summaries": """Histogram PointCloud ShowBoxes ShowDifferenceImages
        ShowPointCloud ShowSegmentations ShowTexts""",
    "konfig": "WithRef export export_qualname mock_modules ref_copy required"}

@section("There is more, and each kind of part has a base class")
def base_classes():
  """Your own loss, metric, pipeline or transform derives as these do."""
  for path, names in PARTS.items():
    base, package = kontext.get_by_path(kd, path), path.partition(".")[0]
    new = [kontext.get_by_path(kd, f"{package}.{x}") for x in names.split()]
    assert all(issubclass(x, base) for x in new if inspect.isclass(base)), new
    show(f"kd.{path}", textwrap.shorten(names, 50, placeholder=" ..."))
  return dict(parts=str(PARTS))

# %% The report, for whoever upgrades something
CONSTANTS = bool, int, float, str, tuple
KNOWN_FAULTS = {  # Words of a failure -> its cause, and what to move.
    "attribute 'prng'": "etils < 1.15.0 with jax >= 0.10.2: move etils",
    "_check_prng_key": "kauldron < 1.4.2 with jax >= 0.10.2: move kauldron",
    "argument 'memo'": "kauldron < 1.4 with typeguard >= 4.5: move kauldron"}

def describe(path, value, surface):
  """Adds path -> a signature or constant, and what is below it in a class."""
  made = getattr(value, "__dataclass_params__", "")
  call = value.__init__ if made else value
  try:  # Also the signature that `functools.wraps` hides.
    text = " ".join(dict.fromkeys(map(str, (inspect.signature(call),
        inspect.signature(call, follow_wrapped=False)))))
  except (TypeError, ValueError):
    text = repr(value) if isinstance(value, CONSTANTS) else type(value).__name__
  name = getattr(value, "__qualname__", "")
  surface[path] = re.sub(r" at 0x\w+", "", f"{name}{text}{made}")
  if inspect.isclass(value) and path == f"{value.__module__}.{name}":
    for name in filter(lambda x: x[0] != "_", vars(value)):
      describe(f"{path}.{name}", getattr(value, name), surface)

def public_surface():
  """Returns the path of each public name in Kauldron -> what it is like."""
  for name in dir(kd):  # Namespaces are imported when they are first used.
    with contextlib.suppress(Exception):  # One may lack something here.
      getattr(kd, name)
  surface = {}
  for path in sorted(x for x in sys.modules if x.split(".")[0] == "kauldron"):
    for name in filter(lambda x: x[0] != "_", dir(sys.modules[path])):
      try:
        value = getattr(sys.modules[path], name)
      except Exception as error:  # As above.
        value = f"{type(error).__name__}: {error}"
      home = getattr(value, "__module__", None) or type(value).__module__
      if (path.count(".") == 1 or home.startswith("kauldron")
          or isinstance(value, CONSTANTS)):
        describe(f"{path}.{name}", value, surface)
  return surface

def differences(old, new):
  """Returns key -> (old, new), where two dicts differ by more than rounding."""
  pairs = {key: (old.get(key, "absent"), new.get(key, "absent"))
           for key in sorted(old.keys() | new.keys())}
  return {key: (x, y) for key, (x, y) in pairs.items() if x != y and not (
      isinstance(x, float) and isinstance(y, float)
      and np.isclose(x, y, TOLERANCE, 0))}

def compare(old, new):
  """Prints what changed between two reports; returns whether behaviour did."""
  source = "".join(inspect.findsource(compare)[0])
  names = new["sections"].keys() | old["sections"].keys() - set(SECTIONS)
  passed = {name for name in sorted(names) if all(
      x["sections"].get(name, {}).get("facts") for x in (old, new))}
  def view(x):
    sections = {name: x["sections"][name] for name in names & {*x["sections"]}}
    return {"versions": x["versions"],
            "sections": {n: f"{y['status']} {first_line(y['reason'])}".strip()
                         for n, y in sections.items()},
            "facts": {f"{name}.{key}": value for name in passed
                      for key, value in sections[name]["facts"].items()},
            "public names": old["surface"] and new["surface"] and x["surface"]}
  changed = {title: differences(before, view(new)[title])
             for title, before in view(old).items()}
  print(f"\nCompared with the baseline, floats within {TOLERANCE}:")
  for title, pairs in changed.items():
    print(f"{len(pairs)} {title} changed")
    for key, (x, y) in pairs.items():
      is_used = re.search(rf"\W{key.rpartition('.')[2]}\W", source)
      used = " (used here)" if is_used and title == "public names" else ""
      print(wrap(f"  {key}{used}: {x} -> {y}", 78))
  skipped = [now for _, now in changed["sections"].values() if "SKIP" in now]
  return bool(changed["facts"] or changed["public names"] or skipped)

# %% Summary
def summary():
  """Prints a table of the sections that ran; returns the exit status."""
  ended = [result["status"] for result in RESULTS.values()]
  counts = ", ".join(f"{ended.count(x)} {x}" for x in ("PASS", "SKIP", "FAIL"))
  print(f"\n{RESULTS}\n\n{counts} of {len(OPTIONS.sections)} sections")
  for name, result in RESULTS.items():
    if result["status"] != "PASS":
      reason = first_line(result["reason"])
      print(wrap(f"{result['status']} {name}: {reason}", 78))
      for words, cause in KNOWN_FAULTS.items():
        if words in result["reason"]:
          print(wrap(f"  cause: {cause}", 78))
      print(f"  again: {name}()" if IN_NOTEBOOK else
            f"  again: python kauldron_tour.py --only {name}")
  if INTERRUPTS:
    return 130
  return int("FAIL" in ended or (OPTIONS.strict and "SKIP" in ended))

def report(status):
  """Writes the report, compares it, and returns the exit status."""
  new = {"schema": SCHEMA, "python": sys.version, "platform": sys.platform,
      "devices": [str(device) for device in jax.devices()],
      "versions": versions(), "patches": PATCHES, "sections": RESULTS,
      "surface": public_surface() if "kauldron.train" in sys.modules else {}}
  if OPTIONS.baseline and compare(OPTIONS.baseline, new):
    status = status or 3
  if OPTIONS.report == "-":
    print(json.dumps(new, indent=1))
  elif OPTIONS.report:  # Whole or not at all.
    path = pathlib.Path(OPTIONS.report)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(new, indent=1))
    written.replace(path)
  return status

if RUNS:
  status = summary()
  if OPTIONS.report or OPTIONS.baseline:
    status = report(status)
  if not IN_NOTEBOOK:
    gc.freeze()  # Taking everything apart would cost two seconds.
    sys.exit(status)
elif __name__ == "__main__":
  for name in OPTIONS.sections:
    print(f"{SECTIONS.index(name):2} {name:18} {globals()[name].title}")
