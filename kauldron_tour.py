#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["kauldron>=1.4.2", "jax", "flax", "optax", "etils", "numpy",
#   "google-cloud-bigquery>=3.20"]  # Without this one pip backtracks for long.
# ///

# %% [markdown]
# # A tour of Kauldron that proves what it says
#
# Kauldron is Google Research's library for training models with JAX. In
# Kauldron an experiment is a single object, the `Trainer`. It joins a model,
# data, losses, metrics and an optimizer, none of which knows the others. Three
# mechanisms make that possible, and they are Part I of this tour:
#
# - **konfig**: an experiment is written as ordinary Python calls that are
#   recorded instead of made. What is recorded is plain data, so it can be
#   printed, changed, stored and swept over before anything is built.
# - **kontext**: parts find their inputs by a *key path*, a string such as
#   `"batch.image"` or `"preds.logits"`. So a loss never imports the model that
#   it scores, and a metric can look inside a layer that knows nothing of it.
# - **ktyping**: functions say which shapes they take, with named axes, and a
#   decorator checks that at each call.
#
# Part II trains a small model, takes the training apart, and has what every
# project needs: files and the command line, sweeps, data, resuming. Part III is
# what the first weeks ask for: evaluation, the best checkpoint, fine-tuning,
# several devices and machines, export, random numbers, parts of your own. Its
# last section is an experiment to copy and start from.
#
# You should know JAX, and have seen flax.linen and optax. All of it runs on a
# CPU in less than a minute, with synthetic data; no result here says anything
# about how good a model is.
#
# Nearly every section makes one claim, its title. It first does what you would
# type, and shows what comes out; then, where there is something to compare
# with, it gets the same result another way (NumPy by hand, plain JAX, a second
# run). What the text says beyond that, the project's tests check. What passes
# is true of the versions that you have installed. The text refers to a section
# by the name of its function, which stands in the line that ends its output.
#
# Four helpers occur everywhere:
#
# - `show(label, value)` prints.
# - `agree(label, this=a, that=b)` prints both values under their names, and
#   fails unless they are equal; floats may differ by rounding. Of an array it
#   prints the first value and the shape, and compares all. `rtol=0` allows no
#   rounding.
# - `with raises(KeyError, "words"):` fails unless its block raises that error,
#   with these words in it.
# - `draw(name, curves)` draws each curve as a row of characters, the darker the
#   larger: blank is close to 0, `@` the largest value of all rows. A notebook
#   gets a picture.
#
# They are defined in the first cell, with the machinery that runs the sections.
# Skip that cell on a first read, and the setup after it.

# %% How a section runs (skip on a first read) jupyter={"source_hidden": true}
"""A tour of Kauldron, the JAX training library, that proves what it says.

  python kauldron_tour.py                   # everything, within a minute
  python kauldron_tour.py --only key_paths  # one section; --list names all
  python kauldron_tour.py --workdir out     # keep runs, events and pictures

or paste it into a notebook cell.
"""

import os
import sys

FILE = os.path.realpath(globals().get("__file__", ""))
RUNNING = __name__ == "__main__"  # An import, as in a test, only defines.
AS_SCRIPT = RUNNING and os.path.realpath(sys.argv[0]) == FILE

if AS_SCRIPT:
  # What serves the command line stands in the last cell but one, out of the
  # reader's way. A script needs it first.
  with open(FILE, encoding="utf-8") as this_file:
    before, _, after = this_file.read().partition("\n# %% The command line")
  code = "\n" * (before.count("\n") + 1) + "#" + after.partition("\n# %%")[0]
  exec(compile(code, FILE, "exec"))
  refuse_hidden_modules()  # noqa: F821

import argparse
import atexit
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import io
import json
import pathlib
import pickle
import re
import shutil
import subprocess
import tempfile
import textwrap
import time
import traceback
import types
import unittest
import warnings
from unittest import mock

SECTIONS = {}  # Name -> function, in the order of the file.
RESULTS = {}   # Name -> title, status, seconds, reason, facts, where, library.
SKIPPED = {}   # Name of a section that cannot run here -> the reason.
FACTS = {}     # What the section that runs has shown: label -> value.
SETTINGS = [f"{name}={value}"[:78] for name, value in os.environ.items()
            if re.match("(FLAX|JAX|XLA)_(?!COMPILATION_CACHE)", name)]


def section(title):
  """Runs the function below as a section, where it stands."""
  def register(function):
    function.title = title
    SECTIONS[function.__name__] = function
    if RUNNING and (OPTIONS is None or function.__name__ in OPTIONS.sections):
      run_section(function)
    if AS_SCRIPT and len(RESULTS) == len(OPTIONS.sections):
      sys.exit(finish())  # That was the last one.
    return function
  return register


def run_section(function):
  """Runs a section and records in RESULTS how it ended."""
  name = function.__name__
  result = {"title": function.title, "status": "FAIL", "seconds": 0.0,
            "reason": "interrupted", "facts": {}, "where": "", "library": ""}
  RESULTS[name] = result
  FACTS.clear()
  heading = f"[{list(SECTIONS).index(name)}] {function.title}"
  print(f"\n{heading}\n{'-' * len(heading)}", flush=True)
  start = time.perf_counter()
  try:
    if UNSUPPORTED and "kauldron.train" in sys.modules:
      raise unittest.SkipTest(
          f"{UNSUPPORTED[0]} is set; Kauldron's Trainer needs it unset.")
    if name in SKIPPED:
      raise unittest.SkipTest(SKIPPED[name])
    function()
    result.update(status="PASS", reason="")
  except unittest.SkipTest as skip:
    result.update(status="SKIP", reason=str(skip))
  except Exception as error:  # Whatever it is, the other sections still run.
    result.update(describe(error))
  finally:
    result["seconds"] = time.perf_counter() - start
    result["facts"] = dict(FACTS)
  line = f"{result['status']} {name}, {result['seconds']:.1f} s"
  if result["reason"]:
    line += f": {headline(result['reason'])}"
  print(textwrap.shorten(line, 79, placeholder=" ..."), flush=True)


def headline(reason):
  """Returns the first line of a message, and after a colon the last one."""
  first, *others = reason.strip().splitlines() or [""]
  if others and first.endswith(":"):
    return f"{first} {others[-1]}"
  return first


def describe(error):
  """Prints an error from our own line on; returns why and where it was."""
  trace = error.__traceback__
  while trace.tb_next and trace.tb_frame.f_code is run_section.__code__:
    trace = trace.tb_next
  traceback.print_exception(type(error), error, trace, chain=False,
                            file=sys.stdout)
  *_, last = frames = traceback.extract_tb(trace)
  ours = [x for x in frames if x.filename == describe.__code__.co_filename]
  where = library = ""
  if ours:
    where = f"line {ours[0].lineno} in {ours[0].name}: {ours[0].line}"
  if not ours or last is not ours[-1]:
    path = last.filename.rpartition(f"site-packages{os.sep}")[2]
    library = f"{path}:{last.lineno} in {last.name}"
  return {"reason": f"{type(error).__name__}: {error}",
          "where": where, "library": library}


def brief(value):
  """Returns a value as text: floats with four digits, of an array the first.

  After the first value of an array comes its shape.
  """
  if isinstance(value, (float, np.floating)):
    return f"{value:.4g}"
  if isinstance(value, np.ndarray) and value.ndim:
    return f"{brief(value.flat[0])} ... {value.shape}"
  return str(value)


def show(label, value):
  """Prints `label => value`, and keeps it as a fact for the report."""
  FACTS[label] = value if isinstance(value, (bool, int, float)) else str(value)
  text = brief(value)
  if "\n" in text or len(label + text) > 72:
    fill = textwrap.TextWrapper(74, break_on_hyphens=False,
                                subsequent_indent="    ").fill
    lines = [fill(line) for line in text.splitlines()]
    text = "\n" + textwrap.indent("\n".join(lines), "    ")
  gap = "" if text.startswith("\n") else " "
  print(f"  {label} =>{gap}{text}")


def agree(label, rtol=3e-6, **values):
  """Prints two values under their names, and asserts that they are equal.

  Floats, and arrays of them, may differ by a tolerance that is relative to the
  largest; anything else may not. Of arrays the first value is printed, and the
  shape.
  """
  (name, found), (other, expected) = values.items()
  exact = any(isinstance(value, (bool, int, str, tuple))
              for value in (found, expected))
  if not exact:
    found = np.asarray(found, float)[()]
    expected = np.asarray(expected, float)[()]
  FACTS[label] = found if isinstance(found, (bool, int, float)) else (
      brief(found))
  halves = [f"{name.replace('_', ' ')} {brief(found)}",
            f"{other.replace('_', ' ')} {brief(expected)}"]
  separator = ", " if len(label) + sum(map(len, halves)) < 72 else ",\n    "
  print(f"  {label}: {separator.join(halves)}")
  if exact:
    np.testing.assert_equal(found, expected, label)
  else:
    np.testing.assert_equal(found.shape, expected.shape, label)
    atol = rtol * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, 0, atol, equal_nan=False,
                               err_msg=label)


def draw(name, curves, **axes):
  """Draws label -> (steps, values) as text; a notebook gets a picture.

  All values must be at least 0. The picture also goes into `--workdir`.
  """
  top = max(max(values) for _, values in curves.values())
  for label, (_, values) in curves.items():
    marks = [" .:-=+*#@"[round(8 * value / top)] for value in values]
    print(f"  {label:10} |{''.join(marks)}|")
  if AS_SCRIPT and not OPTIONS.workdir:
    return

  from matplotlib import figure
  picture = figure.Figure(figsize=(7, 3.5), layout="constrained")
  plot = picture.subplots()
  plot.set(**axes)
  for label, (steps, values) in curves.items():
    plot.plot(steps, values, label=label)
  plot.legend()
  picture.savefig(WORKDIR / f"{name}.png")
  if RUNNING and not AS_SCRIPT:
    from IPython import display
    display.display(display.Image(WORKDIR / f"{name}.png"))


OPTIONS = None
if AS_SCRIPT:
  OPTIONS = read_options(sys.argv[1:])  # noqa: F821
  sys.excepthook = on_error  # noqa: F821
  if OPTIONS.distributed is None:
    print(f"A tour of Kauldron: {len(OPTIONS.sections)} sections.", flush=True)

# %% [markdown]
# ## Setup
#
# Short names that this tour uses throughout, most of them Kauldron's own: `cfg`
# is a config, `ds` a data set, `preds` what the model returned, `kt` the shape
# checker `kauldron.ktyping`. What begins with `lazy_` records calls instead of
# making them (section `config_tree`). `kd` is Kauldron itself; its parts
# (`kd.data`, `kd.train` and so on) are imported when they are first used. Only
# some of them need TensorFlow, for event files and data, and nothing does
# before Part II. `new_workdir(name)` makes a directory for a run. `SEED` is 0.
# JAX is asked for two CPU devices, among which section `sharding` divides a
# model.
#
# What several sections use is defined where the first of them needs it:
# `focal_values` and `recall_by_hand`, a loss and a metric in NumPy, in
# `custom_loss` and `custom_metric`; the data, the model, `get_config` and
# `read_events` in `real_trainer`; `FEW_STEPS` and `distance` in
# `plain_trainer`; `take_steps` in `readable_loop`.
#
# A notebook without Kauldron installs it first. Two faults outside Kauldron are
# patched here if your packages have them; the next section says which. Much is
# wrapped in `jax.jit` below, for one reason: without it JAX compiles every
# operation by itself, which takes longer.

# %% Setup jupyter={"source_hidden": true}
if not importlib.util.find_spec("kauldron"):
  if AS_SCRIPT:
    stop("kauldron is not installed; with Python 3.11 to 3.13, "  # noqa: F821
         "`pip install 'kauldron>=1.4.2' 'google-cloud-bigquery>=3.20'` "
         "installs it.")
  print("Kauldron is not installed. Installing it takes minutes.", flush=True)
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet",
                  "kauldron>=1.4.2", "google-cloud-bigquery>=3.20"], check=True)

# Read by the libraries when they are imported. What you have set is kept.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TQDM_DISABLE", "1")  # No progress bars between lines.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Compile fast, run slowly: right for a tour, wrong for your own training.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from etils import enp
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

if OPTIONS and OPTIONS.distributed is not None:
  join_processes(*OPTIONS.distributed)  # noqa: F821

PATCHES = {}  # What was mended -> the fault that made it necessary.
if not hasattr(np, "float128"):  # NumPy on Windows and ARM Macs lacks it.
  np.float128 = np.longdouble
  PATCHES["numpy.float128"] = "numpy has no float128 on this machine"
try:
  enp.ArraySpec(shape=(), dtype=np.float32)
except AttributeError as error:  # etils <= 1.14.0 with jax >= 0.10.2.
  enp.array_spec._is_jax_random_dtype = lambda dtype: (
      jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
  PATCHES["etils.enp.array_spec"] = str(error)

from kauldron import kd, konfig, kontext

# With one of these Parts II and III are skipped: Kauldron, orbax or optax fail.
UNSUPPORTED = [name for name, is_set in {
    "FLAX_RETURN_FROZENDICT": flax.config.flax_return_frozendict,
    "JAX_DISABLE_JIT": jax.config.jax_disable_jit,
    "JAX_NUMPY_DTYPE_PROMOTION=strict":
        jax.config.jax_numpy_dtype_promotion == "strict"}.items() if is_set]

# Section `sharding` divides a model among two devices. A CPU can pose as two.
if (RUNNING and jax.config.jax_num_cpu_devices < 0  # That is: not set.
    and "device_count" not in os.environ.get("XLA_FLAGS", "")):
  with contextlib.suppress(RuntimeError):  # JAX may be running already.
    jax.config.update("jax_num_cpu_devices", 2)

# Configs name what this file defines "kauldron_tour:MLP", for example. This
# makes the name work whatever Python calls this file at the moment.
if __name__ != "kauldron_tour":
  def look_up(name):
    """Returns what this file defines under a name."""
    if name not in globals():
      raise AttributeError(name)
    return globals()[name]

  this_file = types.ModuleType("kauldron_tour")
  this_file.__getattr__ = look_up
  sys.modules["kauldron_tour"] = this_file

raises = unittest.TestCase().assertRaisesRegex  # with raises(class, "words"):
warnings.filterwarnings("ignore", "Sharding info not provided")  # orbax's.
warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's.

SEED = 0

# Runs go below --workdir, or a temporary directory that is removed at the end.
TEMPORARY = tempfile.mkdtemp(prefix="kauldron_tour_")
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
WORKDIR = pathlib.Path(TEMPORARY)
if OPTIONS and OPTIONS.workdir:
  WORKDIR = OPTIONS.workdir

# What XLA has compiled for one run is taken up by the next.
if not jax.config.jax_compilation_cache_dir:
  jax.config.update("jax_compilation_cache_dir", f"{TEMPORARY}/compiled")


def new_workdir(name):
  """Returns the absolute path of a new directory, named after its use."""
  path = tempfile.mkdtemp(prefix=f"{name}_", dir=WORKDIR)
  if jax.process_count() > 1:  # All must have the same one: that of process 0.
    from jax.experimental import multihost_utils
    letters = np.frombuffer(path.encode(), np.uint8)
    path = bytes(multihost_utils.broadcast_one_to_all(letters)).decode()
  return path

# %% [markdown]
# ## Where we are
#
# What follows is shown for the versions that are printed here. The tour was
# written for Kauldron 1.4.2 to 1.4.4.

# %%
@section("Where we are")
def where_we_are():
  """Prints versions, devices and what had to be mended."""
  print(f"  python {sys.version.split()[0]}")
  for module in (jax, flax, optax, np):  # In a notebook an old one may linger.
    name = module.__name__
    installed = importlib.metadata.version(name)
    agree(name, imported=module.__version__, installed=installed)
  for name in ("kauldron", "orbax-checkpoint", "grain", "etils"):
    print(f"  {name}: installed {importlib.metadata.version(name)}")

  show("devices", " ".join(str(device) for device in jax.devices()))
  show("patches", ", ".join(PATCHES) or "none")
  for name, fault in PATCHES.items():
    print(f"  {name} was mended: {fault}")

  # Kauldron notes the shape and dtype of an array as an `ArraySpec`, a class of
  # etils, which is a library of helpers. With some versions of JAX and etils
  # making one fails, unless that was mended above.
  spec = enp.ArraySpec.from_array(jnp.zeros((2, 3), jnp.float32))
  agree("an array as etils describes it", shape=spec.shape, expected=(2, 3))

# %% [markdown]
# # Part I: the three mechanisms
#
# ## A config is a call tree, and a call tree is a dict
#
# An experiment is written down as ordinary calls, but none of them happens.
# Inside `konfig.imports()` an import gives a stand-in for the module (a proxy).
# Whatever you call on a stand-in returns a `ConfigDict`: the name of the
# function, and its arguments. Some of these are `ConfigDict`s themselves, so
# the whole is a tree. It can be printed, changed, stored as JSON and sent to
# another machine. `konfig.resolve` makes the calls at last, from the inside
# out. The module itself is imported as well (the parts of `kd` when they are
# needed), so it must be installed. A function that is named and not called is
# recorded as well, and resolves to itself.
#
# One thing is not as in the calls themselves: the functions get lists as
# tuples, and dicts as dicts of a kind that cannot be changed. For one that
# appends to a list, say, resolve with `konfig.resolve(cfg, freeze=False)`.
#
# In a real project a config has a file of its own, with nothing else in it, and
# then `with konfig.imports(): import optax` is all it takes. This tour is one
# file, and uses the real `optax` too. So here the stand-ins have names of their
# own, `lazy_...`, and it is never in doubt which of the two a line uses.
# (Kauldron's documentation keeps configs and code apart for the same reason,
# and advises against `imports()` in a notebook, where a name would stay a
# stand-in in all later cells. Section `mock_modules` has what it recommends
# there.)

# %%
with konfig.imports():
  from kauldron import kd as lazy_kd
  import optax as lazy_optax

# %% [markdown]
# Only import lines belong in that block: while it is open, `import` means
# something else in the whole process, other threads included.

# %%
@section("A config is a call tree, and a call tree is a dict")
def config_tree():
  """Calls are recorded as dicts that survive JSON and become objects later."""
  cfg = lazy_optax.chain(
      lazy_optax.clip_by_global_norm(1.0),
      lazy_optax.sgd(learning_rate=0.5, momentum=0.9))
  show("cfg", cfg)
  show("type(cfg)", type(cfg).__name__)

  # Positional arguments are found by number, and all can still be changed.
  cfg[1].learning_rate = 0.4
  show("cfg[1], changed", cfg[1])
  show("cfg[1].__qualname__", cfg[1].__qualname__)

  # It goes through JSON and back.
  text = cfg.to_json()
  show("cfg.to_json(), indented", json.dumps(json.loads(text), indent=1))
  read_back = konfig.ConfigDict(json.loads(text))

  # Resolved, it does what the same calls do when you make them yourself. optax
  # knows nothing of konfig: there is no base class and no registry.
  optimizer = konfig.resolve(read_back)
  by_hand = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.sgd(learning_rate=0.4, momentum=0.9))
  gradient = np.array([3.0, -4.0], np.float32)  # Its norm is 5, clipped to 1.

  def second_update(optimizer):
    """Returns the update of a second step, where momentum is at work."""
    opt_state = optimizer.init(gradient)
    for _ in range(2):
      update, opt_state = jax.jit(optimizer.update)(gradient, opt_state)
    return update
  agree("update", from_config=second_update(optimizer),
        by_hand=second_update(by_hand))

  # A list becomes a tuple on the way, unless you say otherwise.
  sizes = konfig.ConfigDict({"sizes": [8, 4]})
  frozen = konfig.resolve(sizes)["sizes"]
  show("a list, resolved", frozen)
  assert frozen == (8, 4), frozen
  unfrozen = konfig.resolve(sizes, freeze=False)["sizes"]
  show("with freeze=False", unfrozen)
  assert unfrozen == [8, 4], unfrozen

  # A part that is used twice is shared, and still is when it was read from JSON
  # into a ConfigDict: change it in one place, and it has changed in the other.
  twice = konfig.ConfigDict({"train": cfg, "eval": cfg})
  read_back = konfig.ConfigDict(json.loads(twice.to_json()))
  read_back.train[1].momentum = 0.5
  agree("momentum in eval", found=read_back.eval[1].momentum, set_in_train=0.5)

# %% [markdown]
# ## In one block calls are recorded, outside they are made
#
# In a notebook one often wants both: the config, and the real thing to play
# with. `konfig.mock_modules()` makes every module that the surrounding code has
# imported a stand-in, for as long as its block lasts. So the same line of code
# gives a config inside the block, and the real object outside.
#
# What is replaced are modules, and all of them but `konfig`. From this follows
# what to write in the block, nothing but the config, and where to import:
#
# - NumPy is a stand-in too, so that `np.ones(3)` makes no array. Even Python's
#   builtins are one, in a notebook and in a script that is run: there a
#   `lambda` that is made in the block does not find `len`.
# - What is no module is not replaced, and calls of it are made. That is so for
#   a name that was imported with `from optax import sgd`, and for a class that
#   you have defined in the notebook itself; a config refuses what they return
#   (next section). Put such a class into a file, and import that as a module.
# - If the block stands in a function, and a module was imported in that same
#   function, the module stays a stand-in after the block (with Python 3.11 and
#   3.12). So import at the top level.
#
# As a rule: `imports()` in a file of configs, `mock_modules()` in a notebook.

# %%
from optax import sgd  # A function, which is never replaced.


@section("In one block calls are recorded, outside they are made")
def mock_modules():
  """The same call gives a config in the block and an optimizer after it."""
  with konfig.mock_modules():
    cfg = optax.sgd(learning_rate=0.5)
    array = np.ones(3)
    called = sgd(learning_rate=0.5)
  optimizer = optax.sgd(learning_rate=0.5)

  show("in the block, optax.sgd(...)", cfg)
  show("in the block, np.ones(3)", array)
  show("in the block, sgd(...)", type(called).__name__)
  show("outside, optax.sgd(...)", type(optimizer).__name__)
  assert isinstance(cfg, konfig.ConfigDict), cfg
  assert isinstance(array, konfig.ConfigDict), array
  assert isinstance(called, optax.GradientTransformation), called
  assert isinstance(optimizer, optax.GradientTransformation), optimizer

  gradient = np.ones(3, np.float32)
  update, _ = jax.jit(optimizer.update)(gradient, optimizer.init(gradient))
  resolved = konfig.resolve(cfg)
  by_config, _ = jax.jit(resolved.update)(gradient, resolved.init(gradient))
  agree("update", from_config=by_config, made_outside=update)

# %% [markdown]
# ## A wrong type is refused at once, a wrong name when resolved
#
# A value of another type than the one it replaces is refused at once, with some
# leeway: an int is taken where a float stood (not a float for an int), `None`
# anywhere, and anything where `None` stands, even if a float stood there
# before. (Some fields, such as a Trainer's `workdir`, print as `None` and have
# a type all the same.) A real object is refused too: a config must stay data.
# But a misspelt argument is found only when the call is made, by
# `konfig.resolve`.
#
# `cfg | {...}` is a copy with other arguments. (Not of a config with
# references, which the next section is about.)

# %%
@section("A wrong type is refused at once, a wrong name when resolved")
def config_errors():
  """Another type is refused when it is set, a misspelt argument when called."""
  cfg = lazy_optax.sgd(learning_rate=0.5, momentum=0.9, nesterov=False)
  with raises(TypeError, "momentum") as caught:
    cfg.momentum = "high"
  show('cfg.momentum = "high"', caught.exception)
  with raises(ValueError, "only accept other configurables") as caught:
    cfg.momentum = np.ones(3)
  show("cfg.momentum = np.ones(3)", caught.exception)
  agree("momentum", still=cfg.momentum, as_it_was=0.9)

  schedule = lazy_optax.cosine_decay_schedule(init_value=0.1, decay_steps=100)
  with raises(TypeError, "decay_steps") as caught:
    schedule.decay_steps = 99.5
  show("schedule.decay_steps = 99.5", caught.exception)

  # Some other types are taken.
  cfg.learning_rate = 1
  agree("learning rate, set to the int 1", found=str(cfg.learning_rate),
        expected="1.0")
  other = cfg | {"learning_rate": 0.1}
  other.momentum = None
  other.momentum = "low"  # None has no type, so now even this is taken.
  agree("momentum, set to None and then to a text", found=other.momentum,
        expected="low")

  # The misspelt argument goes into the config ...
  misspelt = cfg | {"learning_rat": 0.1}
  assert "learning_rat" not in cfg, "the original was changed"

  # ... and out of `konfig.resolve` comes an error that names it.
  with raises(TypeError, "learning_rat'") as caught:
    konfig.resolve(misspelt)
  show("konfig.resolve(misspelt)", caught.exception)

# %% [markdown]
# ## Change one number, and everything downstream follows
#
# `cfg.num_train_steps` is the number that stands there now. If you put it into
# a learning rate schedule, the schedule has a copy. `cfg.ref.num_train_steps`
# is a *reference*: it stands for the field, whatever its value will be when the
# config is resolved. References can be added, multiplied and so on. `int(ref)`
# fails, because the value may still change; `konfig.ref_fn(int, ref)` calls
# `int` whenever the field is read. If you set a field that holds a reference,
# that field stops following; the field it referred to stays as it is.
#
# Do not copy a config that has references, neither with `|` nor with
# `copy.deepcopy`: up to Kauldron 1.4.4 some of them go on following the
# original. Call the function that makes the config again.
#
# Two fields of a `Trainer` exist to be referred to. `cfg.schedules` holds the
# schedules, which are then also logged (section `real_trainer`). `cfg.aux`
# holds whatever numbers an experiment has of its own. A field can be written
# `cfg.aux.x` or `cfg.aux["x"]`. (Kauldron has another way by now for numbers
# that several fields depend on, the `ConfigArgs` of section `project`.)
#
# Below is part of a Trainer's config, with the schedule once by reference and
# once, for comparison, by value.

# %%
@section("Change one number, and everything downstream follows")
def config_references():
  """`cfg.ref.x` stays tied to x, `cfg.x` copies the value that it has now."""
  peak = 0.1  # The learning rate after warm-up.
  cfg = lazy_kd.train.Trainer()
  cfg.num_train_steps = 1000
  cfg.aux = {"warmup_share": 0.1}
  cfg.schedules = {
      "follows": lazy_optax.warmup_cosine_decay_schedule(
          init_value=0.0,
          peak_value=peak,
          warmup_steps=konfig.ref_fn(
              int, cfg.ref.num_train_steps * cfg.ref.aux.warmup_share),
          decay_steps=cfg.ref.num_train_steps),
      "copied": lazy_optax.warmup_cosine_decay_schedule(
          init_value=0.0,
          peak_value=peak,
          warmup_steps=int(cfg.num_train_steps * cfg.aux.warmup_share),
          decay_steps=cfg.num_train_steps),
  }
  cfg.optimizer = lazy_optax.adam(learning_rate=cfg.ref.schedules["follows"])
  show("cfg.schedules", cfg.schedules)  # References are printed as values.

  # Now the experiment is to be shorter: one line.
  cfg.num_train_steps = 200
  show("decay_steps, by reference", cfg.schedules["follows"].decay_steps)
  show("decay_steps, copied", cfg.schedules["copied"].decay_steps)
  show("warmup_steps, by reference", cfg.schedules["follows"].warmup_steps)

  # The optimizer refers to the schedule as a whole, and follows as well.
  agree("the optimizer's decay_steps",
        found=cfg.optimizer.learning_rate.decay_steps, expected=200)

  # What the two schedules do in the 200 steps that are left. In the drawing
  # one character stands for four steps.
  steps = np.arange(200.0)
  schedule = konfig.resolve(cfg.schedules["follows"])
  copied_schedule = konfig.resolve(cfg.schedules["copied"])
  follows = jax.jit(jax.vmap(schedule))(steps)
  copied = jax.jit(jax.vmap(copied_schedule))(steps)
  curves = {"follows": (steps[::4], follows[::4].tolist()),
            "copied": (steps[::4], copied[::4].tolist())}
  draw("config_references", curves, xlabel="step", ylabel="learning rate")

  # By hand: a straight line up to the peak in 20 steps, then half a cosine.
  agree("rate at step 12", follows=follows[12], by_hand=peak * 12 / 20)
  share = (68 - 20) / (200 - 20)  # Of the cosine, at step 68.
  agree("rate at step 68", follows=follows[68],
        by_hand=peak * (1 + np.cos(np.pi * share)) / 2)
  share = (150 - 100) / (1000 - 100)  # Of the cosine of the copied schedule.
  agree("rate at step 150, copied", copied=copied[150],
        by_hand=peak * (1 + np.cos(np.pi * share)) / 2)

  # JSON keeps parts that are shared, and so what refers to a whole part. Of a
  # reference to a number it keeps the number, which no longer follows.
  read_back = konfig.ConfigDict(json.loads(cfg.to_json()))
  read_back.num_train_steps = 50
  agree("decay_steps, after JSON no longer following",
        found=read_back.schedules["follows"].decay_steps, as_before=200)

# %% [markdown]
# ## Parts are wired by string key paths
#
# At each training step Kauldron collects what there is in one object, the
# *context*: the batch, the step number, the parameters, the predictions of the
# model, later the gradients. A loss or a metric has fields of type
# `kontext.Key`, each of which holds a path. The loss below has two, `logits`
# and `labels`. It is calculated by its method `get_values(logits, labels)`: the
# arguments have the names of these fields, and are what the paths lead to.
# (Where a field is `None`, the argument is not passed, so it needs a default.)
#
# So a loss never learns which model it scores. Below, the same loss scores a
# model that returns an array and a model that returns a nest of dicts and
# lists. Only the path differs.
#
# Any tree of dicts, lists, arrays and objects can serve as context. Here it is
# made by hand; in the `Trainer` Kauldron makes it.

# %%
@section("Parts are wired by string key paths")
def key_paths():
  """One loss scores two unlike models, and only its key path differs."""
  logits = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]])
  labels = np.array([[0], [2]])  # Kauldron's labels have a last axis of 1.
  # Every loss looks the step up; its weight may depend on it (`custom_loss`).
  simple = {"batch": {"label": labels}, "preds": logits, "step": 0}
  nested = {"batch": {"label": labels}, "step": 0,
            "preds": {"heads": [{"logits": -logits},  # Another head's.
                                {"logits": logits}]}}

  cross_entropy = kd.losses.SoftmaxCrossEntropyWithIntLabels
  loss = cross_entropy(logits="preds", labels="batch.label")
  loss_of_nested = cross_entropy(
      logits="preds.heads[1].logits", labels="batch.label")

  # By hand: log of the sum of exp, minus the logit of the right class.
  right = np.array([2.0, 3.0])
  by_hand = np.mean(np.log(np.exp(logits).sum(axis=-1)) - right)
  agree("loss of an array", kauldron=jax.jit(loss)(context=simple),
        by_hand=by_hand)
  agree("loss of a nest", kauldron=jax.jit(loss_of_nested)(context=nested),
        by_hand=by_hand)

  # The error about a misspelt path suggests some that exist.
  misspelt = cross_entropy(logits="preds.head[1].logits", labels="batch.label")
  with raises(KeyError, "Did you mean") as caught:
    misspelt(context=nested)
  show("a misspelt path", caught.exception.args[0])
  assert "preds.heads[1].logits" in str(caught.exception)

  # A path that is required and was left out is named.
  incomplete = cross_entropy(labels="batch.label")
  with raises(ValueError, "logits") as caught:
    incomplete(context=nested)
  show("no path", caught.exception)

# %% [markdown]
# ## A path reads, writes, slices and globs
#
# `kontext` also reads and writes trees by path. That is how a sweep changes a
# config (section `sweep`). A path may index and slice an array.
#
# `**` stands for any number of parts, so that a path with it matches many
# values. `set_by_path` takes it, and returns the paths that it has set.
# `get_by_path` does not, nor does the key of a loss, which must lead to one
# value. (Two metrics do, see section `inner_layer`.)

# %%
@section("A path reads, writes, slices and globs")
def paths():
  """`kontext` gets and sets values in any tree by their paths."""
  logits = np.arange(1.0, 7.0).reshape(2, 3)
  tree = {"heads": [{"logits": -logits}, {"logits": logits}]}

  found = kontext.get_by_path(tree, "heads[1].logits[..., ::2]")
  show("heads[1].logits[..., ::2]", found.tolist())
  agree("every second column", rtol=0, found=found, by_hand=logits[:, ::2])

  # Every path, with what is there.
  flat = kontext.flatten_with_path(tree)
  agree("paths", found=" ".join(flat),
        expected="heads[0].logits heads[1].logits")

  # Set one, or all that match.
  kontext.set_by_path(tree, "heads[0].logits", 7)
  agree("heads[0].logits, set to 7", found=tree["heads"][0]["logits"],
        expected=7)
  changed = kontext.set_by_path(tree, "**.logits", 0)
  show("what was set by **.logits", " ".join(changed))
  show("heads", tree["heads"])
  assert tree["heads"] == [{"logits": 0}, {"logits": 0}], tree

  # A list does not grow.
  with raises(KeyError, "heads") as caught:
    kontext.set_by_path(tree, "heads[2]", {})
  show("heads[2], where there are two", caught.exception.args[0])

  # A loss does not take `**`.
  loss = kd.losses.L2(preds="**.logits", targets="heads[0].logits")
  with raises(ValueError, "Invalid part") as caught:
    loss(context=tree)
  show("a key with **", caught.exception)

# %% [markdown]
# ## Shapes are checked at run time, by named axes
#
# `Float["*b n"]` describes an array of floats by its axes: `n` is one axis, and
# `*b` stands for any number of axes, possibly none. A number in place of a name
# is a fixed size, `_` is an axis of any size, and `Float[""]` is a scalar.
# Other types are `Int`, `Bool`, `Num` (any number), `PRNGKey` and so on.
#
# A function with such annotations is checked whenever it is called, if it is
# decorated with `@kt.typechecked`; under `jax.jit`, when it is traced, so that
# a jitted step costs nothing more.
# (`with kt.Config(typechecking_enabled=False):` switches the checks off.)
# Throughout one call a name stands for one size. The first array that has the
# axis decides which, and all others must agree with it, the result included.
#
# With `transpose=True` the function below returns the wrong shape, on purpose.
#
# (`kauldron.typing`, which much code still uses, is an earlier checker with
# most of the notation.)

# %%
from kauldron import ktyping as kt
from kauldron.ktyping import Float, Int, PRNGKey, PyTree


@kt.typechecked
def centered(x: Float["*b n"], mean: Float["*b 1"],
             transpose: bool = False) -> Float["*b n"]:
  """Returns x minus the mean of each row; with `transpose`, a wrong shape."""
  difference = x - mean
  return difference.T if transpose else difference


@section("Shapes are checked at run time, by named axes")
def shape_checker():
  """An axis name stands for one size throughout a call, results included."""
  square = np.ones((5, 5))
  column = np.ones((5, 1))  # One mean for each row.
  row = np.ones(5)          # One mean for each column: not what is meant.

  # These calls are right. In the second one `*b` stands for no axis at all.
  agree("square - column", shape=centered(square, column).shape,
        expected=(5, 5))
  agree("row - its mean", shape=centered(row, row[:1]).shape, expected=(5,))

  # This one is wrong. NumPy would broadcast and return nonsense.
  show("NumPy says nothing, and returns shape", (square - row).shape)
  with raises(kt.KTypeCheckError, "argument mean") as caught:
    centered(square, row)

  # The report marks the argument that does not fit, and ends with the sizes
  # that the names stood for at that moment.
  report = str(caught.exception)
  lines = [line for line in report.splitlines() if line]
  show("the report", re.sub(" at .*", "", "\n".join(lines)))  # No file names.
  assert "> mean: Float['*b 1']" in report, report
  assert "{b: 5, n: 5}" in report, report

  # Here the arguments fit, but what is returned is (5, 3), not (3, 5).
  wide = np.ones((3, 5))
  with raises(kt.KTypeCheckError, "return value") as caught:
    centered(wide, column[:3], transpose=True)
  show("a wrong result", str(caught.exception).strip().partition("\n")[0])

# %% [markdown]
# ## Dataclasses and trees are checked, and sizes can be read
#
# The same notation serves in four more places:
#
# - **Dataclasses.** A decorated dataclass is checked whenever an instance is
#   made; its fields share their axes. `Float["n"] | Int["n"]` accepts both. (A
#   dataclass that derives from it is checked only if it is decorated itself. In
#   a file with `from __future__ import annotations` no dataclass is checked.)
# - **Trees.** A `PyTree` is any nest of lists and dicts. All its arrays share
#   their named axes. `"$T"` stands for how it is nested: two arguments with
#   `$T` must be nested alike.
# - **Inside a function.** In a decorated function `kt.dim["n"]` is the size of
#   `n`, and `kt.dim["m"] = 4` gives a size to a name that has none yet.
#   `kt.shape("*b n")` puts sizes together to a shape, and
#   `kt.check_type(array, spec)` checks what is calculated on the way.
# - **Elsewhere.** In a function without the decorator, or in a notebook's cell,
#   the same works in a block, `with kt.typechecked():`. It begins with no
#   sizes, and forgets them at its end. In a decorated function and in a block,
#   `kt.isinstance` says True or False instead of raising.
#
# Two caveats. `*args: Float["n"]` refuses every call, so take a list, as a
# `PyTree`. The arguments of a generator are checked when it starts, but not
# what it yields.

# %%
@kt.typechecked
@dataclasses.dataclass
class Noise:
  """What it takes to draw n random numbers."""
  # Leave this out in a file of your own. It is here for notebooks, where a
  # class has no source file, at which the checker wants to look.
  __module__ = "kauldron_tour"
  mean: Float["n"] | Int["n"]
  scale: Float["n"]
  key: PRNGKey


@kt.typechecked
def total_norms(arrays: PyTree[Float["n _"], "$T"],
                scales: PyTree[Float["n"], "$T"]) -> Float["n"]:
  """Returns, for each row, the sum of its scaled norms in all arrays."""
  total = np.zeros(kt.dim["n"])
  pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(scales), strict=True)
  for array, scale in pairs:
    total += np.linalg.norm(array, axis=-1) * scale
  return total


@section("Dataclasses and trees are checked, and sizes can be read")
def shapes_elsewhere():
  """The same notation serves for fields, for nests and inside a call."""
  row = np.ones(5)
  square = np.ones((5, 5))
  key = jax.random.key(SEED)

  def first_line(caught):
    return str(caught.exception).strip().partition("\n")[0]

  # A dataclass: the first is right, also with integers as its mean.
  noise = Noise(mean=np.zeros(5, int), scale=row, key=key)
  show("a mean of integers is accepted", noise.mean.tolist())
  with raises(kt.KTypeCheckError, "'scale'") as caught:
    Noise(mean=row, scale=row[:2], key=key)
  show("a shorter scale", first_line(caught))
  with raises(kt.KTypeCheckError, "'mean'") as caught:
    Noise(mean=np.zeros(5, bool), scale=row, key=key)
  show("a mean of booleans", first_line(caught))
  # UInt32['2'] in the message is a key of jax.random.PRNGKey, Fry[''] one of
  # jax.random.key, and KdPRNGKey one of kd.random.
  with raises(kt.KTypeCheckError, "'key'") as caught:
    Noise(mean=row, scale=row, key=3)
  show("a number as key", first_line(caught))

  # Trees: two arrays need two scales.
  total = total_norms([square, square[:, :4]], [row, row])
  agree("total of the norms", found=total, by_hand=(np.sqrt(5) + 2) * row)
  with raises(kt.KTypeCheckError, "structure") as caught:
    total_norms([square], [row, row])
  show("one array, two scales", first_line(caught))

  # Names inside a block. A new one is calculated from another.
  with kt.typechecked():
    kt.check_type(np.ones((3, 8)), Float["*b n"])
    show("sizes", f"*b {kt.dim['*b']}, n {kt.dim['n']}")
    agree("n", found=kt.dim["n"], expected=8)
    kt.dim["half"] = kt.dim["n"] // 2
    agree('kt.shape("*b half")', found=kt.shape("*b half"), expected=(3, 4))
    agree("a (3, 4) is a *b half",
          found=kt.isinstance(np.ones((3, 4)), Float["*b half"]),
          expected=True)
    agree("a (3, 5) is a *b half",
          found=kt.isinstance(np.ones((3, 5)), Float["*b half"]),
          expected=False)

  # After the block the names stand for nothing.
  with raises(kt.NoActiveScopeError, "No active scope") as caught:
    kt.dim["n"]
  show("after the block", first_line(caught).partition(".")[0])

# %% [markdown]
# ## A loss is values, a mask and a weight
#
# To write a loss of your own you derive from `kd.losses.Loss`, declare a
# `kontext.Key` for each input, and return an array of values from `get_values`,
# usually one for each example, (b, 1). The base class does the rest:
#
#     loss = weight * sum(values * mask) / sum(mask)
#
# - `mask` is a key, of numbers that are 0 or 1 as a rule. It is first broadcast
#   to the shape of the values. With `normalize_by="values"` the sum is divided
#   by the number of all values instead. Where the mask is all 0 the loss is 0.
#   In an evaluator both sums run over all batches.
# - `weight` scales the loss against other losses. It is a number, or a
#   schedule: a function of the step, which is in the context at the key `step`.
#
# Two things that surprise. A reported loss includes its weight; the losses that
# are reported add up to `losses/total`, which is what is minimised. And since
# the mask multiplies, a NaN under a mask makes the total NaN.
#
# The loss below is the focal loss (arXiv:1708.02002), which plays down what the
# model is sure of already: $-(1 - p)^\gamma \log p$, where $p$ is the
# probability that the model gives to the right class. It must be `frozen=True`
# since the base class is; that makes it hashable, and `jax.jit(loss)` works.
#
# `kd.losses` has what is common: `L1`, `L2`, `Huber`, `SoftmaxCrossEntropy`,
# `SoftmaxCrossEntropyWithIntLabels`, `SigmoidBinaryCrossEntropy`; `Value` is
# for a model that calculates its loss itself.

# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class FocalLoss(kd.losses.Loss):
  """Focal loss of logits against integer labels, in nats."""

  logits: kontext.Key = kontext.REQUIRED  # Left out, calling it is an error.
  labels: kontext.Key = kontext.REQUIRED
  gamma: float = 1.0

  @kt.typechecked
  def get_values(self, logits: Float["*b n"],
                 labels: Int["*b 1"]) -> Float["*b 1"]:
    log_probs = jax.nn.log_softmax(logits)
    log_p = jnp.take_along_axis(log_probs, labels, axis=-1)
    return -((1 - jnp.exp(log_p)) ** self.gamma) * log_p


def focal_values(logits, labels, xp=np):
  """Returns the focal losses, gamma = 1, of (b, n) and (b, 1) as (b, 1).

  `xp` is NumPy, or jax.numpy where this is to be differentiated.
  """
  probs = xp.exp(logits) / xp.exp(logits).sum(axis=-1, keepdims=True)
  p = xp.take_along_axis(probs, labels, -1)
  return -(1 - p) * xp.log(p)


def random_predictions(num_examples=30):
  """Returns random logits (n, 3), labels (n, 1), and a mask (n, 1) of 0, 1."""
  rng = np.random.default_rng(SEED)
  logits = rng.normal(size=(num_examples, 3)).astype(np.float32)
  labels = rng.integers(3, size=(num_examples, 1))
  mask = rng.integers(2, size=(num_examples, 1)).astype(np.float32)
  return logits, labels, mask


@section("A loss is values, a mask and a weight")
def custom_loss():
  """`get_values` is yours; mask, mean and weight come with the base class."""
  logits, labels, mask = random_predictions()
  context = {"preds": logits, "batch": {"label": labels, "mask": mask},
             "step": 4}
  values = focal_values(logits, labels)

  loss = FocalLoss(logits="preds", labels="batch.label")
  agree("loss", kauldron=loss(context=context), by_hand=values.mean())

  # With a mask: the mean of what it leaves, or of all with the others as 0.
  masked = dataclasses.replace(loss, mask="batch.mask")
  agree("masked", kauldron=masked(context=context),
        by_hand=values[mask == 1].mean())
  by_values = dataclasses.replace(masked, normalize_by="values")
  agree("masked, by values", kauldron=by_values(context=context),
        by_hand=(values * mask).mean())

  # Only ratios count: with a fainter mask the loss is the same.
  faint = context | {"batch": {"label": labels, "mask": mask / 64}}
  agree("faint mask", kauldron=masked(context=faint),
        by_hand=values[mask == 1].mean())

  # With a weight that grows by 0.5 a step: 2 at step 4.
  growing = optax.linear_schedule(0.0, 5.0, transition_steps=10)
  weighted = dataclasses.replace(loss, weight=growing)
  agree("weighted, step 4", kauldron=weighted(context=context),
        by_hand=2 * values.mean())

  # NaN under a mask. What must not count has to be replaced, not masked.
  logits_with_nan = np.where(mask == 1, logits, np.nan)
  value = masked(context=context | {"preds": logits_with_nan})
  show("NaN under a mask", str(value))
  assert np.isnan(value), value

  # A label of the wrong shape is refused, instead of being broadcast.
  with raises(kt.KTypeCheckError, "argument labels") as caught:
    loss.get_values(logits=logits, labels=labels[:, 0])
  show("labels without their last axis",
       str(caught.exception).strip().partition("\n")[0])

# %% [markdown]
# ## A metric is a state that merges
#
# Some scores are no mean over batches. The mean recall of all classes is one:
# each class counts alike, however seldom it occurs, so the batches' values
# cannot simply be averaged. A metric of Kauldron therefore gives no number for
# a batch, but a *state* that can be merged with others. There are four stages:
#
# - `get_state` makes the state of one batch. It runs inside the jitted step,
#   and gets its arguments as the `get_values` of a loss does.
# - The states are merged: in an evaluator those of all its batches. In training
#   nothing is merged; what is logged is the metric of one batch.
# - `finalize` puts NumPy arrays in the place of JAX's, and puts together what
#   was collected. It is seldom overridden.
# - `compute` makes a number of the merged state. It runs outside `jit`, so
#   shapes in it may depend on values.
#
# You write the first and the last. `get_state` is a method of your metric,
# `compute` one of the class of its states, which stands inside the metric and
# derives from `AutoState`. (`AutoState["MeanRecall"]` says which metric it
# belongs to, for type checkers.) Each field of a state says how it is merged:
# with `sum_field` it is added up. (Section `own_parts` has one that collects.
# The types of the fields tell the reader what is meant; nothing checks them.)
#
# `kd.metrics` has what is common: `Accuracy`, `BinaryAccuracy`, `Precision1`,
# `RocAuc`, `Psnr`, `Ssim`, `Norm`, `Std` and others. For a plain mean no metric
# of your own is needed: a loss may stand among the metrics, and is logged.

# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanRecall(kd.metrics.Metric):
  """The recall of each class that occurs, averaged over the classes."""

  logits: kontext.Key = kontext.REQUIRED
  labels: kontext.Key = kontext.REQUIRED
  mask: kontext.Key | None = None

  @flax.struct.dataclass  # A pytree, because it leaves the jitted step.
  class State(kd.metrics.AutoState["MeanRecall"]):
    """How many examples of each of the n classes were seen, and were hit."""

    hits: Float["n"] = kd.metrics.sum_field()
    seen: Float["n"] = kd.metrics.sum_field()

    def compute(self):
      occurs = self.seen > 0
      recalls = self.hits[occurs] / self.seen[occurs]
      # A float: up to Kauldron 1.4.4 a NumPy float32 among the metrics can make
      # saving a checkpoint fail, since some metrics are saved with it.
      return float(recalls.mean())

  @kt.typechecked
  def get_state(self, logits: Float["*b n"], labels: Int["*b 1"],
                mask: Float["*b 1"] | None = None) -> State:
    if mask is None:
      mask = jnp.ones(labels.shape)
    num_classes = logits.shape[-1]
    one_hot = jax.nn.one_hot(labels[..., 0], num_classes)
    hit = jnp.argmax(logits, axis=-1, keepdims=True) == labels
    seen = mask * one_hot  # Shape (*b, n).
    batch_axes = tuple(range(labels.ndim - 1))
    return self.State(hits=jnp.where(hit, seen, 0.0).sum(batch_axes),
                      seen=seen.sum(batch_axes))


def recall_by_hand(logits, labels):
  """Returns the mean recall over the classes; logits (b, n), labels (b, 1)."""
  labels = labels[:, 0]
  right = logits.argmax(axis=-1) == labels
  return np.mean([right[labels == label].mean() for label in np.unique(labels)])


@section("A metric is a state that merges")
def custom_metric():
  """Merged states are the state of all, which no mean of values would be."""
  logits, labels, mask = random_predictions()
  metric = MeanRecall(logits="preds", labels="batch.label")

  def state_of(metric, rows):
    context = {"preds": logits[rows],
               "batch": {"label": labels[rows], "mask": mask[rows]}}
    return jax.jit(metric.get_state_from_context)(context)

  first = state_of(metric, slice(0, 15))
  rest = state_of(metric, slice(15, 30))
  show("first.seen", first.seen.tolist())
  show("rest.seen", rest.seen.tolist())

  merged = first.merge(rest)
  show("merged.seen", merged.seen.tolist())
  value = merged.finalize().compute()
  agree("mean recall", merged=value, by_hand=recall_by_hand(logits, labels))

  # The mean of the two batches' values is something else, although they have
  # 15 examples each.
  mean = (first.finalize().compute() + rest.finalize().compute()) / 2
  show("mean of the two batches' values", mean)
  assert abs(mean - value) > 1e-3, (mean, value)

  # A metric, unlike a loss, has a mask only if its author gives it one.
  masked = dataclasses.replace(metric, mask="batch.mask")
  kept = mask[:, 0] == 1
  agree("masked", kauldron=state_of(masked, slice(0, 30)).finalize().compute(),
        by_hand=recall_by_hand(logits[kept], labels[kept]))

# %% [markdown]
# # Part II: a real Trainer
#
# From here on `kd.train` is used and not only recorded, which imports
# TensorFlow (its event files are TensorBoard's). That takes 5 to 15 seconds,
# once.

# %% Importing the trainer jupyter={"source_hidden": true}
@contextlib.contextmanager
def quiet_stderr():
  """Keeps off the screen what TensorFlow's C++ parts say when they load."""
  stderr = os.dup(2)
  with open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(stderr, 2)
    os.close(stderr)


if RUNNING:
  print("\nImporting TensorFlow: 5 to 15 seconds, once ...", flush=True)
# The gc lines only make the tour faster. In a project `from kauldron import kd`
# is all it takes.
gc.disable()  # So much is loaded that it would run all the time.
with quiet_stderr():
  import kauldron.train  # noqa: F401
gc.freeze()  # Modules are no garbage; at the end this saves two seconds.
gc.enable()

# %% [markdown]
# ## The task: which way do the stripes run?
#
# All that follows trains on pictures of 8 x 8 pixels with stripes in one of
# four directions and some noise. A *loader* is a function that returns all
# examples, as a dict of arrays; what it calls `image` is `batch.image` to a key
# path.

# %%
NUM_CLASSES = 4
WIDTH = 32


def stripes(num_images, seed):
  """Returns image, float32 (n, 8, 8, 1) in [-1, 1], and label, int32 (n, 1)."""
  rng = np.random.default_rng(seed)
  label = rng.integers(NUM_CLASSES, size=(num_images, 1))
  angle = label * np.pi / NUM_CLASSES
  phase = rng.uniform(0, 2 * np.pi, size=label.shape)

  y, x = np.indices((8, 8)).reshape(2, 1, 64)
  wave = np.cos(np.pi / 2 * (np.cos(angle) * x + np.sin(angle) * y) + phase)
  noise = rng.normal(scale=0.2, size=wave.shape)
  image = np.clip(0.5 * wave + noise, -1, 1).reshape(num_images, 8, 8, 1)
  return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def train_images():
  """Returns the examples for training."""
  return stripes(1024, seed=SEED)


def held_out_images():
  """Returns the examples for evaluation."""
  return stripes(240, seed=SEED + 1)

# %% [markdown]
# The model is a flax module like any other. The one thing that is Kauldron's is
# the field `image`: a key, like those of a loss, which says where in the
# context the argument `image` of `__call__` comes from. (A model with several
# inputs has a key for each.) What `__call__` returns is what keys find at
# `preds`.

# %%
class MLP(nn.Module):
  """Two dense layers without biases, which makes them easy to redo by hand."""

  image: kontext.Key = kontext.REQUIRED
  width: int = WIDTH

  @nn.compact
  def __call__(self, image):
    x = image.reshape(image.shape[0], -1)
    x = nn.Dense(self.width, use_bias=False, name="encoder")(x)
    x = nn.relu(x)
    x = nn.Dense(NUM_CLASSES, use_bias=False, name="head")(x)
    return {"logits": x}


def logits_by_hand(params, image):
  """Returns what the MLP with these parameters makes of images, by NumPy."""
  x = image.reshape(len(image), 64) @ params["encoder"]["kernel"]
  return np.maximum(x, 0) @ params["head"]["kernel"]

# %% [markdown]
# ## A Trainer joins model, data, losses and optimizer
#
# Here is the whole experiment. `get_config` is what a config file defines, and
# every later section starts from it. Our own classes are named through
# `lazy_tour`, a stand-in for this very file. What needs a word stands below it.

# %%
with konfig.imports():
  import kauldron_tour as lazy_tour

BATCH_SIZE = 48
LEARNING_RATE = 0.01


def get_config():
  """Returns the config that the rest of the tour starts from."""
  cfg = lazy_kd.train.Trainer()
  cfg.seed = SEED

  # Data and model.
  cfg.train_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.train_images,
      batch_size=BATCH_SIZE,
      shuffle=True)
  cfg.model = lazy_tour.MLP(image="batch.image", width=WIDTH)

  # What is minimised, and what is looked at.
  cfg.train_losses = {
      "focal": lazy_tour.FocalLoss(
          logits="preds.logits", labels="batch.label", gamma=1.0)}
  cfg.train_metrics = {
      "recall": lazy_tour.MeanRecall(
          logits="preds.logits", labels="batch.label")}

  # How.
  cfg.num_train_steps = 100
  cfg.schedules = {
      "learning_rate": lazy_optax.cosine_decay_schedule(
          init_value=LEARNING_RATE,
          decay_steps=cfg.ref.num_train_steps)}
  cfg.optimizer = lazy_optax.adam(
      learning_rate=cfg.ref.schedules["learning_rate"])

  # What is kept of it.
  cfg.log_metrics_every = 10
  cfg.log_summaries_every = cfg.ref.log_metrics_every
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(save_interval_steps=30)
  cfg.profiler = None
  return cfg

# %% [markdown]
# Some of that needs a word:
#
# - `Trainer()` is recorded with some fields filled in already, defaults that
#   Kauldron has registered. Hence the config that is printed below has `evals`
#   and `setup`, which nobody has written.
# - `workdir`, where a run writes, is still to be set. It is `None` until then,
#   and the config cannot be resolved. Give an absolute path: with a relative
#   one the whole run is trained, no checkpoint is written, and it ends with an
#   error ("should be absolute").
# - `num_train_steps=100` takes steps 0 to 100, so it takes 101 of them. (Later
#   runs are ended early with `stop_after_steps=11`, which takes 11.)
# - Losses and metrics are logged every `log_metrics_every` steps, summaries
#   (images, histograms) every `log_summaries_every`. The step is compiled once
#   for each combination (with or without metrics, summaries), so equal numbers
#   save time.
# - A checkpoint labelled 90 holds the state *before* step 90. They are saved at
#   steps 0, 30, 60 and 90, and the last three are kept. So steps 90 to 100 are
#   in no checkpoint. With `num_train_steps` a multiple of `save_interval_steps`
#   only the very last step is lost.
# - By default, except in a notebook, the profiler traces from step 10 on, for
#   at least five steps and three seconds, and again every hour. A run that ends
#   during a trace leaves it running, and the next one logs an error.
#   `cfg.profiler = None` switches it off.
#
# Beside event files and checkpoints a run writes its config, the shapes of a
# batch (`element_spec.json`), and at its end `train_complete.txt`, for
# evaluation in another process (section `evaluators`).
#
# The numbers go into event files, for TensorBoard. This reads them back;
# section `event_files` says more about them.

# %%
def read_events(workdir, tag, folder="train"):
  """Returns the steps and the values that a run wrote under a tag."""
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.util import tensor_util
  keep_all = {"tensors": 0}  # By default it keeps ten of each.
  events = event_accumulator.EventAccumulator(
      os.path.join(workdir, folder), size_guidance=keep_all)
  events.Reload()
  steps = []
  values = []
  for event in events.Tensors(tag):
    steps.append(event.step)
    values.append(tensor_util.make_ndarray(event.tensor_proto).tolist())
  return steps, values

# %% [markdown]
# Now it is trained. `trainer.train()` returns the last state (step, parameters,
# optimizer state, other collections of the model) and the *auxiliaries*, which
# have nothing to do with `cfg.aux`: the states of losses, metrics and summaries
# at the last step. They are there only if that step was one to log, as here;
# `aux.compute()` makes values of them.

# %%
@section("A Trainer joins model, data, losses and optimizer")
def real_trainer():
  """A config resolves to a Trainer, which trains."""
  cfg = get_config()
  del cfg.xm_job  # For Google's own launcher. Gone, to print less.
  show("cfg; &id001 and *id001 are one shared part", cfg)
  cfg.workdir = new_workdir("real_trainer")

  trainer = konfig.resolve(cfg)
  untrained = trainer.init_state()
  state, aux = trainer.train()

  # What it learnt.
  steps, losses = read_events(cfg.workdir, "losses/total")
  draw("real_trainer", {"loss": (steps, losses)},
       xlabel="step", ylabel="training loss (nats)")
  show("first loss", losses[0])
  agree("last loss", logged=losses[-1],
        in_aux=aux.compute().loss_values["losses/total"])

  # The trained model is an ordinary flax module and its parameters. On images
  # that it has not seen:
  held_out = held_out_images()

  apply = jax.jit(trainer.model.apply)

  def held_out_recall(params):
    preds = apply({"params": params}, held_out["image"])
    return recall_by_hand(np.asarray(preds["logits"]), held_out["label"])
  before = held_out_recall(untrained.params)
  after = held_out_recall(state.params)
  show("held-out recall, untrained", before)
  show("held-out recall, trained", after)
  assert before < 0.5, before  # One in four is what guessing gives.
  assert after > 0.95, after

  # One step more than it says, and a schedule that is logged.
  agree("steps taken", found=int(state.step), expected=cfg.num_train_steps + 1)
  rate_steps, rates = read_events(cfg.workdir, "schedules/learning_rate")
  schedule = optax.cosine_decay_schedule(LEARNING_RATE, 100)
  agree("learning rate at step 70", logged=rates[rate_steps.index(70)],
        by_optax=schedule(70))

  # What is in the work directory.
  files = sorted(os.listdir(cfg.workdir))
  checkpoints = sorted(os.listdir(os.path.join(cfg.workdir, "checkpoints")))
  show("work directory", " ".join(files))
  show("checkpoints", " ".join(checkpoints))
  assert "config.json" in files, files
  agree("steps with a checkpoint", found=tuple(trainer.checkpointer.all_steps),
        expected=(30, 60, 90))

# %% [markdown]
# ## What a run wrote can be read back
#
# The event files of a run are in its work directory, in a folder for training
# (`train`) and one for each evaluator. TensorBoard shows them:
# `tensorboard --logdir DIR`. A *tag* names each series:
#
# - `losses/NAME` and `losses/total`, at steps with metrics or summaries;
# - `metrics/NAME`; `schedules/NAME`, for what stands in `cfg.schedules`;
#   `perf_stats/NAME`, how fast it goes;
# - `summaries/NAME`. What a summary computes decides what it becomes: floats of
#   shape (n, h, w, c) with c = 1 or 3 an image, a string a text. (For
#   histograms there is `kd.summaries.HistogramSummary`, see section
#   `inner_layer`.)
#
# Once, at the start, come four texts: `config`, a table of the `parameters`,
# the shapes of a batch (`element_spec`) and of all paths (`context_spec`).
#
# From here on most runs are short. `stop_after_steps=11` ends a run before step
# 11 and leaves `num_train_steps` alone, on which the schedule depends.

# %%
@section("What a run wrote can be read back")
def event_files():
  """Event files hold the scalars, images and texts that TensorBoard shows."""
  cfg = get_config()
  cfg.workdir = new_workdir("event_files")
  cfg.stop_after_steps = 11
  cfg.log_metrics_every = 5
  cfg.checkpointer = None
  cfg.train_summaries = {
      "images": lazy_kd.summaries.ShowImages(
          images="batch.image", in_vrange=(-1, 1), num_images=5)}
  trainer = konfig.resolve(cfg)
  _, aux = trainer.train()

  # Scalars: what the last step returned is what was written for it.
  values = aux.compute()
  scalars = {**values.loss_values, **values.metric_values}
  for tag, value in scalars.items():
    steps, written = read_events(cfg.workdir, tag)
    agree(f"{tag} at step {steps[-1]}", written=written[-1], returned=value)
  steps, _ = read_events(cfg.workdir, "losses/total")
  agree("steps with a loss", found=tuple(steps), expected=(0, 5, 10))

  # Images: PNG files, here the first five of the batch, as grey values.
  from matplotlib import image
  _, written = read_events(cfg.workdir, "summaries/images")
  width, height, *files = written[0]  # Then one PNG for each image.
  show("width and height of an image", (int(width), int(height)))
  pictures = np.array([image.imread(io.BytesIO(file)) for file in files])
  batch = next(iter(trainer.train_ds))  # It starts over: the batch of step 0.
  grey = (batch["image"][:5] + 1) / 2  # From [-1, 1] to [0, 1].
  agree("grey values, to one of 256 levels", rtol=0.005,
        written=pictures[..., None], by_hand=grey)

  # Texts: a table of the parameters.
  _, (table,) = read_events(cfg.workdir, "parameters")
  last_line = table.decode().splitlines()[-1]
  show("parameters", last_line)
  size = 64 * WIDTH + WIDTH * NUM_CLASSES
  assert last_line.startswith(f"Total: {size:,} "), last_line

# %% [markdown]
# ## A Trainer needs no config
#
# `konfig` is a convenience: what a config resolves to can be written directly,
# with the same names. Such a Trainer cannot be changed on the command line or
# rebuilt from its work directory: it writes no `config.json`. (The one below
# has no checkpointer either, and so saves nothing.)
#
# At its end the section prints the fields of three classes, so that you need
# not look them up, with the default or its class. `cfg.workdir` and the like
# stand for a field of the Trainer, from which the default is taken. (The
# default of the Trainer's own `workdir` is a path that it refuses.) Most fields
# of the Trainer come up in a section of their own. The others:
#
# - `checkify_error_categories` compiles checks into the step, those of
#   `jax.experimental.checkify`. With `checkify.float_checks` a training ends
#   with the name of the first operation that made a NaN.
# - `setup` makes the work directory and shows the progress; `xm_job` is for
#   Google's own launcher; `raw_cfg` is the config that the Trainer came from.

# %%
FEW_STEPS = 20  # How long the runs are in which little has to be learnt.


def distance(tree, other):
  """Returns the largest absolute difference between two trees' leaves."""
  far = jax.tree.map(lambda x, y: np.abs(x - y).max(), tree, other)
  return float(max(jax.tree.leaves(far)))


def fields_of(part):
  """Returns a dataclass's public fields and their defaults, a line each."""
  fields = []
  for field in dataclasses.fields(part):
    if field.name.startswith("_"):
      continue
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    of_trainer = re.fullmatch(r"_FakeRootCfg\('(.*)'\)", str(default))
    if default is dataclasses.MISSING:
      fields.append(f"{field.name} (must be given)")
    elif isinstance(default, (bool, int, float, str, type(None))):
      fields.append(f"{field.name} = {default}")
    elif of_trainer:
      fields.append(f"{field.name} = {of_trainer[1]}")
    else:
      fields.append(f"{field.name} = {type(default).__name__}(...)")
  return "\n".join(fields)


@section("A Trainer needs no config")
def plain_trainer():
  """Built from real objects it trains as the same config does."""
  schedule = optax.cosine_decay_schedule(LEARNING_RATE, 100)
  trainer = kd.train.Trainer(
      seed=SEED,
      workdir=new_workdir("plain_trainer"),
      train_ds=kd.data.InMemoryPipeline(
          loader=train_images, batch_size=BATCH_SIZE, shuffle=True),
      model=MLP(image="batch.image"),
      train_losses={
          "focal": FocalLoss(logits="preds.logits", labels="batch.label")},
      train_metrics={
          "recall": MeanRecall(logits="preds.logits", labels="batch.label")},
      optimizer=optax.adam(schedule),
      num_train_steps=100,
      stop_after_steps=FEW_STEPS,
      log_metrics_every=10,
      log_summaries_every=10,
      profiler=None)
  state, _ = trainer.train()
  files = sorted(os.listdir(trainer.workdir))
  show("work directory", " ".join(files))
  assert "config.json" not in files, files

  cfg = get_config()
  cfg.workdir = new_workdir("from_config")
  cfg.writer = None  # No event files.
  cfg.stop_after_steps = FEW_STEPS
  from_config, _ = konfig.resolve(cfg).train()
  agree("distance from the run with a config", rtol=0,
        found=distance(state.params, from_config.params), expected=0.0)

  for part in (kd.train.Trainer, kd.ckpts.Checkpointer, kd.evals.Evaluator):
    show(f"fields of {part.__name__}", fields_of(part))

# %% [markdown]
# ## A project is an implementation and a config
#
# This tour is one file so that it can be pasted. A real project has two kinds
# of files: modules with what is yours (models, losses, data), which know
# nothing of configs, and below `configs/` files that hold nothing but a config.
# There the stand-ins may have the real names, because nothing else is in the
# file.
#
# `python -m kauldron.main` trains such a config. It is run in the project's
# directory, where Python finds `project`, and prints pages of log lines:
#
#     python -m kauldron.main --cfg=configs/my_experiment.py \
#         --cfg.workdir=/absolute/path --cfg.num_train_steps=20 \
#         --cfg.__args__.width=12 \
#         "--cfg.checkpointer=py::kd.ckpts.Checkpointer(save_interval_steps=10)"
#
# Any field can be set on the command line by its path, and what refers to it
# follows: below, the schedule gets as long as the training. An object is
# written as `py::` and a call. Modules need their full name there, as in
# `py::optax.sgd(learning_rate=0.1)` or `py::project.Classifier(x='batch.x')`;
# only `kd`, `nn` and `np` are short.
#
# What changes several fields that do not simply follow one another is an
# argument of `get_config`. Below, the width is one: a wider layer gets a
# smaller learning rate. A dataclass in the config file lists these arguments;
# it must be called `ConfigArgs`. On the command line they are set below
# `__args__`. (An older way is to write them behind the name of the file:
# `--cfg=configs/my_experiment.py:width=12`.)
#
# Started anew, `kauldron.main` would import everything once more. So below the
# two files are written, and the command line goes to the function with which
# `kauldron.main` reads it, `konfig.DEFINE_config_file`. What that returns is
# resolved and trained, as by `kauldron.main`.
#
# In a notebook there is no command line. A config file is a Python file, so you
# import it and call its `get_config`, or let
# `konfig.get_config_from_module(my_experiment, "width=12")` do that.

# %%
PROJECT_FILE = '''
from flax import linen as nn
from kauldron import kontext
import numpy as np


def examples():
  """Returns x (n, 8) and label (n, 1): whether the sum of x is positive."""
  x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
  label = (x.sum(axis=1, keepdims=True) > 0).astype(np.int32)
  return {"x": x, "label": label}


class Classifier(nn.Module):
  x: kontext.Key = kontext.REQUIRED
  width: int = 16

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(self.width, name="encoder")(x))
    return {"logits": nn.Dense(2, name="head")(x)}
'''

CONFIG_FILE = '''
import dataclasses

from kauldron import konfig

with konfig.imports():
  from kauldron import kd
  import optax
  import project


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArgs:
  width: int = 16


def get_config(args: ConfigArgs = ConfigArgs()):
  cfg = kd.train.Trainer()
  cfg.train_ds = kd.data.InMemoryPipeline(
      loader=project.examples, batch_size=48)
  cfg.model = project.Classifier(x="batch.x", width=args.width)
  cfg.train_losses = {
      "cross_entropy": kd.losses.SoftmaxCrossEntropyWithIntLabels(
          logits="preds.logits", labels="batch.label")}
  cfg.num_train_steps = 100
  cfg.schedules = {
      "learning_rate": optax.cosine_decay_schedule(
          init_value=0.16 / args.width,  # Smaller steps for a wider layer.
          decay_steps=cfg.ref.num_train_steps)}
  cfg.optimizer = optax.adam(learning_rate=cfg.ref.schedules["learning_rate"])
  cfg.log_metrics_every = 1
  cfg.log_summaries_every = 1
  cfg.profiler = None
  return cfg
'''


@section("A project is an implementation and a config")
def project():
  """Two files make a project; the config file is one that Kauldron trains."""
  from absl import flags
  folder = pathlib.Path(new_workdir("project"))
  (folder / "configs").mkdir()
  (folder / "project.py").write_text(PROJECT_FILE)
  config_file = folder / "configs" / "my_experiment.py"
  config_file.write_text(CONFIG_FILE)

  for name in ("project", "configs", "configs.my_experiment"):
    sys.modules.pop(name, None)  # Of an earlier run of this cell.

  # As if this were `python -m kauldron.main ...` in that directory. (Kauldron
  # looks into `sys.argv` itself.)
  arguments = [
      "kauldron.main",
      f"--cfg={config_file}",
      f"--cfg.workdir={folder}/run",
      "--cfg.num_train_steps=20",
      "--cfg.__args__.width=12",
      "--cfg.checkpointer=py::kd.ckpts.Checkpointer(save_interval_steps=10)"]
  with mock.patch.object(sys, "argv", arguments), (
      mock.patch.object(sys, "path", [str(folder), *sys.path])):
    command_line = flags.FlagValues()
    cfg_flag = konfig.DEFINE_config_file("cfg", flag_values=command_line)
    command_line(arguments)
    cfg = cfg_flag.value
    state, aux = konfig.resolve(cfg).train()

    # As in a notebook.
    from configs import my_experiment
    in_notebook = konfig.get_config_from_module(my_experiment, "width=12")

  # A field that was set, and one that refers to it.
  agree("num_train_steps", found=cfg.num_train_steps, on_the_command_line=20)
  agree("steps of the schedule", found=cfg.optimizer.learning_rate.decay_steps,
        expected=cfg.num_train_steps)

  # The argument: what the width changes, in two places.
  agree("kernel of the encoder", shape=state.params["encoder"]["kernel"].shape,
        expected=(8, 12))
  agree("first learning rate", found=cfg.schedules.learning_rate.init_value,
        by_hand=0.16 / 12)
  agree("the same in a notebook",
        found=in_notebook.schedules.learning_rate.init_value, by_hand=0.16 / 12)

  # The object: a checkpointer, which has been at work.
  run = folder / "run"
  checkpoints = sorted(os.listdir(run / "checkpoints"))
  agree("checkpoints", found=" ".join(checkpoints),
        expected="ckpt_0 ckpt_10 ckpt_20")

  # It has learnt, and says what.
  loss = float(aux.compute().loss_values["losses/total"])
  show("loss after the last step", loss)
  show("loss of guessing", float(np.log(2)))
  assert loss < np.log(2), loss
  written = json.loads((run / "config.json").read_text())
  agree("the model in config.json", found=written["model"]["__qualname__"],
        expected="project:Classifier")

# %% [markdown]
# ## The training loop is one you could write yourself
#
# `train()` is a loop over `trainer.trainstep.step`, which takes a state and a
# batch and returns the next state and the auxiliaries. (These are empty unless
# you ask for them with `return_losses=True`, `return_metrics=True`.) It starts
# from `trainer.init_state()`, an untrained state, or from a checkpoint. Around
# it `train()` evaluates, saves and logs. You may write the loop yourself, for
# instance in a notebook to look at one step. `device_put` brings the batches to
# the devices, divided among them as `trainer.sharding.batch` says (section
# `sharding`). A state that you pass is donated: it is used up, and its memory
# holds the next one.
#
# And the step is what you would write in plain JAX. The third version below
# takes from Kauldron the batches and the first parameters, and shares the
# model. All three must end with the same parameters. (The third to rounding: it
# calculates the loss by another formula.)

# %%
@section("The training loop is one you could write yourself")
def readable_loop():
  """`train()`, a loop over `step` and plain JAX end with equal parameters."""
  cfg = get_config()
  cfg.workdir = new_workdir("readable_loop")
  cfg.writer = None  # No event files.
  cfg.stop_after_steps = FEW_STEPS
  trainer = konfig.resolve(cfg)
  trained, _ = trainer.train()

  # The loop.
  batches = trainer.train_ds.take(FEW_STEPS)  # Starts over with each loop.
  state = trainer.init_state()
  first_params = jax.device_get(state.params)
  for batch in batches.device_put(trainer.sharding.batch):
    state, _ = trainer.trainstep.step(state, batch)

  # Plain JAX. (The key of the model matters to Kauldron only.)
  model = MLP()
  optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, 100))

  def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["image"])["logits"]
    return focal_values(logits, batch["label"], jnp).mean()

  @jax.jit
  def plain_step(params, opt_state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = first_params
  opt_state = optimizer.init(params)
  for batch in batches:
    params, opt_state = plain_step(params, opt_state, batch)

  show("how far training moved the parameters",
       distance(first_params, trained.params))
  agree("from train() to the loop", rtol=0,
        distance=distance(trained.params, state.params), expected=0.0)
  to_plain = distance(trained.params, params)
  print(f"  from train() to plain JAX: distance {to_plain:.0e}")
  assert to_plain < 1e-6, to_plain

# %% [markdown]
# Later sections redo with the loop what `train()` did.

# %%
def take_steps(trainer, state, num_steps):
  """Returns the state after steps on the first batches; uses up `state`."""
  batches = trainer.train_ds.take(num_steps)
  for batch in batches.device_put(trainer.sharding.batch):
    state, _ = trainer.trainstep.step(state, batch)
  return state

# %% [markdown]
# ## An inner layer is watched without touching the model
#
# Which paths may a key name? `trainer.context_specs` is the context of a
# training step with shapes in place of arrays. It is found by tracing, without
# training anything. That makes it the quickest way to see whether the keys of
# model, losses and metrics are right: if one is not, this raises the error that
# `train()` would, a KeyError as a rule. (Two kinds are not seen: those of
# evaluators, which are looked up when they run, and those inside
# `SkipIfMissing`, below.) Some of what it holds:
#
# - `batch`, `step`, `params`, `preds`: as you would think.
# - `interms`: what each layer returned. `interms.encoder.__call__[0]` is the
#   output of the first call of the layer `encoder`.
# - `opt_state`, and `collections` of a model that has some (section
#   `model_state`).
# - `grads`, `updates`: the gradients, and what the optimizer made of them.
#   Evaluation has neither; `kd.metrics.SkipIfMissing` leaves a metric out where
#   its key is missing, and also where the key is misspelt. (A key with `**`
#   that matches nothing is an error all the same.)
#
# Metrics and summaries see all of it. The keys of a model can name only `batch`
# and `step`; those of a loss all but `grads` and `updates`, which come after
# it.
#
# So a metric or a summary whose key is such a path sees the inside of a model
# whose code knows nothing of it.
#
# `Norm` takes an array row by row (a row is along the last axis), and reports
# the mean of the rows' norms. Two metrics apply another one to trees: `TreeMap`
# makes a value of each array in a tree, or of those that a key with `**` picks,
# and logs it with the path below the tree (`kernels/encoder/kernel`);
# `TreeReduce` makes one value of all. The norm of the whole gradient, which
# many projects log, is a `TreeReduce` of a `Norm` that takes each array as a
# whole (`axis=None`) and all of them as one long vector
# (`aggregation_type="concat"`).
#
# To look at the values themselves, use the method `_step` of `trainstep`, which
# is the step before it is jitted: it returns the context as well. Or write
# `jax.debug.print("{x}", x=x)` into your model; it prints at each step, and
# once more when the parameters are initialised.

# %%
@section("An inner layer is watched without touching the model")
def inner_layer():
  """A key names what a layer returns: `interms.<layer>.__call__[0]`."""
  layer = "interms.encoder.__call__[0]"
  cfg = get_config()
  cfg.workdir = new_workdir("inner_layer")
  cfg.stop_after_steps = 10
  cfg.log_metrics_every = 1
  cfg.train_metrics = {
      "norm": lazy_kd.metrics.Norm(tensor=layer),
      "spread": lazy_kd.metrics.Std(values=layer),
      "kernels": lazy_kd.metrics.TreeMap(
          metric=lazy_kd.metrics.Norm(tensor="params.**.kernel")),
      "gradient": lazy_kd.metrics.SkipIfMissing(  # In evaluators it is missing.
          lazy_kd.metrics.TreeReduce(metric=lazy_kd.metrics.Norm(
              tensor="grads",
              axis=None,
              aggregation_type="concat"))),
  }
  cfg.train_summaries = {
      "layer": lazy_kd.summaries.HistogramSummary(tensor=layer, num_buckets=30)}

  trainer = konfig.resolve(cfg)
  paths = kontext.flatten_with_path(trainer.context_specs)
  print("  some of the paths that a key may name:")
  for path in ("batch.image", "step", "params.encoder.kernel", layer,
               "preds.logits", "grads.head.kernel"):
    show(path, f"{paths[path].dtype}{list(paths[path].shape)}")
  trainer.train()

  # A wrong key is noticed before any training.
  wrong = get_config()
  wrong.workdir = cfg.workdir
  wrong.train_metrics = {"norm": lazy_kd.metrics.Norm(tensor="interms.encodr")}
  with raises(KeyError, "interms.encodr") as caught:
    konfig.resolve(wrong).context_specs  # noqa: B018
  show("a wrong key", caught.exception.args[0])

  # By hand: the first step, with the parameters before their update.
  state = trainer.init_state()
  params = jax.device_get(state.params)
  batch = next(iter(trainer.train_ds))
  encoded = batch["image"].reshape(BATCH_SIZE, 64) @ params["encoder"]["kernel"]

  def loss_fn(params):
    logits = MLP().apply({"params": params}, batch["image"])["logits"]
    return focal_values(logits, batch["label"], jnp).mean()
  grads = jax.device_get(jax.jit(jax.grad(loss_fn))(params))

  def mean_norm(rows):
    """Returns what `kd.metrics.Norm` is by default: the mean norm of rows."""
    return np.linalg.norm(rows, axis=-1).mean()

  by_hand = {
      "norm": mean_norm(encoded),
      "spread": encoded.std(),
      "kernels/encoder/kernel": mean_norm(params["encoder"]["kernel"]),
      "kernels/head/kernel": mean_norm(params["head"]["kernel"]),
      "gradient": np.sqrt(sum((x ** 2).sum() for x in jax.tree.leaves(grads))),
  }
  for name, expected in by_hand.items():
    _, values = read_events(cfg.workdir, f"metrics/{name}")
    agree(f"{name} at step 0", logged=values[0], by_hand=expected)

  # The layer itself.
  step = jax.jit(trainer.trainstep._step)
  _, context = step(state, batch)
  agree("output of the layer at step 0",
        in_context=kontext.get_by_path(context, layer), by_hand=encoded)

  # TensorBoard gets the histogram as left edge, right edge, count of 30 bins.
  steps, histograms = read_events(cfg.workdir, "summaries/layer")
  left, right, count = np.array(histograms[0]).T
  expected_count, edges = np.histogram(encoded, bins=30)
  agree("histogram, edges", logged=np.append(left, right[-1]), by_hand=edges)
  off_by = int(np.abs(count - expected_count).max())
  show("histogram, counts differ from NumPy's by at most", off_by)
  assert off_by <= 1, count  # A value on an edge may be counted on either side.

  # How the layer changes: the largest output is where the last bin ends.
  largest = [np.array(histogram)[-1, 1]  # The right edge of the last bin.
             for histogram in histograms]
  show("largest output of the encoder, first step", float(largest[0]))
  show("largest output of the encoder, last step", float(largest[-1]))
  draw("inner_layer", {"largest": (steps, largest)},
       xlabel="step", ylabel="largest output of the encoder")

# %% [markdown]
# ## A sweep changes one entry of the config at a time
#
# Each variant of a sweep is a dict that maps paths in the config to what should
# stand there. Written so, a variant *is* its difference from the base. A plain
# loop does the rest: it makes the config anew, sets what the variant changes,
# and trains. (Kauldron's own launcher, which needs Google's cluster software,
# gets the same dicts from a generator in the config file: `def sweep():`, with
# `yield {"train_losses.focal.gamma": 3.0}` and so on.)
#
# The last variant below changes the optimizer, whole. (The schedule is still
# logged then, though nothing uses it.) Mind the spelling: if the last part of a
# path is wrong, a field of that name is added, and only `konfig.resolve` finds
# out.
#
# For each variant you will see every path whose value is another one now, with
# the value before and after; `None` also stands for a path that is not there.
# One of these paths was not named: the learning rate of the optimizer is a
# reference to the schedule, and follows. Then come the recalls on held-out
# images after a few steps, and the curves. Compare the recalls: the loss of
# `sharp` is another function, so its curve cannot be held against the others.

# %%
VARIANTS = {
    "base": {},
    "slow": {"schedules.learning_rate.init_value": LEARNING_RATE / 10},
    "sharp": {"train_losses.focal.gamma": 3.0},
    "rmsprop": {"optimizer": lazy_optax.rmsprop(learning_rate=LEARNING_RATE)},
}


@section("A sweep changes one entry of the config at a time")
def sweep():
  """Variants differ from the base in what they name, and in their curves."""
  base_config = kontext.flatten_with_path(get_config())
  held_out = held_out_images()
  changed = {}  # Variant -> all paths with another value than in the base.
  recalls = {}
  curves = {}
  for name, changes in VARIANTS.items():
    cfg = get_config()
    for path, value in changes.items():
      kontext.set_by_path(cfg, path, value)

    flat = kontext.flatten_with_path(cfg)
    paths = base_config | flat  # Of both.
    changed[name] = {path for path in paths
                     if base_config.get(path) != flat.get(path)}
    print(f"  {name}: {len(changed[name])} changed")
    for path in sorted(changed[name]):
      print(f"    {path}: {base_config.get(path)} -> {flat.get(path)}")

    cfg.workdir = new_workdir("sweep")
    cfg.stop_after_steps = 8
    cfg.log_metrics_every = 1
    cfg.checkpointer = None
    state, _ = konfig.resolve(cfg).train()
    logits = logits_by_hand(jax.device_get(state.params), held_out["image"])
    recalls[name] = recall_by_hand(logits, held_out["label"])
    curves[name] = read_events(cfg.workdir, "losses/total")

  # Only what was named has changed, and what refers to it.
  assert changed == {
      "base": set(),
      "slow": {
          "schedules.learning_rate.init_value",
          "optimizer.learning_rate.init_value"},
      "sharp": {"train_losses.focal.gamma"},
      "rmsprop": {
          "optimizer.__qualname__",
          "optimizer.learning_rate",  # A number, and no schedule with fields.
          "optimizer.learning_rate.__qualname__",
          "optimizer.learning_rate.init_value",
          "optimizer.learning_rate.decay_steps"},
  }, changed

  for name, recall in recalls.items():
    show(f"{name}, held-out recall", recall)
  draw("sweep", curves, xlabel="step", ylabel="training loss (nats)")

  # Each takes another course. At step 0 the parameters and the batch are the
  # same in all; so is the loss, except with another gamma.
  losses = {name: values for name, (_, values) in curves.items()}
  base = losses["base"]
  agree("slow, step 0", loss=losses["slow"][0], base=base[0])
  agree("rmsprop, step 0", loss=losses["rmsprop"][0], base=base[0])
  assert abs(losses["sharp"][0] - base[0]) > 1e-3, losses
  for name in ("slow", "sharp", "rmsprop"):
    assert abs(losses[name][-1] - base[-1]) > 1e-3, losses

# %% [markdown]
# ## A data pipeline is config too
#
# An `InMemoryPipeline` gets a function, `loader=train_images`, and calls it
# when it needs the data. A `kd.data.py.DataSource` gets the data: any object
# with a length and an index, hence `data_source=train_examples()`, a call that
# is recorded like any other. Such an object may read its examples from whatever
# format you have, one at a time. `DataSource` is built on PyGrain, Google's
# library for that, as is all of `kd.data.py`.
#
# It takes each example through `transforms`, one after the other, and then
# forms batches. A transform is
#
# - any function of an example, which is named, not called;
# - one of Kauldron's: `kd.data.Elements(keep=..., rename=...)`, for instance,
#   renames some entries, keeps others, and drops all the rest;
# - an object of a class of your own.
#
# Such a class usually derives from one of these:
#
# - `kd.data.MapTransform`: its method `map` gets an example;
# - `kd.data.ElementWiseTransform`: `map_element` gets each value that the field
#   `key` names;
# - `kd.data.py.ElementWiseRandomTransform`: `random_map_element` gets the same,
#   and a NumPy generator.
#
# The shapes and dtypes of a batch, which a Trainer has to know beforehand, are
# the `element_spec` of the pipeline. The pipeline below is looked at, not
# trained with: it renames what the loss asks for, so that this Trainer could
# not train.

# %%
def train_examples():
  """Returns the training images one by one, as a list."""
  arrays = train_images()
  pairs = zip(arrays["image"], arrays["label"], strict=True)
  return [{"image": image, "label": label} for image, label in pairs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale(kd.data.ElementWiseTransform):
  """Multiplies what `key` names by a number."""
  by: float

  def map_element(self, element):
    return element * self.by


def with_copy(example):
  """Adds a copy of the image."""
  return {**example, "flipped": example["image"].copy()}


@section("A data pipeline is config too")
def data_pipeline():
  """Transforms change one example after the other, then batches are formed."""
  cfg = get_config()  # A Trainer hands its seed on to its data.
  cfg.workdir = new_workdir("data_pipeline")
  cfg.train_ds = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.train_examples(),
      batch_size=BATCH_SIZE,
      shuffle=False,
      num_epochs=1,
      num_workers=0,
      transforms=[
          lazy_kd.data.Elements(keep=["image"], rename={"label": "direction"}),
          lazy_tour.with_copy,
          lazy_kd.data.py.RandomFlipLeftRight(key="flipped"),
          lazy_tour.Scale(key="image", by=0.5),
      ])
  ds = konfig.resolve(cfg).train_ds
  show("ds.element_spec", "\n".join(
      f"{key}: {spec}" for key, spec in ds.element_spec.items()))
  agree("batches in an epoch", found=len(ds), by_hand=1024 // BATCH_SIZE)

  # The second batch, and the examples that must be in it.
  batch = list(ds.take(2))[1]
  arrays = train_images()
  image = arrays["image"][BATCH_SIZE:2 * BATCH_SIZE]
  label = arrays["label"][BATCH_SIZE:2 * BATCH_SIZE]
  agree("directions", rtol=0, found=batch["direction"], expected=label)
  agree("images, scaled", rtol=0, found=batch["image"], expected=0.5 * image)
  agree("shape of the images", found=batch["image"].shape,
        as_promised=ds.element_spec["image"].shape)

  # Each image was flipped, or left as it was.
  same = (batch["flipped"] == image).all(axis=(1, 2, 3))
  mirrored = (batch["flipped"] == image[:, :, ::-1]).all(axis=(1, 2, 3))
  show("flipped, of 48", int(mirrored.sum()))
  assert (same != mirrored).all(), "neither or both"
  assert 0 < mirrored.sum() < BATCH_SIZE

# %% [markdown]
# Four things bite, once you train with such a pipeline:
#
# - **Shuffling.** A `DataSource` must be told (`shuffle=`); an
#   `InMemoryPipeline` that is not told does not shuffle.
# - **Workers.** `num_workers` is 16 unless you say otherwise, in a notebook
#   always 0. Workers are processes, and each forms batches of its own share of
#   the data: with two, a batch holds examples 0, 2, 4 and so on, or 1, 3, 5. A
#   script needs `if __name__ == "__main__":`, and outside `kauldron.main`
#   absl's flags must be parsed (`absl.flags.FLAGS.mark_as_parsed()`).
#   `num_workers=0` needs nothing, so the tour has that.
# - **The end of an epoch.** An `InMemoryPipeline` drops, in each epoch, what
#   does not fill a batch. A `DataSource` goes on with the next epoch in the
#   same batch, and drops what is left after the last one, unless
#   `batch_drop_remainder=False`. Each worker drops its own: of 24 examples five
#   workers have at most five each, and so not one batch of six.
# - **Too little data.** Without `num_epochs` a pipeline goes on for ever. An
#   `InMemoryPipeline` with less than one batch then waits for ever.

# %% [markdown]
# ## Data comes from files, and can be mixed
#
# `kd.data.py.Json` reads a file with one JSON list of examples. Its lists must
# be made arrays by a transform: a list is a tree to JAX, and would be batched
# number by number. The others need a download, so they are only named here:
#
#     kd.data.py.Tfds(name="mnist", split="train", shuffle=True, batch_size=32)
#     kd.data.py.HuggingFace(path="ylecun/mnist", config=None, split="train",
#                            shuffle=True, batch_size=32)
#
# (The last one needs `pip install datasets`.)
#
# `kd.data.py.Mix` takes examples from several sources, in proportion to
# weights. In a config it stands where any pipeline does. (Below it is built
# from real objects, because its examples are no more than two lists.) Its epoch
# ends as soon as one of the sources is used up.

# %%
def to_arrays(example):
  """Makes arrays of the lists in an example from a JSON file."""
  return {key: np.asarray(value, np.float32) for key, value in example.items()}


@section("Data comes from files, and can be mixed")
def data_files():
  """A JSON file is read back as batches; a mixture has its shares."""
  path = pathlib.Path(new_workdir("data_files"), "examples.json")
  examples = [{"x": [i, i / 4], "source": [0]} for i in range(1, 13)]
  path.write_text(json.dumps(examples))
  cfg = lazy_kd.data.py.Json(
      path=str(path), shuffle=False, batch_size=6, num_epochs=1,
      num_workers=0, transforms=[lazy_tour.to_arrays],
      seed=SEED)  # A Trainer would pass its own.
  batches = list(konfig.resolve(cfg))
  agree("batches", found=len(batches), expected=2)
  x = np.concatenate([batch["x"] for batch in batches])
  show("the last example", x[-1].tolist())
  agree("all examples", read=x, written=[example["x"] for example in examples])

  # Three of these examples for one of others. `Mix` forms the batches, and it
  # is its `num_workers` that counts.
  other = [{"x": [0.0, 0.0], "source": [1]}] * 12
  parts = [
      kd.data.py.DataSource(data_source=source, shuffle=False,
                            transforms=[to_arrays])
      for source in (examples, other)]
  mix = kd.data.py.Mix(
      datasets=parts, weights=[3, 1], shuffle=False, batch_size=8,
      num_epochs=1, num_workers=0, seed=SEED)
  batch = next(iter(mix))
  show("where the examples come from", batch["source"][:, 0].tolist())
  agree("share of the second source", found=batch["source"].mean(),
        expected=0.25)

# %% [markdown]
# ## A run resumes where it stopped, if its data can
#
# If `train()` finds a checkpoint in the work directory it goes on from there.
# Parameters, optimizer state and step are as they were, bit for bit. The rest
# is a question of the data:
#
# - `InMemoryPipeline` starts over with its first batch.
# - PyGrain, and so a `DataSource`, knows its position and saves it. The run
#   ends as if it had never been interrupted.
#
# To resume, start the same command once more. For the same reason a new
# experiment needs a new work directory. In a notebook call `train()` again; the
# same Trainer will do. (But to restore a state by hand, as below, resolve the
# config anew: once `train()` has run, the checkpointer of that Trainer fails
# with "Must provide `args`".)
#
# Here `stop_after_steps` stands for the power cut. (A real one may leave a
# folder `ckpt_20.orbax-checkpoint-tmp` behind, which does no harm.)

# %%
@section("A run resumes where it stopped, if its data can")
def resumed_run():
  """With PyGrain a resumed run ends as an uninterrupted one, bit for bit."""
  cfg = get_config()
  cfg.writer = None  # No event files.
  cfg.checkpointer.save_interval_steps = 10
  in_memory = cfg.train_ds

  def stop_and_resume(cfg, data):
    """Trains to step 10, and from there to the end as a new process would."""
    cfg.stop_after_steps = 11  # One step after the checkpoint of step 10.
    stopped, _ = konfig.resolve(cfg).train()
    agree(f"{data}, steps taken before the stop", found=int(stopped.step),
          expected=11)

    cfg.stop_after_steps = FEW_STEPS
    trainer = konfig.resolve(cfg)
    agree(f"{data}, the newest checkpoint is of step",
          found=trainer.checkpointer.latest_step, expected=10)
    resumed, _ = trainer.train()
    return resumed

  # PyGrain, without and with an interruption.
  cfg.train_ds = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.train_examples(),
      batch_size=BATCH_SIZE,
      shuffle=True,
      num_workers=0)
  cfg.workdir = new_workdir("uninterrupted")
  cfg.stop_after_steps = FEW_STEPS
  uninterrupted, _ = konfig.resolve(cfg).train()
  cfg.workdir = new_workdir("resumed")
  resumed = stop_and_resume(cfg, "PyGrain")
  agree("PyGrain, steps in all", resumed=int(resumed.step),
        uninterrupted=int(uninterrupted.step))
  agree("PyGrain, distance from the uninterrupted run", rtol=0,
        found=distance(resumed.params, uninterrupted.params), expected=0.0)

  # In memory it ends elsewhere than a run without an interruption.
  cfg.train_ds = in_memory
  cfg.workdir = new_workdir("resumed_in_memory")
  resumed = stop_and_resume(cfg, "in memory")
  trainer = konfig.resolve(cfg)
  state = take_steps(trainer, trainer.init_state(), FEW_STEPS)
  far = distance(resumed.params, state.params)
  show("in memory, distance from the uninterrupted run", far)
  assert far > 1e-3, far

  # That is because from the checkpoint on it took the first batches once more.
  # `restore` fills a state with what was saved, and uses up the one that it is
  # given.
  state = trainer.checkpointer.restore(trainer.init_state(), step=10)
  state = take_steps(trainer, state, 10)
  agree("in memory, distance from a run with the first batches again", rtol=0,
        found=distance(resumed.params, state.params), expected=0.0)

# %% [markdown]
# # Part III: what a real project needs next
#
# ## Held-out data is scored along the way
#
# An *evaluator* scores the state of the moment on data of its own: every n
# steps, or once. At step 4 that is the state after four steps, before step 4.
# It has the losses, metrics and summaries of training unless it is given others
# (its fields `losses`, `metrics`, `summaries`; `metrics={}` for none), and
# writes into a folder of its own name, the key in `cfg.evals`. It sees no
# gradients. Its data is `cfg.eval_ds`, or its own `ds`.
#
# Either its data ends (`num_epochs=1`), or the evaluator must be told when to
# stop (`num_batches=5`). An `InMemoryPipeline` drops what does not fill a
# batch: of 250 examples in batches of 48 it scores 240. A `DataSource` with
# `batch_drop_remainder=False` has all of them, if the devices can share the
# last batch evenly.
#
# An evaluator can be called at any other time too:
# `trainer.evals["held_out"].evaluate(state=state, step=...)`, which is logged
# as well. And it may change the state first, with an `init_transform` of its
# own (section `loaded_weights`). For example, to score a moving average of the
# parameters instead of the last ones:
#
#     cfg.optimizer = lazy_kd.optim.named_chain(
#         adam=lazy_optax.adam(learning_rate=0.001),
#         ema=lazy_kd.optim.ema_params(decay=0.999))
#     cfg.evals = {"averaged": lazy_kd.evals.Evaluator(
#         run=lazy_kd.evals.EveryNSteps(100),
#         init_transform=lazy_kd.optim.UseEmaParams())}
#
# Evaluation can be a job of its own beside the training. Such an evaluator has
# `run=kd.evals.StandaloneEveryCheckpoint()`, and the job is `kauldron.main`
# with the same config and `--eval_names=NAME`. It scores the newest checkpoint
# whenever there is a new one, skips those that come while it is busy, and ends
# when training is complete; a run that `stop_after_steps` ended counts as that.

# %%
@section("Held-out data is scored along the way")
def evaluators():
  """Every n steps an evaluator scores the state of that moment on its data."""
  cfg = get_config()
  cfg.workdir = new_workdir("evaluators")
  cfg.stop_after_steps = 5
  cfg.checkpointer = None
  cfg.eval_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.held_out_images, batch_size=BATCH_SIZE, num_epochs=1)
  cfg.evals = {
      "held_out": lazy_kd.evals.Evaluator(run=lazy_kd.evals.EveryNSteps(2)),
      "once": lazy_kd.evals.Evaluator(run=lazy_kd.evals.Once(3), metrics={})}
  trainer = konfig.resolve(cfg)
  trainer.train()

  # By hand: the first four steps, then all 240 held-out images at once.
  state = take_steps(trainer, trainer.init_state(), 4)
  held_out = held_out_images()
  logits = logits_by_hand(jax.device_get(state.params), held_out["image"])
  loss = focal_values(logits, held_out["label"]).mean()
  recall = recall_by_hand(logits, held_out["label"])

  steps, losses = read_events(cfg.workdir, "losses/total", "held_out")
  _, recalls = read_events(cfg.workdir, "metrics/recall", "held_out")
  agree("scored at steps", found=tuple(steps), expected=(0, 2, 4))
  agree("held-out loss at step 4", logged=losses[-1], by_hand=loss)
  agree("held-out recall at step 4", logged=recalls[-1], by_hand=recall)

  # The evaluator `once`, without metrics.
  steps, _ = read_events(cfg.workdir, "losses/total", "once")
  agree("once, scored at steps", found=tuple(steps), expected=(3,))
  with raises(KeyError, "metrics/recall"):
    read_events(cfg.workdir, "metrics/recall", "once")

  # Once more, by a call.
  aux = trainer.evals["held_out"].evaluate(state=state, step=4)
  agree("held-out loss, by calling the evaluator", by_hand=loss,
        kauldron=aux.compute().loss_values["losses/total"])

# %% [markdown]
# ## The best checkpoint is kept
#
# With `best_metric_path` the checkpointer keeps those checkpoints that an
# evaluator (the first part of the path) gave the best values of a metric.
# `best_mode` is "max" unless you say "min". Losses are not looked up: to go by
# one, put it among the metrics as well. The evaluator must run whenever a
# checkpoint is saved, at step 0 too: a checkpoint without the metric makes the
# choice end in a KeyError, and so does a metric that is misspelt, but not
# before there are more checkpoints than `max_to_keep`.
# (`never_save_step_zero=True` does not help: then the first checkpoint is that
# of step 1.) `train()` still returns the last state. A resumed run goes on from
# the newest checkpoint that was kept, however old that is. If several are kept,
# `restore(state, step=step)` takes the one that you name.
#
# Two other fields: `keep_period=1000` keeps each checkpoint whose step is a
# multiple of 1000, whatever becomes of the others, and `save_on_steps=[5]`
# saves at step 5 as well.
#
# To have a run that gets worse again, the learning rate doubles at each step.
# (On a larger scale that is how one finds out which rate a model can take.)

# %%
@section("The best checkpoint is kept")
def best_checkpoint():
  """Of three checkpoints the one with the highest held-out recall is left."""
  cfg = get_config()
  cfg.workdir = new_workdir("best_checkpoint")
  cfg.stop_after_steps = 21
  cfg.log_metrics_every = 1  # All steps alike, so compiled once.
  cfg.schedules["learning_rate"] = lazy_optax.exponential_decay(
      init_value=1e-4, transition_steps=1, decay_rate=2.0)
  cfg.eval_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.held_out_images, batch_size=BATCH_SIZE, num_epochs=1)
  cfg.evals = {
      "held_out": lazy_kd.evals.Evaluator(run=lazy_kd.evals.EveryNSteps(10))}
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(
      save_interval_steps=10,
      max_to_keep=1,
      best_metric_path="held_out.recall",  # The evaluator, its metric.
      best_mode="max")
  konfig.resolve(cfg).train()

  steps, recalls = read_events(cfg.workdir, "metrics/recall", "held_out")
  for step, recall in zip(steps, recalls, strict=True):
    show(f"held-out recall at step {step}", recall)
  best = steps[np.argmax(recalls)]
  assert best != steps[-1], "the last step was the best: this proves nothing"
  checkpointer = konfig.resolve(cfg).checkpointer
  agree("checkpoints", kept=tuple(checkpointer.all_steps), best=(best,))
  agree("where a resumed run would start",
        latest_step=checkpointer.latest_step, best=best)

# %% [markdown]
# ## A work directory gives back its run
#
# `config.json` in the work directory gives back the config, and so the Trainer;
# a checkpoint beside it gives back the state. Your code must be importable as
# it was, and numbers that were references no longer follow (section
# `config_references`).
#
# Two things to mind. Read the JSON into a `ConfigDict` before you resolve it: a
# plain dict fails where two parts share a third. And let `restore` fill a state
# that was made with `skip_transforms=True`: else a run that began with the
# weights of another (the next section) would first load those once more, and
# they may be gone.
#
# If you train a changed config in the same directory, it tries to resume:
#
# - It fails if the parameters, the collections or the optimizer's state now
#   have another structure or shape; and with PyGrain after a change of
#   `num_workers`, or if the data was an `InMemoryPipeline` before.
# - Most other changes pass unnoticed.
# - Once there is a checkpoint after step 0, `config.json` is not written again.
#   It then holds the first config, not the one that was trained last.

# %%
@section("A work directory gives back its run")
def rebuilt_run():
  """`config.json` gives the Trainer, and a checkpoint beside it the state."""
  cfg = get_config()
  cfg.workdir = new_workdir("rebuilt_run")
  cfg.stop_after_steps = FEW_STEPS
  cfg.checkpointer.save_interval_steps = 10  # At step 0, and at step 10.
  trainer = konfig.resolve(cfg)
  trainer.train()

  # Later, elsewhere: all there is is a copy of the directory.
  moved = shutil.copytree(cfg.workdir, new_workdir("moved"), dirs_exist_ok=True)
  text = pathlib.Path(moved, "config.json").read_text()
  found = konfig.ConfigDict(json.loads(text))
  found.workdir = moved
  rebuilt = konfig.resolve(found)
  state = rebuilt.checkpointer.restore(
      rebuilt.init_state(skip_transforms=True))
  agree("step", restored=int(state.step), last_saved=10)

  # What it was trained with, and the same parameters as by training again.
  agree("learning rate", found=found.schedules.learning_rate.init_value,
        trained_with=LEARNING_RATE)
  again = take_steps(trainer, trainer.init_state(), 10)
  agree("distance from training again", rtol=0,
        found=distance(state.params, again.params), expected=0.0)
  agree("distance of the optimizer's states", rtol=0,
        found=distance(state.opt_state, again.opt_state), expected=0.0)

# %% [markdown]
# ## Trained weights are loaded into a new run
#
# `init_transform` changes the state before training starts; a run that resumes
# from its own checkpoint skips it. `SimpleCheckpointLoader` takes the
# parameters, and other collections of the model, from the newest checkpoint in
# the directory of another run, or from that of `step=`. With
# `load_opt_state=True` it takes the optimizer's state as well: a schedule in
# the optimizer then goes on where it was, while the step number starts at 0.
#
# Arrays with the same path, such as `params.encoder.kernel`, get what was
# saved, and must have the same shapes, or the first step fails: give a head for
# another task another name, as below. Any others stay as they were initialised,
# and nothing is said of it: an `encoder` that now stands inside a `backbone`
# gets nothing, unless an init transform of your own moves it there (section
# `own_parts`). (`PartialKauldronLoader`, which is for parts of another model,
# imports a module that orbax-checkpoint 0.12.8 lacks.)

# %%
class NewTask(nn.Module):
  """The encoder of `MLP`, and a head for a task with two classes."""

  image: kontext.Key = kontext.REQUIRED

  @nn.compact
  def __call__(self, image):
    x = image.reshape(image.shape[0], -1)
    x = nn.Dense(WIDTH, use_bias=False, name="encoder")(x)
    x = nn.relu(x)
    return {"logits": nn.Dense(2, use_bias=False, name="new_head")(x)}


def new_task_images():
  """Returns the training images with labels of a new task, 0 and 1."""
  arrays = train_images()
  return {**arrays, "label": arrays["label"] // 2}


@section("Trained weights are loaded into a new run")
def loaded_weights():
  """A new run starts with the parameters that another one saved last."""
  pretrained = get_config()
  pretrained.workdir = new_workdir("pretrained")
  pretrained.writer = None  # No event files.
  pretrained.stop_after_steps = FEW_STEPS
  pretrained.checkpointer.save_interval_steps = 10
  konfig.resolve(pretrained).train()
  trainer = konfig.resolve(pretrained)
  untrained = trainer.init_state()
  source = trainer.checkpointer.restore(trainer.init_state())
  agree("step of the saved state", found=int(source.step), expected=10)
  far = distance(source.params, untrained.params)
  show("saved parameters, distance from untrained ones", far)
  assert far > 0.01, far

  cfg = get_config()
  cfg.workdir = new_workdir("loaded_weights")
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=pretrained.workdir)
  loaded = konfig.resolve(cfg).init_state()
  agree("step of the new run", found=int(loaded.step), expected=0)
  agree("loaded parameters, distance from the saved ones", rtol=0,
        found=distance(loaded.params, source.params), expected=0.0)
  means = optax.tree_utils.tree_get(loaded.opt_state, "mu")
  saved_means = optax.tree_utils.tree_get(source.opt_state, "mu")
  far = distance(means, saved_means)
  show("Adam's mean gradients, not loaded: distance from the saved ones", far)
  assert far > 0, far

  # With the optimizer's state.
  cfg.init_transform.load_opt_state = True
  loaded = konfig.resolve(cfg).init_state()
  agree("optimizer's state, loaded: distance from the saved one", rtol=0,
        found=distance(loaded.opt_state, source.opt_state), expected=0.0)

  # With a new head. The encoder is the trained one, the head is untrained.
  cfg.init_transform.load_opt_state = False
  cfg.model = lazy_tour.NewTask(image="batch.image")
  trainer = konfig.resolve(cfg)
  loaded = trainer.init_state().params
  untrained = trainer.init_state(skip_transforms=True).params
  agree("encoder, distance from the saved one", rtol=0,
        found=distance(loaded["encoder"], source.params["encoder"]),
        expected=0.0)
  far = distance(loaded["encoder"], untrained["encoder"])
  show("encoder, distance from an untrained one", far)
  agree("new head, distance from an untrained one", rtol=0,
        found=distance(loaded["new_head"], untrained["new_head"]),
        expected=0.0)

# %% [markdown]
# ## Frozen parameters keep every bit, and the others move
#
# `partial_updates` lets an optimizer move only some of the parameters. A mask
# says which ones. It is a function from the tree of parameters to a tree of
# booleans: what is True there moves, what is False stays. With the section
# before this one, that is fine-tuning: the encoder comes from another run, and
# stays as it was there.
#
#     def get_finetuning_config():
#       cfg = get_config()
#       cfg.train_ds.loader = lazy_tour.new_task_images
#       cfg.model = lazy_tour.NewTask(image="batch.image")
#       cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
#           workdir="/where/the/first/run/is")
#       cfg.optimizer = lazy_kd.optim.partial_updates(
#           lazy_optax.adam(learning_rate=cfg.ref.schedules["learning_rate"]),
#           mask=lazy_kd.optim.select("new_head"))
#       return cfg
#
# `select(...)` makes a mask that is True for the paths it names, and
# `exclude(...)` one that is False for them. Take a model with the layers
# `encoder`, `head` and `my_head`:
#
# | mask                          | what moves                             |
# | ----------------------------- | -------------------------------------- |
# | `select("head")`              | `head`: a whole part, at any depth     |
# | `select(["head", "my_head"])` | `head` and `my_head`                   |
# | `select(".*head")`            | the same: this is a regular expression |
# | `exclude("head")`             | `encoder` and `my_head`                |
# | `exclude("hea")`              | everything, as no part has that name   |
# | `select("hea")`               | nothing, for the same reason           |
#
# The last two are no errors, and you learn of them when the training is over.
# So look before. A mask can be applied to shapes as well, and
# `trainer.state_specs` is the state with shapes in place of arrays.
#
# A name may be of several parts: `"head.kernel"`. One with a star, a bracket, a
# bar or another such sign in it is taken for a regular expression; a dot alone
# does not make it one. (Put alternatives in parentheses, `"(encoder|head)"`.
# Without them `"encoder|head"` names any part that begins with `encoder` or
# ends with `head`, so `my_head` moves too.)
#
# (Do not take `optax.masked` for it. That applies an optimizer to some of the
# parameters, and hands on the gradients of the others as their updates.)
#
# Frozen are parameters only: the running statistics of a frozen `nn.BatchNorm`
# go on moving, unless the layer is told to use them as they are
# (`use_running_average=True`).

# %%
@section("Frozen parameters keep every bit, and the others move")
def frozen_weights():
  """Only what `select` names moves; a mask shows that before training."""
  cfg = get_config()
  cfg.workdir = new_workdir("frozen_weights")
  cfg.writer = None  # No event files.
  cfg.stop_after_steps = FEW_STEPS
  cfg.log_metrics_every = 1  # All steps alike, so compiled once.
  cfg.checkpointer = None
  cfg.optimizer = lazy_kd.optim.partial_updates(
      lazy_optax.adam(learning_rate=cfg.ref.schedules["learning_rate"]),
      mask=lazy_kd.optim.select("head"))

  # What will move.
  trainer = konfig.resolve(cfg)
  mask = konfig.resolve(cfg.optimizer.mask)
  moves = mask(trainer.state_specs.params)
  agree("head", moves=moves["head"]["kernel"], expected=True)
  agree("encoder", moves=moves["encoder"]["kernel"], expected=False)

  # The table above. To a mask any tree will do.
  layers = {"encoder": 0, "head": 0, "my_head": 0}
  select = kd.optim.select
  exclude = kd.optim.exclude
  for choose, pattern, expected in (
      (select, "head", "head"),
      (select, ["head", "my_head"], "head my_head"),
      (select, ".*head", "head my_head"),
      (exclude, "head", "encoder my_head"),
      (exclude, "hea", "encoder head my_head"),
      (select, "hea", "nothing")):
    mask = choose(pattern)(layers)
    moving = [name for name in layers if mask[name]]
    agree(f"{choose.__name__}({pattern!r})",
          moves=" ".join(moving) or "nothing", expected=expected)

  # It does what the mask says.
  before = trainer.init_state()
  state, _ = trainer.train()
  encoder = distance(before.params["encoder"], state.params["encoder"])
  agree("encoder, distance moved", rtol=0, found=encoder, expected=0.0)
  head = distance(before.params["head"], state.params["head"])
  show("head, distance moved", head)
  assert head > LEARNING_RATE, head

# %% [markdown]
# ## Several small batches make one large step
#
# Where a batch does not fit into memory, `optax.MultiSteps` averages the
# gradients of several smaller ones before the optimizer moves. The optimizer of
# the config is wrapped in it, and nothing else changes. Three things to mind:
#
# - Kauldron's steps still count batches: below, eight batches of 12 make two
#   moves.
# - A schedule inside `MultiSteps` counts moves. With 400 batches, of which four
#   make a move, it has to end after 100. What is logged of it counts batches,
#   and is not the rate that was used.
# - A loss with a mask is averaged batch by batch, which is not the mean of all
#   that counts.

# %%
@section("Several small batches make one large step")
def large_batches():
  """Four batches of 12 move the parameters as one of 48 does."""
  if BATCH_SIZE // 4 % jax.device_count():
    raise unittest.SkipTest("the devices cannot share a batch of 12 evenly")
  cfg = get_config()
  cfg.train_ds.shuffle = False  # So that both see the same images.
  cfg.checkpointer = None
  cfg.log_metrics_every = 1  # All steps alike, so compiled once.
  cfg.writer = None  # No event files.
  cfg.stop_after_steps = 2
  cfg.workdir = new_workdir("large")
  large, _ = konfig.resolve(cfg).train()

  cfg.optimizer = lazy_optax.MultiSteps(cfg.optimizer, every_k_schedule=4)
  cfg.train_ds.batch_size = BATCH_SIZE // 4
  cfg.num_train_steps = 400
  # The schedule counts moves. Set, it no longer follows `num_train_steps`.
  cfg.schedules["learning_rate"].decay_steps = 400 // 4
  cfg.stop_after_steps = 8
  cfg.workdir = new_workdir("small")
  trainer = konfig.resolve(cfg)
  before = trainer.init_state()
  small, _ = trainer.train()

  agree("steps of 48", found=int(large.step), expected=2)
  agree("steps of 12", found=int(small.step), expected=8)
  agree("moves in these", found=int(small.opt_state.gradient_step), expected=2)
  show("distance moved", distance(before.params, small.params))
  far = distance(large.params, small.params)
  print(f"  distance between the two: {far:.0e}")
  assert far < 1e-6, far

# %% [markdown]
# ## One config field shards the model
#
# Every device usually holds a copy of the model and takes a share of each
# batch. `FSDPSharding` divides each array of the parameters instead, along the
# largest axis that can be divided: a device holds a part, and JAX moves what a
# computation needs. Arrays of 4 MB or less are copied all the same unless you
# say otherwise; so are scalars, and arrays of which no axis can be divided by
# the number of devices. With `params=` alone the optimizer's state is whole at
# first, and divided after one step, since it is computed from what is divided.
# A second argument divides it from the start:
#
#     cfg.sharding = lazy_kd.sharding.ShardingStrategy(
#         params=lazy_kd.sharding.FSDPSharding(),
#         opt_state=lazy_kd.sharding.FSDPSharding())
#
# A batch is divided among the devices by default, so their number must divide
# its size (JAX: `IndivisibleError`).
#
# A sharding of your own is a function from a tree of arrays to a tree of
# shardings; the one below divides the last axis of matrices. In a config it is
# named, not called. `trainer.state_specs` shows what it does before anything is
# trained.

# %%
def divide_last_axis(tree):
  """Returns shardings that divide the last axis of matrices, if they can."""
  def sharding_of(array):
    axes = ()
    if array.ndim == 2 and array.shape[-1] % jax.device_count() == 0:
      axes = (None, "devices")
    # The mesh has all devices, along one axis that is called "devices".
    return jax.sharding.NamedSharding(
        kd.sharding.DEVICES_MESH, jax.sharding.PartitionSpec(*axes))
  return jax.tree.map(sharding_of, tree)


@section("One config field shards the model")
def sharding():
  """With `FSDPSharding` a device holds a part of each array, not a copy."""
  num_devices = jax.device_count()
  if num_devices == 1 or 64 % num_devices:
    raise unittest.SkipTest(
        f"{num_devices} devices cannot share an axis of 64: start JAX with "
        "JAX_NUM_CPU_DEVICES=2")

  cfg = get_config()
  cfg.stop_after_steps = FEW_STEPS
  cfg.log_metrics_every = 1  # All steps alike, so compiled once.
  cfg.writer = None  # No event files.
  cfg.workdir = new_workdir("copied")
  cfg.checkpointer = None
  copied, _ = konfig.resolve(cfg).train()

  # Our arrays are far smaller than 4 MB.
  divide = lazy_kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  cfg.sharding = lazy_kd.sharding.ShardingStrategy(
      params=divide, opt_state=divide)
  cfg.workdir = new_workdir("divided")
  divided, _ = konfig.resolve(cfg).train()

  def shape_on_each_device(array):
    shards = array.addressable_shards
    assert {shard.device for shard in shards} == set(jax.devices())
    (shape,) = {shard.data.shape for shard in shards}
    return shape
  kernel = copied.params["encoder"]["kernel"]
  agree("copied, shape on a device", found=shape_on_each_device(kernel),
        expected=(64, WIDTH))
  kernel = divided.params["encoder"]["kernel"]
  agree("divided, shape on a device", found=shape_on_each_device(kernel),
        expected=(64 // num_devices, WIDTH))
  untrained = konfig.resolve(cfg).init_state()
  means = optax.tree_utils.tree_get(untrained.opt_state, "mu")
  agree("divided, shape of the optimizer's state at the start",
        found=shape_on_each_device(means["encoder"]["kernel"]),
        expected=(64 // num_devices, WIDTH))

  # It is the same training, to rounding.
  show("how far training moved the parameters", distance(
      jax.device_get(untrained.params), jax.device_get(divided.params)))
  far = distance(jax.device_get(copied.params), jax.device_get(divided.params))
  print(f"  distance between copied and divided: {far:.0e}")
  assert far < 1e-6, far

  # The sharding of our own, seen without training.
  cfg.sharding = lazy_kd.sharding.ShardingStrategy(
      params=lazy_tour.divide_last_axis)
  kernel = konfig.resolve(cfg).state_specs.params["encoder"]["kernel"]
  agree("our own, shape on a device",
        found=kernel.sharding.shard_shape(kernel.shape),
        expected=(64, WIDTH // num_devices))

  # The default leaves 4 MB whole, that is 2**20 numbers of 4 bytes.
  default = kd.sharding.FSDPSharding()
  small = default(np.zeros(2**20, np.float32))
  large = default(np.zeros(2**21, np.float32))
  show("4 MB is copied to every device", small.is_fully_replicated)
  show("8 MB is copied to every device", large.is_fully_replicated)
  assert small.is_fully_replicated
  assert not large.is_fully_replicated

# %% [markdown]
# ## Each of several processes yields its part of a batch
#
# A model or a batch that is too large for one machine is trained by several.
# Each machine runs the same script, in a process of its own, and each process
# calls, before anything else of JAX:
#
#     jax.distributed.initialize()
#
# (`python -m kauldron.main` does not; write a script that does, and then calls
# `konfig.resolve(cfg).train()`.)
#
# From then on `jax.devices()` lists the devices of all processes, and what you
# have read about sharding is true of them. Kauldron builds on that; nothing in
# a config says how many processes there are. Three things must be the same for
# all of them: the program, the config, and `workdir`, which must be on a disk
# that all can reach. All write their parts of a checkpoint there. Only process
# 0 writes `config.json` and the event files.
#
# Slurm, Open MPI and Kubernetes (with `jax[k8s]`) tell JAX which process is
# which, and so do TPU machines. Elsewhere you tell it, on each machine with
# another number:
#
#     jax.distributed.initialize("10.0.0.1:8476", num_processes=2, process_id=0)
#
# The address is that of process 0. Under Slurm and Open MPI a process takes one
# GPU: start as many as a machine has, or name them with
# `local_device_ids=[0, 1, 2, 3]`.
#
# If a process dies, the others end with an error, because they cannot go on
# without it; start all of them again, and the run goes on from its last
# checkpoint. A process that is silent counts as dead after 100 seconds, or
# after `heartbeat_timeout_seconds=`.
#
# Two things differ from one process, and both are about data:
#
# - `InMemoryPipeline` draws the same batches as one process would, and each
#   process yields its part of them. PyGrain deals the examples out to the
#   processes first, so that its batches are others, and so is the result.
# - PyGrain saves its position in a file for each process. So a run of two
#   processes cannot go on with one: "ds_iter/process_0-of-1.json does not
#   exist". With `InMemoryPipeline` a run can go on with more processes, or with
#   fewer.
#
# The section below holds for any number of processes, and you probably run it
# with one. So it also asks what each of two processes would get. Kauldron calls
# `jax.process_index()` and `jax.process_count()` to know; a block in which
# these return 1 and 2 shows what process 1 of 2 gets. To see two real
# processes, start the tour twice, in two terminals, with 0 and with 1 at the
# end:
#
#     python kauldron_tour.py --only several_processes --workdir out \
#         --distributed localhost:8476 2 0
#
# Then each has half of the batch, and the loss is still the mean of all 48. The
# first terminal then shows, among others, these lines:
#
#     this process => number 0 of 2
#     examples in this process => 24
#     examples in all: found 48, expected 48
#     loss at step 0: kauldron 1.058, by hand 1.058
#
# (The tour's own tests start two, and compare a whole training with one by a
# single process.)

# %%
@section("Each of several processes yields its part of a batch")
def several_processes():
  """A process has its part of a batch; the loss is the mean of the whole."""
  number = jax.process_index()
  count = jax.process_count()
  show("this process", f"number {number} of {count}")
  show("its devices", jax.local_device_count())
  show("all devices", jax.device_count())

  # One step, as `train()` makes it.
  cfg = get_config()
  cfg.workdir = new_workdir("several_processes")
  cfg.writer = None  # No event files.
  trainer = konfig.resolve(cfg)
  state = trainer.init_state()
  params = jax.device_get(state.params)
  batch = next(iter(trainer.train_ds))
  on_devices = kd.sharding.device_put(batch, trainer.sharding.batch)
  _, aux = trainer.trainstep.step(state, on_devices, return_losses=True)
  loss = aux.compute().loss_values["losses/total"]

  # The pipeline yields this process's part. On the devices it is one batch.
  # With one process this is trivial, and so is the loss.
  show("examples in this process", len(batch["label"]))
  agree("examples in all", found=len(on_devices["label"]), expected=BATCH_SIZE)

  # By hand, with the parts of all processes.
  from jax.experimental import multihost_utils
  whole = multihost_utils.process_allgather(batch, tiled=True)
  logits = logits_by_hand(params, whole["image"])
  agree("loss at step 0", kauldron=loss,
        by_hand=focal_values(logits, whole["label"]).mean())

  # What each of two processes would get: one half of the same batch.
  def digits(label):
    return "".join(map(str, label[:, 0]))
  show("labels of the whole batch", digits(whole["label"]))
  halves = np.split(whole["label"], 2)
  for index in (0, 1):
    with mock.patch("jax.process_count", return_value=2), (
        mock.patch("jax.process_index", return_value=index)):
      part = next(iter(trainer.train_ds))
    agree(f"labels if JAX says process {index} of 2",
          found=digits(part["label"]), half=digits(halves[index]))

  # PyGrain's position: a file for each process.
  cfg.train_ds = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.train_examples(),
      batch_size=BATCH_SIZE,
      shuffle=True,
      num_workers=0)
  cfg.stop_after_steps = 1  # Step 0, before which a checkpoint is saved.
  konfig.resolve(cfg).train()
  saved = pathlib.Path(cfg.workdir, "checkpoints", "ckpt_0", "ds_iter")
  positions = sorted(path.name for path in saved.glob("*.json"))
  agree("PyGrain's positions", found=tuple(positions), expected=tuple(
      sorted(f"process_{i}-of-{count}.json" for i in range(count))))

# %% [markdown]
# ## A model is exported to where there is no Kauldron
#
# With an exporter, `train()` writes the computation of the model as a file that
# JAX alone can run, without flax and without your code. The parameters are not
# in it; they are an argument. Without `cfg.exporter` nothing is exported.
#
# `train()` exports before its first step, and the model as it is in training,
# with dropout for one. To export it for use, call the exporter yourself with
# `is_training=False`, as below. Both would write to the same file, so if you
# also train with this exporter, export after `train()`, which would overwrite
# yours.
#
# The file runs on as many devices as the process had that exported it, of the
# kinds that `platforms` names. For one device, export in a process that has
# one. (The tour has two, for section `sharding`, and so must the program
# below.) The size of the batch stays open, for which the model must write
# `image.shape[0]` where it might have said `len(image)`. Do not export a model
# that has other collections than parameters, such as the running statistics of
# `nn.BatchNorm`: in Kauldron 1.4.2 to 1.4.4 the file has those of an untrained
# model, and says nothing. (If you use `kd.export` before anything else has
# imported `kd.train`, import that first: the import is circular.)
#
# Here is the program that uses the file. It needs JAX and NumPy, and is run in
# a process of its own. `exported.call` takes the parameters, a key for models
# that draw random numbers, and the arguments of the model under their names. It
# returns a dict with what the model returned, as `preds`, and what each layer
# returned, as `interms`.

# %%
USER_FILE = '''
import pathlib
import pickle
import sys

import jax
from jax import export
import numpy as np

folder = pathlib.Path(sys.argv[1])
exported = export.deserialize((folder / "model.jax_exported").read_bytes())
params = pickle.loads((folder / "params.pickle").read_bytes())
image = np.load(folder / "image.npy")

# A CPU can pose as several devices. All of them must have the parameters.
jax.config.update("jax_num_cpu_devices", exported.nr_devices)
mesh = jax.make_mesh((exported.nr_devices,), ("devices",))
on_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
params = jax.device_put(params, on_all)

outputs = exported.call(params=params, key=jax.random.PRNGKey(0), image=image)
np.save(folder / "logits.npy", outputs["preds"]["logits"])
print(*[name for name in ("kauldron", "flax", "jax") if name in sys.modules])
'''


@section("A model is exported to where there is no Kauldron")
def exported_model():
  """The exported file predicts what the model predicts."""
  cfg = get_config()
  cfg.workdir = new_workdir("exported_model")
  cfg.exporter = lazy_kd.export.JaxModelExporter(
      name="model", platforms=["cpu"])
  trainer = konfig.resolve(cfg)
  state = trainer.init_state()  # Yours comes from `train()` or a checkpoint.
  trainer.exporter.export(
      model=trainer.model, state=state,
      element_spec=trainer.train_ds.element_spec, is_training=False)

  # The parameters and the images go into files of their own.
  folder = pathlib.Path(cfg.workdir)
  params = jax.device_get(state.params)  # Dicts of NumPy arrays.
  (folder / "params.pickle").write_bytes(pickle.dumps(params))
  image = held_out_images()["image"][:7]  # Not the size of a batch.
  np.save(folder / "image.npy", image)
  show("files", " ".join(sorted(os.listdir(folder))))

  # Another process, on the CPU, for which the model was exported.
  process = subprocess.run(
      [sys.executable, "-c", USER_FILE, folder], check=True,
      capture_output=True, text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu"})
  agree("imported there, of jax, flax and kauldron",
        found=process.stdout.strip(), expected="jax")

  agree("logits", exported=np.load(folder / "logits.npy"),
        by_hand=logits_by_hand(params, image))

# %% [markdown]
# ## Flags and random keys come from the Trainer
#
# In flax, `apply` is given the keys for random numbers, and a layer like
# dropout must be told whether the model is being trained. A Trainer sees to
# both.
#
# The flag is a *train property*: `is_training = kd.nn.train_property()` in the
# body of any module of yours, without an annotation. `self.is_training` is then
# true in training and false in evaluation. `kd.nn.Dropout` has one itself; to a
# layer of flax you hand it on, as section `model_state` does. If you call
# `apply` or `init` yourself, you say it there, by an argument that Kauldron
# adds to those of every flax module: `is_training_property=False`. Without it,
# a module that asks raises an error.
#
# Keys come in named *streams*; a module gets one with `self.make_rng("noise")`.
# A key is made from the seed, the stream's name, whether it is for training or
# evaluation, and a number: in training the step, in evaluation the number of
# the batch, from 0 on. So each step has noise of its own, the same run has the
# same noise again, and every evaluation has the same noise. (From this key flax
# makes one for each module that asks, and each time that it asks.) The section
# prints some of these keys; a key is two numbers.
#
# Two streams are there in training: `dropout`, which `nn.Dropout` uses, and
# `default`, for whatever you like. An evaluator has only the streams that were
# declared with `eval=True`. Below a stream of our own is added, `noise`, which
# exists in both.

# %%
class Noisy(nn.Module):
  """Returns random numbers, what dropout makes of ones, and the flag."""

  image: kontext.Key = kontext.REQUIRED
  is_training = kd.nn.train_property()  # An annotation would make it a field.

  @nn.compact
  def __call__(self, image):
    noise = jax.random.uniform(self.make_rng("noise"), image.shape)
    dropped = kd.nn.Dropout(rate=0.25)(jnp.ones(image.shape))
    flag = jnp.asarray(float(self.is_training))
    return {"noise": noise, "dropped": dropped, "flag": flag}


@section("Flags and random keys come from the Trainer")
def random_streams():
  """Trainer and evaluator set the flag, and make keys that can be remade."""
  cfg = get_config()
  cfg.workdir = new_workdir("random_streams")
  cfg.model = lazy_tour.Noisy(image="batch.image")
  cfg.rng_streams = lazy_kd.train.RngStreams(  # Added to the other two.
      [lazy_kd.train.RngStream("noise", eval=True)])
  cfg.train_losses = {}  # Nothing is learnt here.
  cfg.train_metrics = {}
  for name in ("flag", "dropped", "noise"):  # The mean: a loss as a metric.
    cfg.train_metrics[name] = lazy_kd.losses.Value(values=f"preds.{name}")
  cfg.evals = {"here": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.Once(0), ds=cfg.train_ds, num_batches=2)}
  trainer = konfig.resolve(cfg)
  streams = trainer.rng_streams
  show("streams in training", ", ".join(sorted(streams.train_rngs(0))))
  agree("streams in evaluation", found=", ".join(streams.eval_rngs(0)),
        expected="noise")

  # What goes into a key: if one of these four is another, so is the key.
  cfg.seed = SEED + 1
  other_streams = konfig.resolve(cfg).rng_streams
  keys = {
      "noise, step 0": streams.train_rngs(0)["noise"],
      "dropout, step 0": streams.train_rngs(0)["dropout"],
      "noise, step 1": streams.train_rngs(1)["noise"],
      "dropout, step 1": streams.train_rngs(1)["dropout"],
      "noise, batch 0 of an evaluation": streams.eval_rngs(0)["noise"],
      "noise, batch 1 of an evaluation": streams.eval_rngs(1)["noise"],
      "noise, step 0, another seed": other_streams.train_rngs(0)["noise"],
  }
  numbers = {}
  for name, key in keys.items():
    numbers[name] = tuple(jax.random.key_data(key).tolist())
    print(f"  key of {name}: {numbers[name]}")
  assert len(set(numbers.values())) == len(keys), numbers

  # What an evaluator sees, and what a training step sees.
  state = trainer.init_state()
  evaluated = trainer.evals["here"].evaluate(state=state, step=0)
  eval_means = evaluated.compute().metric_values
  evaluated = trainer.evals["here"].evaluate(state=state, step=1)
  next_eval_means = evaluated.compute().metric_values
  (batch,) = trainer.train_ds.take(1).device_put(trainer.sharding.batch)
  _, aux = trainer.trainstep.step(
      state, batch, return_losses=True, return_metrics=True)
  train_means = aux.compute().metric_values

  # The flag, and what dropout does with it: in evaluation nothing.
  agree("flag in evaluation", found=eval_means["metrics/flag"], expected=0.0)
  agree("flag in training", found=train_means["metrics/flag"], expected=1.0)
  agree("dropout of ones in evaluation", mean=eval_means["metrics/dropped"],
        expected=1.0)

  # With `apply`. The streams give a key for each name, of a step or of a batch.
  def apply(rngs, is_training):
    preds = trainer.model.apply(
        {}, batch["image"], rngs=rngs, is_training_property=is_training)
    return jax.device_get(preds)
  step_0 = apply(streams.train_rngs(0), is_training=True)
  agree("mean noise at step 0", trained=train_means["metrics/noise"],
        by_apply=step_0["noise"].mean())
  agree("mean of what dropout made of ones at step 0",
        rtol=1e-5,  # JAX and NumPy add up 3,072 numbers in another order.
        trained=train_means["metrics/dropped"],
        by_apply=step_0["dropped"].mean())

  # The evaluator had two batches. Its next evaluation has the same noise.
  eval_0 = apply(streams.eval_rngs(0), is_training=False)
  eval_1 = apply(streams.eval_rngs(1), is_training=False)
  agree("mean noise in evaluation", evaluated=eval_means["metrics/noise"],
        by_apply=np.mean([eval_0["noise"], eval_1["noise"]]))
  agree("mean noise of another evaluation", rtol=0,
        found=next_eval_means["metrics/noise"],
        as_before=eval_means["metrics/noise"])

  # In training a quarter is dropped, and the rest scaled up.
  kept = (step_0["dropped"] > 0).mean()
  show("share that dropout kept", float(kept))
  np.testing.assert_allclose(kept, 0.75, atol=0.03)
  agree("value of a 1 that was kept", found=step_0["dropped"].max(),
        expected=1 / 0.75)

# %% [markdown]
# ## A model with state has collections
#
# Flax keeps what a model changes by itself, such as the running statistics of
# `nn.BatchNorm`, in collections other than `params`. Kauldron carries them from
# step to step in `state.collections`, where a checkpoint finds them and a key
# too: `collections.batch_stats.norm.mean`. To use the trained model you pass
# them along with the parameters.

# %%
class Normalized(nn.Module):
  """A linear classifier of normalised pixels."""

  image: kontext.Key = kontext.REQUIRED
  is_training = kd.nn.train_property()

  @nn.compact
  def __call__(self, image):
    x = image.reshape(image.shape[0], -1)
    x = nn.BatchNorm(use_running_average=not self.is_training, momentum=0.9,
                     name="norm")(x)
    return {"logits": nn.Dense(NUM_CLASSES, use_bias=False, name="head")(x)}


@section("A model with state has collections")
def model_state():
  """BatchNorm's statistics are in `state.collections`, as NumPy finds them."""
  cfg = get_config()
  cfg.workdir = new_workdir("model_state")
  cfg.model = lazy_tour.Normalized(image="batch.image")
  cfg.writer = None  # No event files.
  cfg.stop_after_steps = FEW_STEPS
  cfg.log_metrics_every = 1  # All steps alike, so compiled once.
  cfg.checkpointer = None
  trainer = konfig.resolve(cfg)
  state, _ = trainer.train()
  stats = jax.device_get(state.collections["batch_stats"]["norm"])

  # A key finds them, too.
  key = "collections.batch_stats.norm.mean"
  specs = kontext.flatten_with_path(trainer.context_specs)
  agree(key, shape=specs[key].shape, expected=(64,))

  # By hand: at each step a tenth of the new value comes in.
  mean = np.zeros(64)
  variance = np.ones(64)
  for batch in trainer.train_ds.take(FEW_STEPS):
    x = batch["image"].reshape(BATCH_SIZE, 64)
    mean = 0.9 * mean + 0.1 * x.mean(axis=0)
    variance = 0.9 * variance + 0.1 * x.var(axis=0)
  agree("mean of the pixels", collected=stats["mean"], by_hand=mean)
  agree("variance of the pixels", collected=stats["var"], by_hand=variance)

  # Predicting: parameters and collections, and no training.
  image = held_out_images()["image"][:5]
  apply = jax.jit(functools.partial(
      trainer.model.apply, is_training_property=False))
  preds = apply({"params": state.params, **state.collections}, image)
  params = jax.device_get(state.params)
  x = image.reshape(5, 64) - stats["mean"]
  x = x / np.sqrt(stats["var"] + 1e-5)  # BatchNorm's epsilon.
  x = x * params["norm"]["scale"] + params["norm"]["bias"]
  by_hand = x @ params["head"]["kernel"]
  agree("logits", predicted=preds["logits"], by_hand=by_hand)

# %% [markdown]
# ## Your own part of every kind
#
# Losses, metrics, models and transforms of your own you have seen. The rest:
#
# | part           | base class               | method                         |
# | -------------- | ------------------------ | ------------------------------ |
# | summary        | `kd.metrics.Metric`      | `get_state(...)` -> state      |
# | init transform | `kd.ckpts.InitTransform` | `transform(state)` -> state    |
# | evaluator      | `kd.evals.EvaluatorBase` | `evaluate(state, step)` -> any |
# | training step  | `kd.train.TrainStep`     | `_step(state, batch)` -> pair  |
#
# Here is one of each, and then one short training in which all four are at
# work. Kauldron's parts are frozen dataclasses, and so are ours, except for the
# evaluator: do not decorate one, its base class has made it a dataclass.
#
# A **summary** is a metric that stands in `cfg.train_summaries`. The fields of
# its state collect rather than add: `concat_field` puts the arrays of all
# batches together, and `truncate_field` keeps only the first few. How many is
# said by the path `num_field`, which starts at the state. `parent` is the
# metric that made the state, by calling `self.State(...)`; so the path below
# leads to a field of the metric. `finalize` makes one NumPy array of what was
# collected, and `compute` gets that.

# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelImages(kd.metrics.Metric):
  """Summary: the weights of the first hidden units, as images."""

  kernel: kontext.Key = kontext.REQUIRED
  num_images: int = 3

  @flax.struct.dataclass
  class State(kd.metrics.AutoState["KernelImages"]):
    images: Float["n 8 8 1"] = kd.metrics.truncate_field(
        num_field="parent.num_images")

    def compute(self):
      return np.clip(self.images + 0.5, 0, 1)  # An image is in [0, 1].

  @kt.typechecked
  def get_state(self, kernel: Float["64 n"]) -> State:
    return self.State(images=kernel.T.reshape(-1, 8, 8, 1))

# %% [markdown]
# An **init transform** gets the state before training starts, and returns
# another one (section `loaded_weights`).

# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleParams(kd.ckpts.InitTransform):
  """Multiplies all parameters by a number before training starts."""

  by: float

  def transform(self, state):
    scaled = jax.tree.map(lambda param: param * self.by, state.params)
    return state.replace(params=scaled)

# %% [markdown]
# An **evaluator** has a `writer`, for the event files in its folder. What
# `evaluate` returns goes to whoever calls it; `train()` does not look at it.
# Inside `train()` JAX refuses to move arrays between host and device unasked,
# so an evaluator fetches what it needs with `jax.device_get` and goes on in
# NumPy.

# %%
class LargestWeight(kd.evals.EvaluatorBase):
  """Writes the largest weight of each layer."""

  def evaluate(self, state, step):
    params = jax.device_get(state.params)
    largest = {name: float(np.abs(layer["kernel"]).max())
               for name, layer in params.items()}
    self.writer.write_scalars(step=step, scalars=largest)

# %% [markdown]
# A **training step** is the method `_step`, which is meant to be overridden, in
# spite of its name. It returns the new state and the context, where
# `context.loss_total` is what was minimised. `jax.jit` takes the object as a
# static argument and hashes it at each call; with `eq=False`, as in the base
# class, by its identity. Otherwise it would hash all fields, model and
# optimizer among them.
#
# The one below guards the whole state against batches whose loss is not finite.
# (optax has `apply_if_finite`. That looks at the gradients, and guards nothing
# but the parameters and the optimizer.)

# %%
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SkipBadBatches(kd.train.TrainStep):
  """A batch whose loss is not finite changes nothing but the step number."""

  def _step(self, state, batch):
    new_state, context = super()._step(state, batch)
    is_good = jnp.isfinite(context.loss_total)
    kept = jax.tree.map(lambda new, old: jnp.where(is_good, new, old),
                        new_state, state)
    return kept.replace(step=new_state.step), context

# %% [markdown]
# For the training below there is data with a NaN in its second batch. The
# Trainer is resolved twice, without and with our init transform and step.

# %%
def spoilt_images():
  """Returns the training images, in the second batch of 48 a NaN."""
  arrays = train_images()
  arrays["image"][BATCH_SIZE] = np.nan
  return arrays


@section("Your own part of every kind")
def own_parts():
  """A summary, an init transform, an evaluator and a step, each at work."""
  cfg = get_config()
  cfg.workdir = new_workdir("own_parts")
  cfg.stop_after_steps = 2  # The second batch has the NaN.
  cfg.log_metrics_every = 1
  cfg.train_ds.loader = lazy_tour.spoilt_images
  cfg.train_ds.shuffle = False
  cfg.checkpointer = None
  cfg.train_summaries = {
      "kernels": lazy_tour.KernelImages(kernel="params.encoder.kernel")}
  cfg.evals = {
      "weights": lazy_tour.LargestWeight(run=lazy_kd.evals.EveryNSteps(1))}

  usual_trainer = konfig.resolve(cfg)
  cfg.init_transform = lazy_tour.ScaleParams(by=0.5)
  cfg.trainstep = lazy_tour.SkipBadBatches()
  trainer = konfig.resolve(cfg)

  # The init transform halves the parameters.
  usual = jax.device_get(usual_trainer.init_state())
  initial = jax.device_get(trainer.init_state())
  agree("first weight", found=initial.params["head"]["kernel"][0, 0],
        half_of_the_usual=usual.params["head"]["kernel"][0, 0] / 2)

  # With our own step, the batch with the NaN changes nothing.
  state, aux = trainer.train()
  loss = aux.compute().loss_values["losses/total"]
  show("loss of the second batch", str(loss))
  agree("steps taken", found=int(state.step), expected=2)
  expected = take_steps(usual_trainer, initial, 1)  # `initial` is NumPy: kept.
  agree("afterwards, distance from one usual step on the good batch", rtol=0,
        found=distance(state.params, expected.params), expected=0.0)
  agree("the same of the optimizer's state", rtol=0,
        found=distance(state.opt_state, expected.opt_state), expected=0.0)

  # What summary and evaluator wrote.
  _, images = read_events(cfg.workdir, "summaries/kernels")
  width, height, *files = images[0]
  agree("images at step 0", found=len(files), expected=3)
  from matplotlib import image
  picture = image.imread(io.BytesIO(files[0]))
  weights = initial.params["encoder"]["kernel"][:, 0].reshape(8, 8)
  agree("first image, to one of 256 levels", rtol=0.01, written=picture,
        by_hand=np.clip(weights + 0.5, 0, 1))

  # The tag is what the evaluator chose, the folder has the evaluator's name.
  steps, largest = read_events(cfg.workdir, "head", "weights")
  agree("evaluated at steps", found=tuple(steps), expected=(0, 1))
  agree("largest weight of the head at step 0", written=largest[0],
        by_hand=np.abs(initial.params["head"]["kernel"]).max())

# %% [markdown]
# ## An experiment of your own
#
# To end with, a whole experiment on another problem, to copy and start from. It
# uses nothing of Kauldron that was not told above. Given a noisy signal, the
# model is to say two things about it: its frequency, and its amplitude. But the
# amplitude was measured for some of the signals only. So there are two heads
# and two losses, one of them masked, and R squared as a metric, which is no
# mean of batches.
#
# To make a project of it, copy it into two files. `project.py` is the next
# cell, below these lines:
#
#     import dataclasses
#
#     import flax
#     from flax import linen as nn
#     import jax.numpy as jnp
#     from kauldron import kd, kontext
#     from kauldron import ktyping as kt
#     from kauldron.ktyping import Float
#     import numpy as np
#
#     SEED = 0

# %%
NUM_SAMPLES = 32  # Of a signal.


def signals(num_signals, seed):
  """Returns noisy sine waves and what is known of them.

  signal (n, 32, 1); frequency, in periods of a signal, amplitude, and
  is_measured, which is 1 where the amplitude counts and else 0, each (n, 1).
  """
  rng = np.random.default_rng(seed)
  frequency = rng.uniform(1, 3, size=(num_signals, 1))
  amplitude = rng.uniform(0.5, 1.5, size=(num_signals, 1))
  phase = rng.uniform(0, 2 * np.pi, size=(num_signals, 1))
  is_measured = rng.integers(2, size=(num_signals, 1))

  time = np.arange(NUM_SAMPLES) / NUM_SAMPLES
  signal = amplitude * np.sin(2 * np.pi * frequency * time + phase)
  signal += rng.normal(scale=0.1, size=signal.shape)
  # Where nothing was measured there is a number that must not count.
  amplitude = np.where(is_measured == 1, amplitude, -1.0)
  arrays = {"signal": signal[..., None], "frequency": frequency,
            "amplitude": amplitude, "is_measured": is_measured}
  return {name: array.astype(np.float32) for name, array in arrays.items()}


def train_signals():
  """Returns the signals one by one, for PyGrain."""
  arrays = signals(2048, seed=SEED)
  return [{name: array[i] for name, array in arrays.items()}
          for i in range(2048)]


def test_signals():
  """Returns other signals, for evaluation."""
  return signals(480, seed=SEED + 1)


class SignalModel(nn.Module):
  """A convolution, a dense layer, and a head for each of the answers."""

  signal: kontext.Key = kontext.REQUIRED
  features: int = 16

  @nn.compact
  def __call__(self, signal):
    x = nn.Conv(self.features, kernel_size=(9,), strides=(2,),
                name="conv")(signal)
    x = nn.relu(x)
    x = x.reshape(x.shape[0], -1)
    x = nn.relu(nn.Dense(32, name="encoder")(x))
    return {"frequency": nn.Dense(1, name="frequency_head")(x),
            "amplitude": nn.Dense(1, name="amplitude_head")(x)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RSquared(kd.metrics.Metric):
  """1 - (mean squared error) / (variance of the targets): 1 is perfect, 0 is no
  better than always to say the mean."""

  preds: kontext.Key = kontext.REQUIRED
  targets: kontext.Key = kontext.REQUIRED
  mask: kontext.Key | None = None

  @flax.struct.dataclass
  class State(kd.metrics.AutoState["RSquared"]):
    """Sums over the examples that count."""

    count: Float[""] = kd.metrics.sum_field()
    target: Float[""] = kd.metrics.sum_field()
    squared_target: Float[""] = kd.metrics.sum_field()
    squared_error: Float[""] = kd.metrics.sum_field()

    def compute(self):
      mean = self.target / self.count
      variance = self.squared_target / self.count - mean ** 2
      return float(1 - self.squared_error / self.count / variance)

  @kt.typechecked
  def get_state(self, preds: Float["*b 1"], targets: Float["*b 1"],
                mask: Float["*b 1"] | None = None) -> State:
    if mask is None:
      mask = jnp.ones(targets.shape)
    return self.State(
        count=mask.sum(),
        target=(mask * targets).sum(),
        squared_target=(mask * targets ** 2).sum(),
        squared_error=(mask * (preds - targets) ** 2).sum())

# %% [markdown]
# Then the config. In a project it has a file of its own,
# `configs/my_experiment.py`, where the function is called `get_config`, and
# `lazy_kd`, `lazy_optax` and `lazy_tour` are `kd`, `optax` and `project`. It
# begins with:
#
#     from kauldron import konfig
#
#     with konfig.imports():
#       from kauldron import kd
#       import optax
#       import project
#
#     SEED = 0

# %%
def get_signal_config():
  """Returns the config of the experiment; its workdir is still to be set."""
  cfg = lazy_kd.train.Trainer()
  cfg.seed = SEED
  cfg.train_ds = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.train_signals(),
      batch_size=48,
      shuffle=True,
      num_workers=0)
  cfg.model = lazy_tour.SignalModel(signal="batch.signal")
  cfg.train_losses = {
      "frequency": lazy_kd.losses.L2(
          preds="preds.frequency", targets="batch.frequency"),
      "amplitude": lazy_kd.losses.L2(
          preds="preds.amplitude", targets="batch.amplitude",
          mask="batch.is_measured", weight=4.0)}  # Its errors are smaller.
  cfg.train_metrics = {
      "frequency": lazy_tour.RSquared(
          preds="preds.frequency", targets="batch.frequency"),
      "amplitude": lazy_tour.RSquared(
          preds="preds.amplitude", targets="batch.amplitude",
          mask="batch.is_measured")}
  cfg.train_summaries = {
      "encoder": lazy_kd.summaries.HistogramSummary(
          tensor="interms.encoder.__call__[0]")}

  cfg.num_train_steps = 200
  cfg.schedules = {
      "learning_rate": lazy_optax.cosine_decay_schedule(
          init_value=0.02, decay_steps=cfg.ref.num_train_steps)}
  cfg.optimizer = lazy_optax.adam(
      learning_rate=cfg.ref.schedules["learning_rate"])

  cfg.eval_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.test_signals, batch_size=48, num_epochs=1)
  cfg.evals = {
      "test": lazy_kd.evals.Evaluator(run=lazy_kd.evals.EveryNSteps(50))}
  cfg.log_metrics_every = 50
  cfg.log_summaries_every = 50
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(save_interval_steps=50)
  cfg.profiler = None
  return cfg

# %% [markdown]
# That is all there is to write. This command trains it, as two files:
#
#     python -m kauldron.main --cfg=configs/my_experiment.py \
#       --cfg.workdir=/absolute/path/to/a/new/folder
#
# What follows is what you would do with it in a notebook: look whether the keys
# are right, train, stop, resume, and evaluate. (`read_events` is defined in
# section `real_trainer`.)

# %%
@section("An experiment of your own")
def own_experiment():
  """Another problem: trained, interrupted, resumed and evaluated."""
  cfg = get_signal_config()
  cfg.workdir = new_workdir("own_experiment")
  cfg.stop_after_steps = 101  # Half of it, to begin with.
  trainer = konfig.resolve(cfg)

  # Are all keys right? This takes no step.
  paths = kontext.flatten_with_path(trainer.context_specs)
  for path in ("batch.signal", "interms.encoder.__call__[0]",
               "preds.amplitude"):
    show(path, f"{paths[path].dtype}{list(paths[path].shape)}")

  # The first half, then the other. Step 100, the one after the checkpoint, is
  # taken in both, and logged twice.
  trainer.train()
  cfg.stop_after_steps = None  # The default: to the end.
  trainer = konfig.resolve(cfg)
  agree("the newest checkpoint is of step",
        found=trainer.checkpointer.latest_step, expected=100)
  state, _ = trainer.train()

  # What the evaluator wrote on the way.
  for name in ("frequency", "amplitude"):
    steps, values = read_events(cfg.workdir, f"metrics/{name}", "test")
    by_step = dict(zip(steps, values, strict=True))  # Step 100 is there twice.
    for step, value in by_step.items():
      show(f"R squared of the {name} at step {step}", value)
    assert values[-1] > 0.8, values

  # The same by hand, for the state at the end.
  aux = trainer.evals["test"].evaluate(state=state, step=int(state.step))
  values = aux.compute()
  test = test_signals()
  apply = jax.jit(trainer.model.apply)
  # A model with dropout would want `is_training_property=False` here.
  preds = jax.device_get(apply({"params": state.params}, test["signal"]))
  counts = test["is_measured"] == 1
  targets = test["amplitude"][counts]
  errors = preds["amplitude"][counts] - targets
  agree("R squared of the amplitude",
        kauldron=values.metric_values["metrics/amplitude"],
        by_hand=1 - np.mean(errors ** 2) / targets.var())
  losses = values.loss_values
  agree("loss of the amplitude, with its weight of 4",
        kauldron=losses["losses/amplitude"], by_hand=4 * np.mean(errors ** 2))
  agree("what is minimised", total=losses["losses/total"],
        sum_of_both=losses["losses/frequency"] + losses["losses/amplitude"])

# %% [markdown]
# From here: change one line of the config and train again (section `sweep`),
# keep the best checkpoint (`best_checkpoint`), freeze a head
# (`frozen_weights`). Kauldron's documentation is at kauldron.readthedocs.io,
# its source on GitHub in google-research/kauldron.
#
# Some of what the documentation teaches does not work in a published Kauldron
# (1.4.2 and 1.4.4): `kd.data.tf`, most of `kd.contrib.data`,
# `kd.train.Trainer.eval_only()`, and the command `kauldron`, which does not
# start. The other parts of `kd.contrib` must be imported before they are used:
# `import kauldron.contrib.losses`. What the command `kauldron` offers can be
# called from Python: `kd.cli.config.Show(cfg=cfg)()` prints a config. If
# `workdir` is set, `kd.cli.config.Resolve` also builds the Trainer,
# `kd.cli.data.ElementSpec` prints the shapes of a batch, and
# `kauldron.cli.run.EvalShape` those of a training step; the module
# `kauldron.cli.run` must be imported for it.

# %% The command line (skip this) jupyter={"source_hidden": true}
def stop(sentence):
  """Ends a run that makes no sense: one sentence, exit status 2."""
  print(f"kauldron_tour: {sentence}", file=sys.stderr)
  sys.exit(2)


def refuse_hidden_modules():
  """Stops if a file beside the script hides the module that has its name."""
  from importlib.machinery import PathFinder
  folder, *others = sys.path
  if folder != os.path.dirname(FILE):  # As `python -P` has it.
    return
  names = {name.partition(".")[0] for name in os.listdir(folder)}
  for name in sorted(names - {"test", "tests"}):
    beside = PathFinder.find_spec(name, [folder])
    hidden = PathFinder.find_spec(name, others)
    if (beside and beside.origin and hidden
        and hidden.origin != beside.origin):
      stop(f"{beside.origin} hides the module {name!r}; rename it, or move "
           "the tour to a folder of its own.")


def read_options(arguments):
  """Returns the options; `sections` maps names that are to run to titles."""
  source = pathlib.Path(FILE).read_text(encoding="utf-8")
  found = re.findall(r'^@section\("(.+)"\)\ndef (\w+)', source, re.MULTILINE)
  titles = {name: title for title, name in found}

  parser = argparse.ArgumentParser(
      "kauldron_tour.py", description="Teaches Kauldron by running it.",
      epilog="A NAME may be a number. Exit status: 0 passed, 1 a section "
      "failed, 2 wrong usage or no Kauldron, 130 interrupted.")
  parser.error = lambda message: stop(f"{message}; --help explains.")
  add = parser.add_argument
  add("--list", action="store_true", help="list the sections and exit")
  add("--only", nargs="+", metavar="NAME", default=titles, help="run these")
  add("--skip", nargs="+", metavar="NAME", default=[], help="leave these out")
  add("--strict", action="store_true", help="a SKIP counts as a failure")
  add("--workdir", metavar="DIR", help="keep runs and pictures below DIR")
  add("--report", metavar="FILE", help="write the results as JSON to FILE")
  add("--distributed", nargs="*", metavar="WHERE", help="be one of several "
      "processes; WHERE is ADDRESS COUNT NUMBER, or what the cluster says")
  options = parser.parse_args(arguments)

  numbered = {str(number): name for number, name in enumerate(titles)}
  only = {numbered.get(name, name) for name in options.only}
  skip = {numbered.get(name, name) for name in options.skip}
  for name in sorted(only | skip):
    if name not in titles:
      stop(f"there is no section {name!r}; --list shows them all.")
  options.sections = {
      name: title for name, title in titles.items() if name in only - skip}
  if not options.sections:
    stop("--only and --skip leave no section to run.")
  if options.list:
    for number, (name, title) in enumerate(titles.items()):
      print(f"{number:2} {name:18} {title}")
    sys.exit()

  if options.distributed is not None and not options.workdir:
    stop("--distributed needs --workdir, the same for all processes.")
  if "://" in (options.workdir or ""):
    stop(f"--workdir {options.workdir}: only a directory of this machine will "
         "do.")
  try:
    if options.workdir:
      options.workdir = pathlib.Path(options.workdir).expanduser().absolute()
      options.workdir.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=options.workdir).close()
    if options.report:  # To a device, as /dev/stdout may be, it is added.
      mode = "a" if options.report.startswith("/dev/") else "w"
      options.report = open(options.report, mode, encoding="utf-8")
  except (OSError, RuntimeError) as error:  # The latter if there is no home.
    stop(f"cannot write there: {str(error).rstrip('.')}.")
  return options


def join_processes(address=None, count=None, number=None):
  """Makes this process one of several; only the first one prints."""
  jax.distributed.initialize(
      address, count and int(count), number and int(number))
  if jax.process_index() > 0:
    path = OPTIONS.workdir / f"process_{jax.process_index()}.txt"
    sys.stdout = open(path, "w", encoding="utf-8")
    OPTIONS.report = None
  SKIPPED.update({
      "readable_loop": "The loop by hand needs the whole batch.",
      "inner_layer": "The check by hand needs the whole batch.",
      "random_streams": "The check by hand needs the whole batch.",
      "model_state": "The check by hand needs the whole batch.",
      "sharding": "A process sees its own part only.",
      "exported_model": "Process 0 alone exports.",
      "project": "Each process would write the files of the project.",
      "event_files": "The pictures are of process 0's part of a batch.",
      "data_pipeline": "PyGrain deals the examples out to the processes.",
      "data_files": "PyGrain deals the examples out to the processes."})


def on_error(kind, error, trace):
  """Ends a run that an error outside a section, or Ctrl-C, has cut short."""
  del trace
  if kind is SystemExit:  # As under `python -i`.
    return
  if kind is BrokenPipeError:  # As after `| head`: there is nobody to tell.
    os._exit(141)
  if kind is not KeyboardInterrupt:
    described = describe(error)
    for name, title in OPTIONS.sections.items():
      RESULTS.setdefault(name, {"title": title, "status": "FAIL",
                                "seconds": 0.0, "facts": {}, **described})
  status = finish()
  sys.exit(130 if kind is KeyboardInterrupt else status)


def finish():
  """Prints the summary, writes the report; returns the exit status."""
  status = print_summary()
  try:
    if OPTIONS.report:
      write_report()
  except OSError as error:
    stop(f"cannot write the report: {error}.")
  return status


def print_summary():
  """Prints how the sections ended, and why; returns the exit status."""
  print("\nSummary\n-------")
  for name, result in RESULTS.items():
    number = list(SECTIONS).index(name) if name in SECTIONS else "-"
    print(f"  {result['status']} {result['seconds']:5.1f} s  {number:2} "
          f"{result['title']}")
  ended = [result["status"] for result in RESULTS.values()]
  counts = ", ".join(f"{ended.count(x)} {x}" for x in ("PASS", "SKIP", "FAIL"))
  print(f"\n{counts} of {len(ended)} sections")

  # What went wrong: each cause once, with the sections that it took.
  causes = {}
  for name, result in RESULTS.items():
    if result["status"] != "PASS":
      says_nothing = result["reason"].endswith(": ")
      where = result["where"] if says_nothing else ""
      cause = result["status"], result["reason"], where
      causes.setdefault(cause, []).append(name)
  for (status, reason, _), names in causes.items():
    first = RESULTS[names[0]]
    print()
    for text in (f"{status}: {headline(reason)}", first["where"],
                 first["library"]):
      if text:
        print(textwrap.fill(text, 79, subsequent_indent="    ", max_lines=4,
                            break_on_hyphens=False))
    again = f"again: python kauldron_tour.py --only {' '.join(names)}"
    print(textwrap.fill(again, 79, subsequent_indent="    "))
  if "FAIL" in ended and SETTINGS:
    print("\nSet in the environment, and perhaps the cause:")
    print(textwrap.indent("\n".join(SETTINGS), "  "))

  strict = OPTIONS is not None and OPTIONS.strict
  return int("FAIL" in ended or (strict and "SKIP" in ended))


def write_report():
  """Writes versions and RESULTS as JSON where --report says."""
  versions = {x.name: x.version for x in importlib.metadata.distributions()}
  report = {
      "schema": 2, "python": sys.version, "platform": sys.platform,
      "versions": versions, "patches": globals().get("PATCHES", {}),
      "sections": RESULTS}
  sys.stdout.flush()  # The report may go there, too.
  with OPTIONS.report as file:
    print(json.dumps(report, indent=1), file=file)

# %%
if RUNNING and not AS_SCRIPT and print_summary():
  raise RuntimeError("A section failed.")
