#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "kauldron>=1.4.2",
#   # kauldron 1.4.3 and later need tensorflow-cpu: no wheel for these machines.
#   "kauldron<1.4.3; platform_machine in 'arm64 aarch64'",
#   "jax",
#   "flax",
#   "optax",
#   "etils",
#   "numpy",
#   # Bounds what Kauldron pulls in, or pip backtracks for a quarter of an hour.
#   "google-cloud-bigquery>=3.20",
# ]
# ///
"""A tour of Kauldron, the JAX training library, that proves what it says.

Read it from top to bottom beside its output. Every section makes one claim,
shows it in a few lines and asserts it, so that a section which passes is true
of the versions you have installed. It is not a reference, not a benchmark and
not a good model: the data is synthetic and everything trains on a CPU.

Run (about 15 seconds, a third of it importing TensorFlow):

  python kauldron_tour.py                   # everything
  python kauldron_tour.py --list            # names and numbers of the sections
  python kauldron_tour.py --only key_paths  # some of it
  python kauldron_tour.py --workdir out     # keep checkpoints, events, pictures
"""

import argparse
import atexit
import builtins
import contextlib
import dataclasses
import fractions
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import textwrap
import time
import traceback
import unittest

# %% Plumbing (skip on a first read)
# Short names used throughout: cfg (config), ds (dataset), preds (what a model
# returned), interms (what its inner layers returned), aux (auxiliaries: states
# of losses, metrics and summaries), kt (kauldron.ktyping).
SECTIONS = """
where_we_are config_tree config_references key_paths shape_checker
loss_and_metric real_trainer readable_loop inner_layer sweep resumed_run
""".split()
SEED, NUM_CLASSES, WIDTH, BATCH_SIZE = 0, 4, 32, 64
NUM_STEPS, LOG_EVERY, LEARNING_RATE, PEAK = 100, 10, 0.005, 0.1
RESULTS = {}  # Section name -> title, status, seconds, reason, facts.
INTERRUPT = "interrupted"  # By Ctrl-C: then no further section is started.
IN_NOTEBOOK = hasattr(builtins, "__IPYTHON__")
wrap = functools.partial(
    textwrap.fill, subsequent_indent="    ", break_on_hyphens=False)


def stop(sentence):
  """Ends a run that cannot start: one sentence, exit status 2."""
  if IN_NOTEBOOK:
    raise RuntimeError(sentence)
  print(f"kauldron_tour: {sentence}", file=sys.stderr)
  sys.exit(2)


def parse_options(argv):
  """Returns the options; `sections` names the sections that are to run."""
  parser = argparse.ArgumentParser("kauldron_tour.py", epilog="Exit status: 0"
      " passed, 1 a section failed, 2 wrong usage or environment, 130 Ctrl-C.")
  parser.error = lambda message: stop(f"{message}; --help explains.")
  add = parser.add_argument
  add("--list", action="store_true", help="list the sections and exit")
  add("--only", nargs="+", metavar="NAME", default=SECTIONS,
      help="run these sections, by name or number")
  add("--skip", nargs="+", metavar="NAME", default=[],
      help="leave these sections out")
  add("--strict", action="store_true", help="a SKIP counts as a failure")
  add("--workdir", metavar="DIR", help="keep runs and pictures below DIR")
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


def section(title, imports=None):
  """Registers a section; the main program runs it where it stands.

  `imports` is a slow module to import first, outside the section's seconds.
  """

  def register(function):
    function.title, function.imports = title, imports
    if RUNS and function.__name__ in OPTIONS.sections:
      run_section(function)
    return function

  return register


def run_section(function):
  """Runs a section, prints how it ended and records that in RESULTS."""
  if INTERRUPT in (result["reason"] for result in RESULTS.values()):
    return
  name, claim = function.__name__, function.__doc__.splitlines()[0]
  print(f"\n[{SECTIONS.index(name):02}/{len(SECTIONS) - 1:02}] "
        f"{function.title}\n  {claim}", flush=True)
  status, reason, facts, start = "PASS", "", {}, time.perf_counter()
  try:
    if function.imports:
      import_quietly(function.imports)
    start = time.perf_counter()
    facts = function()
  except unittest.SkipTest as skip:
    status, reason = "SKIP", str(skip)
  except KeyboardInterrupt:
    status, reason = "FAIL", INTERRUPT
  except Exception as error:  # Whatever it is, the other sections still run.
    status, reason = "FAIL", f"{type(error).__name__}: {error}".split("\n")[0]
    print_traceback(error)
  seconds = time.perf_counter() - start
  RESULTS[name] = {"title": function.title, "status": status, "facts": facts,
                   "seconds": seconds, "reason": reason}
  short = (f"{key}: {textwrap.shorten(str(value), 44, placeholder='...')}"
           for key, value in facts.items())
  if facts:
    print(wrap("  facts: " + ", ".join(short), 78))
  print(f"  {status} {seconds:.1f}s {reason}".rstrip(), flush=True)


def print_traceback(error):
  """Prints the tour's own frames of a traceback, and the last one of all."""
  trace = error.__traceback__.tb_next  # Without `run_section`.
  ours = [f.f_globals is globals() for f, _ in traceback.walk_tb(trace)]
  *lines, last = traceback.extract_tb(trace)
  lines = [*itertools.compress(lines, ours), last]
  text = traceback.format_list(lines) + traceback.format_exception_only(error)
  print(textwrap.indent("".join(text), "  "), end="")


def show(label, value):
  """Prints `label => value`, below the label if it is long or has lines."""
  text = value if isinstance(value, str) else repr(value)
  if "\n" in text or len(label + text) > 74:
    lines = "\n" + "\n".join(wrap(line, 74) for line in text.splitlines())
    text = textwrap.indent(lines, "    ")
  print(f"  {label} => {text}")


# A script owns its arguments. Those of a notebook's kernel are not for us.
IS_SCRIPT = os.path.realpath(sys.argv[0]) == os.path.realpath(
    stop.__code__.co_filename)
OPTIONS = parse_options(sys.argv[1:] if IS_SCRIPT else [])
RUNS = __name__ == "__main__" and not OPTIONS.list  # An import only defines.


# %% 0. Where we are
if sys.version_info < (3, 11):
  stop(f"Python {platform.python_version()} is too old: use 3.11 to 3.13.")
if not __debug__:
  stop("python -O strips the assertions this tour is made of: leave out -O.")
if importlib.util.find_spec("kauldron") is None:
  stop("kauldron is not installed: `pip install -r requirements.txt` first.")
if OPTIONS.workdir:
  OPTIONS.workdir = pathlib.Path(OPTIONS.workdir).expanduser().absolute()
  try:
    OPTIONS.workdir.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=OPTIONS.workdir).close()
  except OSError as error:
    stop(f"cannot write to --workdir {OPTIONS.workdir}: {error.strerror}.")
if RUNS:
  print(f"A tour of Kauldron: {len(OPTIONS.sections)} sections.", flush=True)

# Configs name what this file defines as `kauldron_tour:MLP` and the like, also
# where the file is a script or a cell and so goes by the name `__main__`.
sys.modules["kauldron_tour"] = sys.modules[__name__]

# Libraries read these when they are imported. What the caller has set stays.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if not sys.stderr.isatty():
  os.environ.setdefault("TQDM_DISABLE", "1")

from etils import enp
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
from kauldron import kd  # Lazy: `kd.train` is imported at its first use.
from kauldron import konfig
from kauldron import kontext
import numpy as np
import optax

try:
  jax.devices()
except (RuntimeError, AssertionError):
  stop(f"JAX finds no device for JAX_PLATFORMS={jax.config.jax_platforms}.")
PATCHES = {}  # What was mended -> the fault that made it necessary.


def patch_etils():
  """Lets etils <= 1.14.0 inspect a dtype under jax >= 0.10.2.

  To recognise random keys it reads `jax._src.prng`, which is gone. JAX has a
  public answer to the same question.
  """
  try:
    enp.ArraySpec(shape=(), dtype=np.float32)
  except AttributeError as error:
    enp.array_spec._is_jax_random_dtype = lambda dtype: (
        jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
    PATCHES["etils.enp.array_spec"] = str(error)


if not OPTIONS.no_patch:
  patch_etils()


@section("Where we are")
def where_we_are():
  """What follows is proved for these versions, on these devices.

  A patch is applied only where the fault it mends shows up when tried, and is
  named here with that fault. Without one, nothing was touched.
  """
  packages = "kauldron jax flax optax etils orbax-checkpoint numpy".split()
  versions = {name: importlib.metadata.version(name) for name in packages}
  show("python", platform.python_version())
  show("packages", ", ".join(f"{k} {v}" for k, v in versions.items()))
  show("jax.devices()", jax.devices())
  for module, fault in PATCHES.items():
    show(f"patched {module}", fault)
  for module in (jax, flax, optax, np):  # What is imported is what is listed.
    assert module.__version__ == versions[module.__name__], module.__file__
  spec = enp.ArraySpec.from_array(jnp.zeros((2, 3), jnp.float32))
  assert (spec.shape, spec.dtype) == ((2, 3), np.float32), spec
  return dict(backend=jax.default_backend(), devices=jax.device_count(),
              patches=", ".join(PATCHES) or "none")


# %% Part I: the three mechanisms
# konfig, kontext and ktyping cost what JAX costs. TensorFlow comes in Part II.


# %% 1. A config is a call tree, and a call tree is a dict
with konfig.imports():  # Import lines only: `import` itself is replaced here.
  import fractions as lazy_fractions
  from kauldron import kd as lazy_kd
  import optax as lazy_optax
  import kauldron_tour as lazy_tour


def sgd_by_hand(momentum):
  """Returns the optimizer that the config below describes."""
  return optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.sgd(learning_rate=0.5, momentum=momentum),
  )


def three_updates(optimizer):
  """Returns parameters, shape (3,), after three steps down a real gradient."""
  params = jnp.array([1.0, -2.0, 3.0])
  opt_state = optimizer.init(params)
  for _ in range(3):
    grads = jax.grad(lambda x: jnp.sum(x**4))(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
  return params.tolist()


@section("A config is a call tree, and a call tree is a dict")
def config_tree():
  """Calls are recorded as dicts that survive JSON and become objects later.

  Inside `konfig.imports()` an import gives a stand-in, which writes down how
  it is called (here by a name that starts with `lazy_`). optax takes no part in
  this, with no base class, registry or decorator: `konfig.resolve` looks up
  "optax:sgd" by name and calls it.
  """
  cfg = lazy_optax.chain(
      lazy_optax.clip_by_global_norm(1.0),
      lazy_optax.sgd(learning_rate=0.5, momentum=0.9),
  )
  show("cfg", cfg)
  show("cfg[1]", (type(cfg[1]).__name__, cfg[1].__qualname__))
  cfg[1].momentum = 0.8  # Nothing is built yet, so everything can change.
  text = cfg.to_json()
  show("cfg.to_json()", textwrap.fill(text, 72))
  rebuilt = konfig.resolve(json.loads(text))

  expected = three_updates(sgd_by_hand(momentum=0.8))
  assert three_updates(rebuilt) == expected, three_updates(rebuilt)
  assert three_updates(sgd_by_hand(momentum=0.9)) != expected, expected
  assert type(rebuilt) is optax.GradientTransformationExtraArgs, type(rebuilt)
  third = lazy_fractions.Fraction(1, 3)  # Any callable of any package will do.
  assert konfig.resolve(third) == fractions.Fraction(1, 3), third
  return dict(cfg=repr(cfg), json=text)


# %% 2. Change one number, and everything downstream follows
def learning_rates(cfg):
  """Prints and returns both schedules at 10 %, 50 % and 90 % of training."""
  steps = [cfg.num_train_steps * percent // 100 for percent in (10, 50, 90)]
  rates = {}
  for name in ("follows", "frozen"):
    schedule = konfig.resolve(cfg[name])
    rates[name] = [float(schedule(step)) for step in steps]
    show(f"{cfg.num_train_steps:4} steps, {name}",
         " ".join(f"{rate:.3f}" for rate in rates[name]))
  return rates


@section("Change one number, and everything downstream follows")
def config_references():
  """`cfg.ref.x` stays tied to x, `cfg.x` copies the value it has now.

  A reference survives arithmetic and is read when the config is resolved. JSON
  stores values only: what is read back no longer follows.
  """
  def schedule(steps):
    return lazy_optax.warmup_cosine_decay_schedule(
        0.0, PEAK, warmup_steps=steps // 10, decay_steps=steps)

  cfg = konfig.ConfigDict({"num_train_steps": 1000})
  cfg.follows = schedule(cfg.ref.num_train_steps)
  cfg.frozen = schedule(cfg.num_train_steps)
  long = learning_rates(cfg)
  cfg.num_train_steps = 200
  short = learning_rates(cfg)
  read_back = konfig.ConfigDict(json.loads(cfg.to_json()))
  read_back.num_train_steps = 1000

  # After the warm-up, half a cosine: 4/9 of it is over at 50 % of training.
  expected = [PEAK * (1 + np.cos(np.pi * x)) / 2 for x in (0, 4 / 9, 8 / 9)]
  for rates in (long["follows"], long["frozen"], short["follows"]):
    assert np.allclose(rates, expected), (rates, expected)
  assert np.allclose(short["frozen"][0], PEAK * 20 / 100), short["frozen"]
  assert read_back.follows.decay_steps == 200, read_back.follows
  return dict(warmup_steps=cfg.follows.warmup_steps,
              frozen_at_10_percent=short["frozen"][0])


# %% 3. Parts are wired by string key paths
@dataclasses.dataclass(frozen=True)
class CrossEntropy:
  """Scores any model: it knows two key paths and no class."""

  logits: kontext.Key = kontext.REQUIRED
  labels: kontext.Key = "batch.label"

  def __call__(self, context):
    """Returns the mean over the batch, a scalar in nats."""
    arrays = kontext.resolve_from_keyed_obj(context, self)
    return optax.softmax_cross_entropy_with_integer_labels(**arrays).mean()


def raises(kind, call, *args, **kwargs):
  """Returns the error of class `kind` that the call must raise."""
  try:
    value = call(*args, **kwargs)
  except kind as error:
    return error
  raise AssertionError(f"no {kind.__name__} was raised, but got {value!r}")


def first_line(error):
  """Returns the first line of an error's message."""
  return (str(error).splitlines() or [""])[0]


@section("Parts are wired by string key paths")
def key_paths():
  """One loss scores two unlike models, and only its key path differs.

  A context is any tree of dicts, lists and objects. A field annotated
  `kontext.Key` holds the path at which its value will be found there.
  """
  context = {"batch": {"label": np.array([0, 2])}, "preds": None}
  logits = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]])
  plain, nested = logits, {"heads": [{"logits": -logits}, {"logits": logits}]}

  on_plain = CrossEntropy(logits="preds")(context | {"preds": plain})
  path = "preds.heads[1].logits"
  context["preds"] = nested
  on_nested = CrossEntropy(logits=path)(context)
  show("loss of both models", (float(on_plain), float(on_nested)))
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  by_hand = -log_probs[[0, 1], [0, 2]].mean()
  assert np.allclose([on_plain, on_nested], by_hand), (on_plain, on_nested)

  show("paths", list(kontext.flatten_with_path(context)))
  assert kontext.get_by_path(context, path) is logits, path
  changed = kontext.set_by_path(context, "**.logits", 0)  # `**`: at any depth.
  assert changed == ["preds.heads[0].logits", path], changed
  assert nested["heads"] == [{"logits": 0}, {"logits": 0}], nested

  wrong = CrossEntropy(logits="preds.head[1].logits")
  error = raises(KeyError, wrong, context)
  show("a wrong path", str(error))
  assert path in str(error).partition("Did you mean")[2], error
  error = raises(ValueError, CrossEntropy(), context)
  assert "required keys: ['logits']" in str(error), error
  return dict(paths=" ".join(kontext.flatten_with_path(context)),
              required=first_line(error))


# %% 4. Shapes are checked at run time, by named axes
kt = kd.ktyping


@section("Shapes are checked at run time, by named axes")
def shape_checker():
  """An axis name stands for one size throughout a call, results included.

  `*b` is any number of leading axes. Broadcasting makes it worth while: the
  wrong call below runs without the checker, and returns nonsense.
  """

  def centered(
      x: kt.Float["*b n"], mean: kt.Float["*b 1"], transpose: bool = False
  ) -> kt.Float["*b n"]:
    return (x - mean).T if transpose else x - mean

  checked = kt.typechecked(centered)  # Or `@kt.typechecked` above the `def`.
  x, rows = np.ones((5, 5)), np.ones((3, 5))
  right = checked(x, x[:, :1]).shape, checked(x[0], x[0, :1]).shape
  assert right == ((5, 5), (5,)), right  # First calls that must pass.
  assert centered(x, x[0]).shape == (5, 5), "it does not broadcast"

  error = raises(kt.KTypeCheckError, checked, x, x[0])
  report = [line for line in str(error).splitlines() if line]
  show("the report", "\n".join(line for line in report if "Origin" not in line))
  assert "argument mean" in report[0] and "'*b 1'" in report[0], report
  assert report[-1] == " - {b: 5, n: 5}", report  # What was bound so far.
  result = raises(kt.KTypeCheckError, checked, rows, rows[:, :1], True)
  assert first_line(result).startswith("return value"), result
  dtype = raises(kt.KTypeCheckError, checked, x.astype(int), x[:, :1])
  assert "dtype 'int" in first_line(dtype), dtype
  return dict(argument=report[0], result=first_line(result))


# %% 5. A loss and a metric are states that merge
@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class FocalLoss(kd.losses.Loss):
  """Cross-entropy that weighs an example less the better it is predicted.

  With p the probability given to the right class, -(1 - p)^gamma log p in
  nats; gamma = 0 is cross-entropy. From Lin et al., "Focal loss for dense
  object detection", 2017. The base class adds `mask`, `weight` and the mean.
  """

  logits: kontext.Key = kontext.REQUIRED
  labels: kontext.Key = kontext.REQUIRED
  gamma: float = 1.0

  @kt.typechecked
  def get_values(
      self, logits: kt.Float["*b n"], labels: kt.Int["*b 1"]
  ) -> kt.Float["*b 1"]:
    log_probs = jax.nn.log_softmax(logits)
    log_p = jnp.take_along_axis(log_probs, labels, axis=-1)
    return -((1 - jnp.exp(log_p)) ** self.gamma) * log_p


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class BalancedAccuracy(kd.metrics.Metric):
  """Mean over the classes of the fraction that was recognised, in [0, 1].

  No mean of batch means gives it, so the state carries the counts.
  """

  logits: kontext.Key = kontext.REQUIRED
  labels: kontext.Key = kontext.REQUIRED
  mask: kontext.Key | None = None

  @flax.struct.dataclass
  class State(kd.metrics.AutoState["BalancedAccuracy"]):
    hits: kt.Float["n"] = kd.metrics.sum_field()
    seen: kt.Float["n"] = kd.metrics.sum_field()

    def compute(self):  # Runs outside `jit`, so shapes may depend on values.
      occurs = self.seen > 0
      return jnp.mean(self.hits[occurs] / self.seen[occurs])

  @kt.typechecked
  def get_state(
      self,
      logits: kt.Float["*b n"],
      labels: kt.Int["*b 1"],
      mask: kt.Float["*b 1"] | None = None,
  ) -> State:
    weights = jnp.ones(labels.shape) if mask is None else mask
    seen = weights * jax.nn.one_hot(labels[..., 0], logits.shape[-1])
    hit = logits.argmax(-1, keepdims=True) == labels
    batch = tuple(range(labels.ndim - 1))
    return self.State(hits=(hit * seen).sum(batch), seen=seen.sum(batch))


def focal_loss_in_numpy(logits, labels, mask, gamma=1.0):
  """Returns the masked mean focal loss of arrays (b, n), (b, 1) and (b, 1)."""
  probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  p = np.take_along_axis(probs, labels, -1)
  return (mask * -((1 - p) ** gamma) * np.log(p)).sum() / mask.sum()


def balanced_accuracy_in_numpy(logits, labels, mask):
  """Returns the mean recall over the classes, from the same arrays."""
  recalls = []
  for label in range(logits.shape[-1]):
    kept = (labels[:, 0] == label) & (mask[:, 0] > 0)
    recalls.append((logits[kept].argmax(-1) == label).mean())
  return np.mean(recalls)


def from_context(part, logits, labels, mask, rows):
  """Returns the state of a loss or metric for these rows of a batch."""
  batch = {"label": labels[rows], "mask": mask[rows]}
  context = {"step": 0, "preds": logits[rows], "batch": batch}
  return part.get_state_from_context(context)


@section("A loss and a metric are states that merge")
def loss_and_metric():
  """Both turn arrays into a state, and merged states are the state of all.

  A loss gives values, which its base class masks and averages; a metric gives
  its whole state. Neither names a model: key paths bring them their arrays.
  """
  rng = np.random.default_rng(SEED)
  logits = rng.normal(size=(30, 3)).astype(np.float32)
  labels = rng.integers(3, size=(30, 1)).astype(np.int32)
  masks = {None: np.ones((30, 1)), "batch.mask": rng.integers(2, size=(30, 1))}
  for key, mask in masks.items():
    keys = dict(logits="preds", labels="batch.label", mask=key)
    for part, in_numpy in (
        (FocalLoss(**keys), focal_loss_in_numpy),
        (BalancedAccuracy(**keys), balanced_accuracy_in_numpy),
    ):
      arrays = logits, labels, mask.astype(np.float32)
      whole, first, rest = [
          from_context(part, *arrays, rows)
          for rows in (slice(30), slice(10), slice(10, 30))]
      value = float(first.merge(rest).compute())
      show(f"{type(part).__name__}, mask={key}", value)
      assert np.isclose(value, whole.compute()), (value, whole.compute())
      assert np.isclose(value, in_numpy(*arrays)), (value, in_numpy(*arrays))
      mean = (first.compute() + rest.compute()) / 2
      assert not np.isclose(value, mean), "a mean of batch values would do"

  loss = FocalLoss(logits="preds", labels="batch.label")
  error = raises(kt.KTypeCheckError, loss.get_values, logits, labels[:, 0])
  show("labels of shape (30,)", first_line(error))
  assert "labels" in first_line(error) and "(30,)" in first_line(error), error
  return dict(refused=first_line(error))


# %% Part II: a real Trainer
# The first use of `kd.train` imports TensorFlow, for its summary writer: 5 to
# 15 seconds, once, and more than all the rest of this tour's imports.
def import_quietly(module):
  """Imports a module, keeping from stderr what TensorFlow says on the way."""
  if module in sys.modules:
    return
  print(f"  importing {module}", end=" ", flush=True)
  start, stderr = time.perf_counter(), os.dup(2)
  with tempfile.TemporaryFile("w+") as said:
    os.dup2(said.fileno(), 2)  # For what does not go through `sys.stderr`.
    try:
      with contextlib.redirect_stderr(said):
        importlib.import_module(module)
    except BaseException:
      said.seek(0)
      print(said.read())
      raise
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
  print(f"took {time.perf_counter() - start:.1f}s")
  if not jax.config.jax_compilation_cache_dir:  # The runs share programs.
    jax.config.update("jax_compilation_cache_dir", temporary_dir())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def temporary_dir():
  """Returns the path of a new directory that is removed at exit."""
  path = tempfile.mkdtemp(prefix="kauldron_tour_")
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path


@functools.cache
def work_root():
  """Returns the absolute path below which all runs write."""
  return OPTIONS.workdir or pathlib.Path(temporary_dir())


def run_dir(name):
  """Returns the path of a new work directory: name, or name_2, name_3, ..."""
  for number in itertools.count(1):
    path = work_root() / (name if number == 1 else f"{name}_{number}")
    with contextlib.suppress(FileExistsError):
      path.mkdir()
      return str(path)


# %% The task of Part II: which way do the stripes run?
@functools.cache
def stripes(num_images, seed):
  """Returns noisy images of stripes in four directions, and the directions.

  The phase is random, so that no single pixel and no linear model tells the
  direction.

  Returns:
    A dict of `image`, float32 (num_images, 8, 8, 1) in [-1, 1], and `label`,
    int32 (num_images, 1): the direction in units of 45 degrees.
  """
  rng = np.random.default_rng(seed)
  label = rng.integers(NUM_CLASSES, size=(num_images, 1))
  angle, phase = label * np.pi / 4, rng.uniform(0, 2 * np.pi, label.shape)
  y, x = np.mgrid[:8, :8].reshape(2, 1, -1)
  wave = np.cos(np.pi / 2 * (np.cos(angle) * x + np.sin(angle) * y) + phase)
  image = 0.5 * wave + rng.normal(scale=0.2, size=wave.shape)
  image = image.clip(-1, 1).reshape(num_images, 8, 8, 1)
  return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def train_images():
  """Returns the 1024 images to train on."""
  return stripes(1024, seed=SEED)


def held_out_images():
  """Returns 256 other images."""
  return stripes(256, seed=SEED + 1)


class MLP(nn.Module):
  """Two dense layers; `image` is a key path, like those of a loss."""

  image: kontext.Key = kontext.REQUIRED
  width: int = WIDTH

  @nn.compact
  def __call__(self, image):
    x = image.reshape(len(image), -1)
    x = nn.relu(nn.Dense(self.width, name="encoder")(x))
    return {"logits": nn.Dense(NUM_CLASSES, name="head")(x)}


def get_config():
  """Returns the config that the rest of the tour starts from."""
  cfg = lazy_kd.train.Trainer()
  cfg.seed = SEED
  cfg.train_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.train_images, batch_size=BATCH_SIZE, shuffle=True)
  cfg.model = lazy_tour.MLP(image="batch.image", width=WIDTH)
  keys = dict(logits="preds.logits", labels="batch.label")
  cfg.train_losses = {"focal": lazy_tour.FocalLoss(**keys, gamma=1.0)}
  cfg.train_metrics = {"accuracy": lazy_tour.BalancedAccuracy(**keys)}
  cfg.optimizer = lazy_optax.adam(learning_rate=LEARNING_RATE)
  cfg.num_train_steps = NUM_STEPS
  cfg.log_metrics_every = LOG_EVERY
  cfg.log_summaries_every = cfg.ref.log_metrics_every  # One program less.
  cfg.profiler = None  # By default every run is traced.
  return cfg


def held_out_scores(params, gamma=1.0):
  """Returns focal loss (nats) and accuracy of an MLP on held-out images."""
  data = held_out_images()
  width = params["encoder"]["kernel"].shape[-1]
  logits = MLP(width=width).apply({"params": params}, data["image"])["logits"]
  loss = focal_loss_in_numpy(logits, data["label"], np.ones((256, 1)), gamma)
  return float(loss), float((logits.argmax(-1) == data["label"][:, 0]).mean())


# %% 6. A Trainer joins model, data, losses, metrics and optimizer
def restored(cfg, step=-1):
  """Returns the state that a run saved at a step, by default at its last."""
  trainer = konfig.resolve(cfg)  # A trainer that has trained cannot restore.
  return trainer.checkpointer.restore(trainer.init_state(), step=step)


@section("A Trainer joins model, data, losses, metrics and optimizer",
         imports="kauldron.train")
def real_trainer():
  """A resolved config trains, and takes one step more than it says.

  `num_train_steps=N` runs steps 0 to N. The state that is returned has taken
  N + 1 steps; a checkpoint labelled K holds the state before step K.
  """
  cfg = get_config()
  cfg.workdir = run_dir("real_trainer")  # Absolute, or a checkpoint fails.
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(
      save_interval_steps=NUM_STEPS // 2)
  trainer = konfig.resolve(cfg)
  loss_before, _ = held_out_scores(trainer.init_state().params)
  state, aux = trainer.train()

  steps = int(state.step), int(state.opt_state[0].count)
  saved = list(trainer.checkpointer.all_steps)
  show("steps taken by state, optimizer", steps)
  show("steps with a checkpoint", saved)
  assert steps == (NUM_STEPS + 1, NUM_STEPS + 1), steps
  assert saved == [0, NUM_STEPS // 2, NUM_STEPS], saved
  assert restored(cfg).step == NUM_STEPS, restored(cfg).step

  loss, accuracy = held_out_scores(state.params)
  show("aux.compute().loss_values", aux.compute().loss_values)
  show("held-out loss", f"{loss_before:.3f} before, {loss:.3f} after")
  show("held-out accuracy", f"{accuracy:.3f}")
  assert loss < loss_before / 10, (loss_before, loss)
  assert accuracy > 0.95, accuracy
  return dict(loss=loss, accuracy=accuracy, steps_taken=steps[0],
              last_checkpoint=saved[-1])


# %% 7. The training loop is one you could write yourself
def distance(tree, other):
  """Returns the largest absolute difference between two trees' leaves."""
  difference = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), tree, other)
  return float(max(jax.tree.leaves(difference)))


def loop(trainer, state, batches):
  """Returns the state after a step on each batch; the one passed is used up."""
  for batch in batches:
    state, _ = trainer.trainstep.step(state, batch)
  return state


@functools.partial(jax.jit, static_argnums=0)
def plain_step(optimizer, params, opt_state, batch):
  """Returns new params, optimizer state and the loss, without any Kauldron."""

  def focal_loss(params):
    logits = MLP().apply({"params": params}, batch["image"])["logits"]
    one_hot = jax.nn.one_hot(batch["label"][:, 0], NUM_CLASSES)
    p = (jax.nn.softmax(logits) * one_hot).sum(-1)
    return jnp.mean(-(1 - p) * jnp.log(p))

  loss, grads = jax.value_and_grad(focal_loss)(params)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


@section("The training loop is one you could write yourself",
         imports="kauldron.train")
def readable_loop():
  """`train()`, a loop over `trainstep.step` and plain JAX end up the same.

  The first two run the same program and agree bit for bit. The third shares
  only the batches and the first parameters, and agrees to rounding.
  """
  cfg = get_config()
  cfg.workdir = run_dir("readable_loop")
  trained, aux = konfig.resolve(cfg).train()

  trainer = konfig.resolve(cfg)
  batches = list(itertools.islice(trainer.train_ds, NUM_STEPS + 1))
  stepped = loop(trainer, trainer.init_state(), batches)

  params = trainer.init_state().params
  optimizer = optax.adam(LEARNING_RATE)
  opt_state = optimizer.init(params)
  for batch in batches:
    before = params
    params, opt_state, loss = plain_step(optimizer, params, opt_state, batch)

  show("distance to trainstep.step", distance(trained, stepped))
  to_plain, step = distance(trained.params, params), distance(before, params)
  show("distance to plain JAX", f"{to_plain:.1e} (its last step: {step:.1e})")
  assert distance(trained, stepped) == 0, distance(trained, stepped)
  assert to_plain < 1e-4 < step, (to_plain, step)
  losses = aux.compute().loss_values["losses/total"], loss
  assert np.isclose(*losses, rtol=1e-4), losses
  return dict(distance_to_step=distance(trained, stepped), loss=float(loss))


# %% 8. An inner layer is watched through a key path
@section("An inner layer is watched without touching the model",
         imports="kauldron.train")
def inner_layer():
  """What a layer returns is in the context, at `interms.<layer>.__call__[0]`.

  A metric or a summary reads it there like anything else. The values are those
  of the step's parameters before its update.
  """
  layer = "interms.encoder.__call__[0]"
  cfg = get_config()
  cfg.train_metrics.norm = lazy_kd.metrics.Norm(tensor=layer)
  cfg.train_summaries = {
      "encoder": lazy_kd.summaries.HistogramSummary(tensor=layer)}
  cfg.workdir = run_dir("inner_layer")
  assert cfg.model == get_config().model, cfg.model
  _, aux = konfig.resolve(cfg).train()
  norm = float(aux.compute().metric_values["metrics/norm"])
  histogram = aux.compute().summary_values["summaries/encoder"]
  show("norm, histogram", (norm, histogram.tensor.shape, histogram.num_buckets))

  trainer = konfig.resolve(cfg)  # Again, up to the last step.
  *batches, last = itertools.islice(trainer.train_ds, NUM_STEPS + 1)
  state = loop(trainer, trainer.init_state(), batches)
  dense = jax.device_get(state.params["encoder"])
  image = last["image"].reshape(BATCH_SIZE, -1)
  output = image @ dense["kernel"] + dense["bias"]
  by_hand = np.linalg.norm(output, axis=-1).mean()
  assert np.isclose(norm, by_hand, rtol=1e-4), (norm, by_hand)
  assert np.allclose(histogram.tensor, output.ravel(), atol=1e-4), output
  layers = kontext.flatten_with_path(trainer.context_specs.interms)
  return dict(norm=norm, buckets=histogram.num_buckets, layers=" ".join(layers))


# %% 9. A sweep changes one line at a time
VARIANTS = {  # Name -> the path that it changes in the config, and to what.
    "base": {},
    "again": {},
    "slow": {"optimizer.learning_rate": LEARNING_RATE / 5},
    "rmsprop": {"optimizer.__qualname__": "optax:rmsprop"},
    "narrow": {"model.width": WIDTH // 4},
    "sharp": {"train_losses.focal.gamma": 3.0},
    "shuffled": {"train_ds.seed": SEED + 1},
}


def flat_config(cfg):
  """Returns the config as a flat dict of key paths and values."""
  return kontext.flatten_with_path(cfg)


def read_scalars(workdir, tag):
  """Returns the steps and the values that a run wrote under a tag."""
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.util import tensor_util

  events = event_accumulator.EventAccumulator(os.path.join(workdir, "train"))
  tensors = events.Reload().Tensors(tag)
  values = [float(tensor_util.make_ndarray(t.tensor_proto)) for t in tensors]
  return [t.step for t in tensors], values


def sparkline(values, largest):
  """Returns a character a value, darker for larger, on a log scale."""
  darkness = 8.5 + 2.5 * np.log10(np.array(values) / largest)
  return "".join(" .:-=+*#@"[int(x)] for x in darkness.clip(0, 8))


def plot_curves(name, steps, curves):
  """Draws loss curves, inline in a notebook or as a PNG file with --workdir."""
  if not (IN_NOTEBOOK or OPTIONS.workdir):
    return
  from matplotlib import figure

  picture = figure.Figure(figsize=(7, 4), layout="constrained")
  axes = picture.subplots()
  axes.set(xlabel="step", ylabel="training loss (nats)", yscale="log")
  for label, curve in curves.items():
    axes.plot(steps, curve, color="black", linewidth=0.8)
    axes.annotate(label, (steps[-1], curve[-1]))
  if IN_NOTEBOOK:
    from IPython.display import display
    display(picture)
  else:
    picture.savefig(work_root() / f"{name}.png")


@section("A sweep changes one line of the config at a time",
         imports="kauldron.train")
def sweep():
  """Every variant differs from the base in one path, and so in what it learns.

  A config is flat data once flattened, which shows what a variant changes
  before it costs anything. The base runs twice: no difference is by chance.
  """
  base, curves, facts = flat_config(get_config()), {}, {}
  print(f"  {'variant':9} {'changed line':37} accuracy  loss over time")
  for name, change in VARIANTS.items():
    cfg = get_config()
    for path, value in change.items():
      kontext.set_by_path(cfg, path, value)
    changed = set(flat_config(cfg).items()) ^ set(base.items())
    assert {path for path, _ in changed} == set(change), changed
    cfg.workdir = run_dir(f"sweep_{name}")
    state, _ = konfig.resolve(cfg).train()
    steps, curves[name] = read_scalars(cfg.workdir, "losses/total")
    _, facts[name] = held_out_scores(state.params)
    line = ", ".join(f"{path}={value}" for path, value in change.items())
    curve = sparkline(curves[name], curves["base"][0])
    print(f"  {name:9} {line:37} {facts[name]:8.3f}  {curve}")
  plot_curves("sweep", steps, curves)

  assert curves["again"] == curves["base"], curves["again"]
  for name in VARIANTS.keys() - {"base", "again"}:
    assert curves[name] != curves["base"], name
    # Nothing has been updated yet at step 0, so no optimizer shows there.
    same_start = curves[name][0] == curves["base"][0]
    assert same_start == (name in ("slow", "rmsprop")), name
  return facts


# %% 10. A run resumes where it stopped, if its data can
class StripesSource:
  """The training images as a PyGrain data source: a length and an index."""

  def __len__(self):
    return len(train_images()["label"])

  def __getitem__(self, index):
    return {key: value[index] for key, value in train_images().items()}


def train_twice(cfg, name):
  """Returns the states of a run in one go and of one that stops halfway."""
  half = NUM_STEPS // 2
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(save_interval_steps=half)
  cfg.workdir = run_dir(f"{name}_whole")
  whole, _ = konfig.resolve(cfg).train()

  cfg.workdir = run_dir(f"{name}_resumed")
  cfg.stop_after_steps = half + 1  # With a checkpoint before the last of them.
  konfig.resolve(cfg).train()
  cfg.stop_after_steps = None
  resumed, _ = konfig.resolve(cfg).train()
  return whole, resumed


@section("A run resumes where it stopped, if its data can",
         imports="kauldron.train")
def resumed_run():
  """A checkpoint restores bit for bit; whether the batches go on is the data's.

  `InMemoryPipeline` starts over with its first batch after a resume. A PyGrain
  `DataSource` saves its position, and the run ends as if never interrupted.
  """
  half, facts = NUM_STEPS // 2, {}
  in_memory = get_config().train_ds
  pygrain = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.StripesSource(), batch_size=BATCH_SIZE,
      shuffle=True, num_workers=0)
  for name, ds, goes_on_at in (("in_memory", in_memory, 0),
                               ("pygrain", pygrain, half)):
    cfg = get_config()
    cfg.train_ds = ds
    whole, resumed = train_twice(cfg, name)
    facts[name] = distance(resumed, whole)
    show(f"{name}: distance to the run in one go", facts[name])

    # The same by hand, from the checkpoint on and with the batches expected.
    trainer, halfway = konfig.resolve(cfg), restored(cfg, step=half)
    batches = itertools.islice(
        trainer.train_ds, goes_on_at, goes_on_at + half + 1)
    replayed = loop(trainer, halfway, batches)
    assert distance(resumed, replayed) == 0, distance(resumed, replayed)
  assert facts["pygrain"] == 0 < facts["in_memory"], facts
  return facts


# %% Summary
def summary():
  """Prints a table of the sections that ran; returns the exit status."""
  print(f"\n{'':8}{'seconds':>8}  what was proved")
  for name, result in RESULTS.items():
    print(f"  {result['status']:4} {result['seconds']:9.1f}"
          f"  {SECTIONS.index(name):2} {result['title']}")
  ended = [result["status"] for result in RESULTS.values()]
  counts = ", ".join(f"{ended.count(s)} {s}" for s in ("PASS", "SKIP", "FAIL"))
  print(f"\n{counts} of {len(OPTIONS.sections)} sections")
  for name, result in RESULTS.items():
    if result["status"] != "PASS":
      again = f"{name}()" if IN_NOTEBOOK else (
          f"python kauldron_tour.py --only {name}")
      print(f"{result['status']} {name}: {result['reason']}\n  again: {again}")
  if INTERRUPT in (result["reason"] for result in RESULTS.values()):
    return 130
  return int("FAIL" in ended or (OPTIONS.strict and "SKIP" in ended))


if RUNS:
  status = summary()
  if not IN_NOTEBOOK:
    sys.exit(status)
elif __name__ == "__main__":
  for name in OPTIONS.sections:
    print(f"{SECTIONS.index(name):2} {name:18} {globals()[name].title}")
