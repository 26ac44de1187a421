"""What Kauldron does beyond the lessons of the tour, fact by fact.

The tour proves one claim a section, the way a reader would try it. Here is
what needs a table of cases or a trick: the notation of both type checkers,
copies of configs, what else a run writes. `make smoke` runs this file with
other versions, so the name of a test says what is no longer true if it fails.

Configs name what is defined here "test_kauldron:Backbone", for example.
"""

import builtins
import copy
import dataclasses
import io
import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import threading
import traceback
from unittest import mock

from etils import enp
import flax
from flax import linen as nn
import jax
import jax.export
import jax.numpy as jnp
from kauldron import kd
from kauldron import konfig
from kauldron import kontext
import kauldron_tour as tour
import numpy as np
import optax
import pytest

with konfig.imports():
  from kauldron import kd as lazy_kd
  import kauldron_tour as lazy_tour
  import optax as lazy_optax
  import test_kauldron as lazy_here

pytestmark = [  # Of orbax (three) and absl; none is about us.
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")]

kt = kd.ktyping
CHECKERS = {"ktyping": (kt, kt.KTypeCheckError),
            "typing": (kd.typing, kd.typing.TypeCheckError)}
BATCH_SIZE = tour.BATCH_SIZE


def table(names, rows):
  """Returns a mark that runs a test for each row of a dict: name -> tuple."""
  return pytest.mark.parametrize(names, rows.values(), ids=rows.keys())


# konfig: what a config takes


LEEWAY = {  # Value -> what replaces it, and what stands there then.
    "int-for-float": (0.5, 1, 1.0),
    "bool-for-int": (3, True, True),
    "list-for-tuple": ((1, 2), [3], (3,)),
    "tuple-for-list": ([1, 2], (3,), [3]),
    "None-for-float": (0.5, None, None),
    "text-for-None": (None, "a", "a"),
}


@table("value, other, expected", LEEWAY)
def test_config_takes(value, other, expected):
  cfg = konfig.ConfigDict({"x": value})
  cfg.x = other
  assert cfg.x == expected
  assert type(cfg.x) is type(expected)


REFUSED = {
    "float-for-int": (1, 2.0),
    "int-for-bool": (True, 3),
    "int-for-text": ("a", 1),
    "text-for-int": (1, "a"),
    "text-for-float": (0.5, "a"),
}


@table("value, other", REFUSED)
def test_config_refuses(value, other):
  cfg = konfig.ConfigDict({"x": value})
  with pytest.raises(TypeError, match="cannot be casted"):
    cfg.x = other
  assert cfg.x == value


# Of the objects below, what optax makes is refused too, but with an error about
# `__new__` (tests/upstream/test_resolved_optimizer.py).
OBJECTS = {
    "function": len,
    "class": dict,
    "array": np.ones(2),
    "jax-array": jnp.ones(2),
    "numpy-float32": np.float32(1),
    "module": json,
}


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS.keys())
def test_config_refuses_object(value):
  with pytest.raises(ValueError, match="only accept other configurables"):
    konfig.ConfigDict({"x": value})


def test_stand_in_takes_any_name():
  cfg = lazy_optax.adm(learning_rate=0.1)
  assert cfg.__qualname__ == "optax:adm"
  with pytest.raises(AttributeError, match="no attribute 'adm'"):
    konfig.resolve(cfg)


def test_stand_in_resolves_to_what_it_stands_for():
  assert konfig.resolve(lazy_optax.adam) is optax.adam


def test_positional_arguments_have_numbers():
  cfg = lazy_optax.chain(lazy_optax.identity(), lazy_optax.zero_nans())
  assert cfg[0].__qualname__ == "optax:identity"
  assert cfg[-1].__qualname__ == "optax:zero_nans"
  assert list(json.loads(cfg.to_json())) == ["__qualname__", "0", "1"]


def test_qualname_can_be_changed():
  cfg = lazy_optax.constant_schedule(0.5)
  cfg.__qualname__ = "optax:exponential_decay"
  cfg.transition_steps = 1
  cfg.decay_rate = 0.5
  assert konfig.resolve(cfg)(2) == 0.125


def test_resolved_object_does_not_follow():
  cfg = lazy_optax.constant_schedule(value=0.5)
  schedule = konfig.resolve(cfg)
  cfg.value = 0.1
  assert schedule(0) == 0.5


def recorded(*values):
  """Appends its last argument to CALLS, in which the order can be seen."""
  CALLS.append(values[-1])
  return values[-1]


CALLS = []


def test_resolve_calls_from_the_inside_out():
  cfg = lazy_here.recorded(lazy_here.recorded("inner"), "outer")
  CALLS.clear()
  konfig.resolve(cfg)
  assert CALLS == ["inner", "outer"]


def test_error_tells_where_the_config_was_written():
  def here():
    return lazy_optax.sgd(learning_rate=0.1, momentu=0.9)

  def ends_here(error):
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    return frames[-1].name == "here"
  with pytest.raises(TypeError, match="'momentu'", check=ends_here):
    konfig.resolve({"optimizer": here()})


@pytest.fixture
def twice():
  """A config that has one part in two places."""
  part = lazy_optax.sgd(learning_rate=0.5)
  return konfig.ConfigDict({"train": part, "eval": part})


def test_part_used_twice_is_one_in_repr(twice):
  assert "&id001 optax.sgd(" in repr(twice)
  assert "*id001" in repr(twice)


def test_part_used_twice_is_one_in_json(twice):
  read_back = konfig.ConfigDict(json.loads(twice.to_json()))
  assert read_back.train is read_back.eval


def test_part_used_twice_is_one_when_resolved(twice):
  resolved = konfig.resolve(twice)
  assert resolved.train is resolved.eval


def test_part_used_twice_needs_a_config_dict(twice):
  with pytest.raises(TypeError, match="__id__"):
    konfig.resolve(json.loads(twice.to_json()))


def test_integer_keys_survive_json():
  cfg = konfig.ConfigDict({"scales": {20: 0.1}})
  read_back = konfig.ConfigDict(json.loads(cfg.to_json()))
  assert read_back.scales[20] == 0.1


def test_resolve_freezes_lists_and_dicts():
  cfg = konfig.ConfigDict({
      "__qualname__": "types:SimpleNamespace", "words": ["a"],
      "marks": {"a": 1}})
  frozen = konfig.resolve(cfg)
  assert frozen.words == ("a",)
  assert not isinstance(frozen.marks, dict)
  thawed = konfig.resolve(cfg, freeze=False)
  assert thawed.words == ["a"]
  assert isinstance(thawed.marks, dict)


def test_imports_needs_the_module():
  with pytest.raises(ImportError, match="no_such_module"):
    with konfig.imports():
      import no_such_module  # noqa: F401


def test_imports_takes_modules_only():
  with pytest.raises(ModuleNotFoundError, match="optax.sgd"):
    with konfig.imports():
      from optax import sgd  # noqa: F401


def test_imports_is_for_all_threads():
  found = []

  def import_something():
    import calendar
    found.append(isinstance(calendar, type(sys)))
  with konfig.imports():
    thread = threading.Thread(target=import_something)
    thread.start()
    thread.join()
  import_something()
  assert found == [False, True]


def test_mock_modules_replaces_every_module():
  with konfig.mock_modules():
    within = np.ones(2)
  assert isinstance(within, konfig.ConfigDict)
  assert isinstance(np.ones(2), np.ndarray)


def test_mock_modules_replaces_modules_only():
  sgd = optax.sgd
  with konfig.mock_modules():
    optimizer = sgd(learning_rate=0.1)
  assert isinstance(optimizer, optax.GradientTransformation)


LAMBDA = """
from kauldron import konfig
import optax
with konfig.mock_modules():
  rate = int(3.5)
  (lambda: int(3.5))()
"""


def test_mock_modules_leaves_a_lambda_without_builtins():
  names = {"__name__": "__main__", "__builtins__": builtins}
  with pytest.raises(NameError, match="'int' is not defined"):
    exec(LAMBDA, names)
  assert names["rate"] == 3


def test_mock_modules_leaves_konfig():
  config_dict = konfig.ConfigDict
  with konfig.mock_modules():
    within = konfig.ConfigDict
  assert within is config_dict


# konfig: references


OPERATIONS = {
    "x + 1": (lambda x: x + 1, 7),
    "1 - x": (lambda x: 1 - x, -5),
    "2 * x": (lambda x: 2 * x, 12),
    "x / 4": (lambda x: x / 4, 1.5),
    "x // 4": (lambda x: x // 4, 1),
    "x % 4": (lambda x: x % 4, 2),
    "x ** 2": (lambda x: x ** 2, 36),
    "-x": (lambda x: -x, -6),
    "x > 5": (lambda x: x > 5, True),
    "x == 5": (lambda x: x == 5, False),
}


@table("operation, expected", OPERATIONS)
def test_reference_is_calculated_with(operation, expected):
  cfg = konfig.ConfigDict({"x": 1})
  cfg.y = operation(cfg.ref.x)
  cfg.x = 6
  assert cfg.y == expected


def test_reference_to_a_text_has_its_methods():
  cfg = konfig.ConfigDict({"name": "run"})
  cfg.title = cfg.ref.name.upper() + "!"
  cfg.name = "trial"
  assert cfg.title == "TRIAL!"


def test_ref_fn_takes_several():
  cfg = konfig.ConfigDict({"name": "run", "steps": 3})
  cfg.title = konfig.ref_fn(
      "{} of {steps}".format, cfg.ref.name, steps=cfg.ref.steps)
  cfg.steps = 4
  assert cfg.title == "run of 4"


def test_reference_has_no_truth():
  cfg = konfig.ConfigDict({"x": 1})
  with pytest.raises(NotImplementedError, match="control flow"):
    bool(cfg.ref.x)


def test_reference_is_no_argument_of_max():
  cfg = konfig.ConfigDict({"x": 1})
  with pytest.raises(NotImplementedError, match="control flow"):
    max(cfg.ref.x, 5)


def test_reference_may_come_before_its_field():
  cfg = konfig.ConfigDict()
  cfg.y = cfg.ref.x * 2
  cfg.x = 4
  assert cfg.y == 8


def test_field_that_is_set_no_longer_follows():
  cfg = konfig.ConfigDict({"x": 1})
  cfg.y = cfg.ref.x * 2
  cfg.z = cfg.ref.y + 1
  cfg.same = cfg.ref.x
  cfg.y = 10
  cfg.same = 7
  referred_to = cfg.x
  cfg.x = 6
  assert (referred_to, cfg.y, cfg.z, cfg.same) == (1, 10, 11, 7)


COPIES = {  # Of a config in which y is two times x -> y when x becomes 5.
    "deepcopy": (copy.deepcopy, 10),
    "or": (lambda cfg: cfg | {"other": 1}, 10),
    "copy_and_resolve_references":
        (lambda cfg: cfg.copy_and_resolve_references(), 2),
    "copy": (copy.copy, 2),
    "ConfigDict": (konfig.ConfigDict, 2),
    "json":
        (lambda cfg: konfig.ConfigDict(json.loads(cfg.to_json())), 2),
}


@table("copy_of, expected", COPIES)
def test_copy_of_a_config_follows_or_not(copy_of, expected):
  cfg = konfig.ConfigDict({"x": 1})
  cfg.y = cfg.ref.x * 2
  copied = copy_of(cfg)
  copied.x = 5
  assert copied.y == expected
  assert cfg.x == 1
  assert cfg.y == 2


def test_ref_copy_follows_the_original():
  cfg = konfig.ConfigDict({"x": 1})
  copied = konfig.ref_copy(cfg)
  cfg.x = 5
  assert copied.x == 5


def test_or_merges_what_is_nested():
  cfg = konfig.ConfigDict({"a": {"x": 1}}) | {"a": {"y": 2}}
  assert cfg.a.x == 1
  assert cfg.a.y == 2


def test_placeholder_is_none_until_it_is_set():
  cfg = konfig.ConfigDict({"x": konfig.placeholder(float)})
  cfg.y = cfg.ref.x
  assert cfg.x is None
  cfg.x = 0.5
  assert cfg.y == 0.5


def test_placeholder_has_a_type():
  cfg = konfig.ConfigDict({"x": konfig.placeholder(float)})
  with pytest.raises(TypeError, match="cannot be casted"):
    cfg.x = "a"


def test_schedule_of_a_trainer_is_one_object():
  cfg = tour.get_config()
  assert cfg.optimizer.learning_rate is cfg.schedules["learning_rate"]


# konfig: the command line


CONFIG_FILE = """
import dataclasses

from kauldron import konfig

with konfig.imports():
  import optax


@dataclasses.dataclass(frozen=True)
class ConfigArgs:
  scale: float = 1.0


def get_config(args=ConfigArgs()):
  cfg = konfig.ConfigDict({"steps": 10, "name": "run", "rate": 0.5})
  cfg.rate *= args.scale
  cfg.decay = cfg.ref.steps // 2
  cfg.optimizer = optax.sgd(learning_rate=cfg.ref.rate)
  return cfg
"""


@pytest.fixture
def parse(tmp_path, monkeypatch):
  """Returns a function: flags -> the config that the command line makes."""
  from absl import flags
  path = tmp_path / "my_config.py"
  path.write_text(CONFIG_FILE)

  def parse(*arguments, path=str(path)):
    argv = ["main", f"--cfg={path}", *arguments]
    monkeypatch.setattr(sys, "argv", argv)  # The flag reads this as well.
    monkeypatch.delitem(sys.modules, "cfg_config", raising=False)
    values = flags.FlagValues()
    flag = konfig.DEFINE_config_file("cfg", flag_values=values)
    values(argv)
    return flag.value
  return parse


FLAGS = {  # Flags -> path in the config, and what stands there.
    "nothing": ([], "steps", 10),
    "int": (["--cfg.steps=30"], "steps", 30),
    "text": (["--cfg.name=trial"], "name", "trial"),
    "what-follows": (["--cfg.steps=30"], "decay", 15),
    "nested": (["--cfg.optimizer.learning_rate=0.1"],
               "optimizer.learning_rate", 0.1),
    "call": (["--cfg.optimizer=py::optax.adam(learning_rate=0.2)"],
             "optimizer.__qualname__", "optax:adam"),
    "argument-of-call": (["--cfg.optimizer=py::optax.adam(learning_rate=0.2)"],
                         "optimizer.learning_rate", 0.2),
    "kd": (["--cfg.aux=py::kd.evals.EveryNSteps(2)"],
           "aux.__qualname__", "kauldron.kd:evals.EveryNSteps"),
    "nn": (["--cfg.aux=py::nn.Dense(2)"],
           "aux.__qualname__", "flax.linen:Dense"),
    "np": (["--cfg.aux=py::np.ones(2)"], "aux.__qualname__", "numpy:ones"),
    "list": (["--cfg.aux=py::[-2, -.5]"], "aux", [-2, -0.5]),
    "tuple": (["--cfg.aux=py::(False, None, 'x')"], "aux", (False, None, "x")),
    "dict": (["--cfg.aux=py::{'a': 1}"], "aux.a", 1),
    "args": (["--cfg.__args__.scale=4.0"], "rate", 2.0),
}


@table("arguments, path, expected", FLAGS)
def test_flags_change_the_config(parse, arguments, path, expected):
  cfg = parse(*arguments)
  found = kontext.get_by_path(cfg, path)
  assert found == expected
  assert type(found) is type(expected)


COMMANDS = {  # Of the command line, called from Python -> what it prints.
    "config.Show": "decay_steps=100",
    "config.Resolve": "Successfully resolved config!",
    "data.ElementSpec": f"label: int32[{BATCH_SIZE}, 1]",
    "run.EvalShape": "'logits'",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_from_python(tmp_path, capsys, name):
  import kauldron.cli.run  # noqa: F401  `kd.cli` does not import this one.
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  command = kontext.get_by_path(kd.cli, name)
  command(cfg=cfg)()
  assert COMMANDS[name] in capsys.readouterr().out


def test_flag_takes_arguments_of_the_config_file(parse, tmp_path):
  cfg = parse(path=f"{tmp_path}/my_config.py:scale=4.0")
  assert cfg.rate == 2.0


# kontext: paths


ARRAY = np.arange(24.0).reshape(2, 3, 4)
TREE = {"batch": {"x": ARRAY}, "preds": [{"logits": ARRAY}], "a b": {3: 5}}
PATHS = {  # Path -> its parts, and what is there in TREE.
    "batch.x": (["batch", "x"], ARRAY),
    "batch.x[1]": (["batch", "x", 1], ARRAY[1]),
    "batch.x[-1]": (["batch", "x", -1], ARRAY[-1]),
    "batch.x[0,1:]":
        (["batch", "x", (0, slice(1, None))], ARRAY[0, 1:]),
    "batch.x[...,None,::2]":
        (["batch", "x", (..., None, slice(None, None, 2))],
         ARRAY[..., None, ::2]),
    "batch.x.size": (["batch", "x", "size"], 24),
    "preds[0].logits": (["preds", 0, "logits"], ARRAY),
    "['a b'][3]": (["a b", 3], 5),
}


@pytest.mark.parametrize("path", PATHS)
def test_path_is_found(path):
  _, expected = PATHS[path]
  np.testing.assert_array_equal(kontext.get_by_path(TREE, path), expected)


@pytest.mark.parametrize("path", PATHS)
def test_path_has_parts(path):
  parts, _ = PATHS[path]
  assert list(kontext.Path.from_str(path)) == parts


@pytest.mark.parametrize("path", PATHS)
def test_path_is_written_as_it_was_read(path):
  parts, _ = PATHS[path]
  assert str(kontext.Path(*parts)) == path


def test_path_is_built_by_attributes():
  path = kontext.path_builder_from("preds", dict).heads[1].logits
  assert str(path) == "preds.heads[1].logits"


def test_path_has_a_default():
  assert kontext.get_by_path(TREE, "batch.y", default=3) == 3


def test_filter_keeps_what_matches():
  params = {"encoder": {"kernel": 1, "bias": 2}, "head": {"kernel": 3}}
  found = kontext.filter_by_path(params, "**.kernel")
  assert found == {"encoder": {"kernel": 1}, "head": {"kernel": 3}}


def test_set_by_path_adds_to_a_dict():
  tree = {"a": {}}
  kontext.set_by_path(tree, "a.b", 1)
  assert tree == {"a": {"b": 1}}


def test_set_by_path_refuses_a_tuple():
  with pytest.raises(ValueError, match="Only dict, list"):
    kontext.set_by_path({"a": (1, 2)}, "a[1]", 3)


def test_key_takes_no_wildcard():
  loss = kd.losses.L2(preds="**.logits", targets="batch.x")
  with pytest.raises(ValueError, match="Invalid part"):
    loss(context={**TREE, "step": 0})


def test_object_serves_as_context():
  context = kd.train.Context(
      step=0, batch={"x": ARRAY}, preds={"logits": ARRAY + 2})
  loss = kd.losses.L2(preds="preds.logits", targets="batch.x")
  np.testing.assert_allclose(loss(context=context), 4)


def test_loss_takes_arrays_too():
  loss = kd.losses.L2()
  np.testing.assert_allclose(loss(preds=ARRAY + 2, targets=ARRAY), 4)


# ktyping and the older typing: axes


SPECS = {  # Axes of y, beside x: "a b" of (2, 6) -> what fits and what not.
    "b a": ((6, 2), (2, 6)),
    "_ 6": ((9, 6), (9, 5)),
    "_x 6": ((9, 6), (9, 5)),
    "... b": ((1, 6), (6, 1)),
    "*_ b": ((3, 1, 6), (6, 1)),
    "*c a": ((2,), (3,)),
    "b *c": ((6, 4, 5), (4, 6)),
    "#b a": ((1, 2), (3, 2)),
    "a*b": ((12,), (8,)),
    "a**2+1": ((5,), (4,)),
    "b//a": ((3,), (4,)),
    "b-a": ((4,), (3,)),
    "(a+b)*2": ((16,), (14,)),
    "max(a,b)": ((6,), (2,)),
    "min(a,b)": ((2,), (6,)),
    "a|b": ((2,), (3,)),
    "+c a": ((5, 2), (2,)),
    "b? a": ((2,), (5, 2)),
    "a*c": ((12,), (3,)),
    "sum(a,b)": ((8,), (6,)),
    "prod(a,b)": ((12,), (8,)),
}
NEWER = ["+c a", "b? a", "a*c", "a|b", "sum(a,b)", "prod(a,b)"]
JUDGED = [(checker, spec) for checker in CHECKERS for spec in SPECS
          if checker == "ktyping" or spec not in NEWER]


def takes_and_gives(checker, spec):
  """Returns a function of x and y, checked, that returns its third argument."""
  @checker.typechecked
  def call(x: checker.Float["a b"], y: checker.Float[spec],
           result) -> checker.Float[spec]:
    del x, y
    return result
  return call


@pytest.mark.parametrize("name, spec", JUDGED)
def test_axes_that_fit(name, spec):
  checker, _ = CHECKERS[name]
  call = takes_and_gives(checker, spec)
  fits, _ = SPECS[spec]
  found = call(np.ones((2, 6)), np.ones(fits), np.ones(fits))
  assert found.shape == fits


@pytest.mark.parametrize("name, spec", JUDGED)
def test_axes_of_an_argument_that_do_not_fit(name, spec):
  checker, error = CHECKERS[name]
  call = takes_and_gives(checker, spec)
  fits, wrong = SPECS[spec]
  with pytest.raises(error, match="argument"):
    call(np.ones((2, 6)), np.ones(wrong), np.ones(fits))


@pytest.mark.parametrize("name, spec", JUDGED)
def test_axes_of_a_result_that_do_not_fit(name, spec):
  checker, error = CHECKERS[name]
  call = takes_and_gives(checker, spec)
  fits, wrong = SPECS[spec]
  with pytest.raises(error, match="return value|return type"):
    call(np.ones((2, 6)), np.ones(fits), np.ones(wrong))


@pytest.mark.parametrize("spec", NEWER)
def test_axes_that_the_older_checker_does_not_know(spec):
  call = takes_and_gives(kd.typing, spec)
  fits, _ = SPECS[spec]
  with pytest.raises(kd.typing.TypeCheckError):
    call(np.ones((2, 6)), np.ones(fits), np.ones(fits))


SIZES = {  # Axes -> their sizes, where a is 2 and b is 6.
    "a b": (2, 6),
    "b//a": (3,),
    "b**2-1": (35,),
    "b%4": (2,),
    "-a+8": (6,),
    "7": (7,),
    "a*b": (12,),
    "(a+b)*2": (16,),
    "max(a,b)": (6,),
    "min(a,b)": (2,),
    "sum(a,b)": (8,),
    "prod(a,b)": (12,),
}


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.parametrize("spec", SIZES)
def test_sizes_are_calculated(name, spec):
  checker, _ = CHECKERS[name]
  sizes = kt.shape if checker is kt else checker.Shape

  @checker.typechecked
  def call(x: checker.Float["a b"]):
    del x
    return sizes(spec)
  assert call(np.ones((2, 6))) == SIZES[spec]


SOLVED = {  # Axes of y with one unknown -> shape of y, and the unknown's size.
    "a*c": ((12,), 6),
    "c+1": ((7,), 6),
    "c-1": ((7,), 8),
    "a+c": ((7,), 5),
    "a c*a": ((2, 8), 4),
}


@table("spec, shape, expected", {
    spec: (spec, *row) for spec, row in SOLVED.items()})
def test_unknown_axis_is_solved(spec, shape, expected):
  @kt.typechecked
  def call(x: kt.Float["a b"], y: kt.Float[spec]):
    del x, y
    return kt.dim["c"]
  assert call(np.ones((2, 6)), np.ones(shape)) == expected


def test_sizes_in_a_block():
  with kt.typechecked():
    kt.check_type(np.ones((3, 8)), kt.Float["*b n"])
    kt.dim["half"] = 4
    assert kt.dim["*b"] == (3,)
    assert "n" in kt.dim
    assert "m" not in kt.dim
    assert "half: 4" in str(kt.dim)
    assert kt.isinstance((3, 4), kt.Shape["*b half"])
    assert not kt.isinstance((3, 5), kt.Shape["*b half"])


SCALARS = {  # Value -> is it a ScalarInt, is it a ScalarFloat.
    "2": (2, True, False),
    "2.0": (2.0, False, True),
    "np.int32": (np.int32(2), True, False),
    "np.float32": (np.float32(2), False, True),
    "array": (np.ones(2, int), False, False),
}


@table("value, is_int, is_float", SCALARS)
def test_scalars(value, is_int, is_float):
  with kt.typechecked():
    assert kt.isinstance(value, kt.ScalarInt) == is_int
    assert kt.isinstance(value, kt.ScalarFloat) == is_float


TREES = {  # Tree -> is it one of float arrays that share n.
    "equal": ([np.ones(2), {"a": np.ones(2)}], True),
    "sizes-differ": ([np.ones(2), {"a": np.ones(3)}], False),
    "other-dtype": ([np.ones(2), {"a": np.ones(2, int)}], False),
    "no-array": ([np.ones(2), "text"], False),
}


@table("tree, expected", TREES)
def test_leaves_of_a_tree(tree, expected):
  with kt.typechecked():
    assert kt.isinstance(tree, kt.PyTree[kt.Float["n"]]) == expected


def test_several_axes_have_a_tuple_of_sizes():
  with kt.typechecked():
    kt.dim["*b"] = (2, 3)
    assert kt.shape("*b") == (2, 3)
    with pytest.raises(ValueError, match="tuple"):
      kt.dim["*c"] = 2


def test_check_type_of_the_older_checker():
  array = np.ones(3)
  kd.typing.check_type(array, kd.typing.Float["3"])
  with pytest.raises(kd.typing.TypeCheckError):
    kd.typing.check_type(array, kd.typing.Float["4"])


def test_checker_can_be_switched_off():
  # After an error in the block it would stay so
  # (tests/upstream/test_config_after_error.py).
  checked = kt.typechecked(tour.centered)
  with kt.Config(typechecking_enabled=False):
    assert checked(np.ones((5, 5)), np.ones(5)).shape == (5, 5)
  with pytest.raises(kt.KTypeCheckError):
    checked(np.ones((5, 5)), np.ones(5))


def test_generator_is_checked_when_it_starts():
  @kt.typechecked
  def pairs(x: kt.Float["n"], y: kt.Float["n"]):
    yield from zip(x, y, strict=True)
  assert len(list(pairs(np.ones(2), np.ones(2)))) == 2
  generator = pairs(np.ones(2), np.ones(3))
  with pytest.raises(kt.KTypeCheckError, match="argument y"):
    next(generator)


def test_checker_works_under_jit():
  with pytest.raises(kt.KTypeCheckError, match="argument mean"):
    jax.jit(tour.centered)(np.ones((5, 5)), np.ones(5))
  assert jax.jit(tour.centered)(np.ones((5, 5)), np.ones((5, 1))).ndim == 2


@kt.typechecked
@dataclasses.dataclass
class Checked:
  """A dataclass that is checked."""

  x: kt.Float["n"]


@dataclasses.dataclass
class Derived(Checked):
  """A class that derives from it, and is not decorated."""

  y: int = 0


def test_subclass_of_a_checked_dataclass_is_not_checked():
  with pytest.raises(kt.KTypeCheckError):
    Checked(3)
  assert Derived(3).x == 3


def test_plain_subclass_of_a_checked_dataclass_is_checked():
  class Plain(Checked):
    pass
  with pytest.raises(kt.KTypeCheckError):
    Plain(3)


@kt.typechecked
def checks_within(x: kt.Float["n"], array, in_a_block):
  """Checks another array, with the sizes of this call or without them."""
  del x
  if not in_a_block:
    return kt.check_type(array, kt.Float["n"])
  with kt.typechecked():
    return kt.check_type(array, kt.Float["n"])


def test_isinstance_needs_a_scope():
  with pytest.raises(kt.NoActiveScopeError):
    kt.isinstance(np.ones(2), kt.Float["n"])


def test_block_in_a_checked_function_knows_no_sizes():
  checks_within(np.ones(5), np.ones(9), in_a_block=True)
  with pytest.raises(kt.KTypeCheckError):
    checks_within(np.ones(5), np.ones(9), in_a_block=False)


LATE = """
from __future__ import annotations
import dataclasses
from kauldron import kd
kt = kd.ktyping

@kt.typechecked
@dataclasses.dataclass
class Late:
  x: kt.Float["n"]
"""


def test_dataclass_with_late_annotations_is_not_checked(tmp_path, monkeypatch):
  (tmp_path / "late.py").write_text(LATE)
  monkeypatch.syspath_prepend(tmp_path)
  import late
  assert late.Late(3).x == 3


def test_checked_dataclass_is_checked_when_replaced():
  noise = tour.Noise(mean=np.ones(5), scale=np.ones(5), key=jax.random.key(0))
  with pytest.raises(kt.KTypeCheckError, match="'scale'"):
    dataclasses.replace(noise, scale=np.ones(2))


# ktyping and the older typing: dtypes


DTYPES = ["Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16",
          "UInt32", "UInt64", "Float16", "BFloat16", "Float32", "Float64",
          "Complex64", "Complex128"]
SIGNED = DTYPES[1:5]
UNSIGNED = DTYPES[5:9]
FLOATS = DTYPES[9:13]
COMPLEX = DTYPES[13:]
TYPES = {name: [name] for name in DTYPES} | {  # Type -> dtypes of its arrays.
    "Int": SIGNED + UNSIGNED,
    "SInt": SIGNED,
    "UInt": UNSIGNED,
    "IntOrBool": ["Bool", *SIGNED, *UNSIGNED],
    "Float": FLOATS,
    "Complex": COMPLEX,
    "Num": SIGNED + UNSIGNED + FLOATS + COMPLEX,
    "Array": DTYPES,
}
OLDER_TYPES = {
    "Bool": ["Bool"],
    "UInt8": ["UInt8"],
    "UInt32": ["UInt32"],
    "Float32": ["Float32"],
    "Complex64": ["Complex64"],
    "Int": SIGNED,  # Differs (tests/upstream/test_unsigned_integers.py).
    "Integer": SIGNED + UNSIGNED,
    "Float": FLOATS,
    "Complex": COMPLEX,
    "Num": SIGNED + UNSIGNED + FLOATS + COMPLEX,
    "Array": DTYPES,
    "XArray": DTYPES,
    "TfArray": [],
    "TfFloat": [],
}


def dtypes_of(array_type):
  """Returns the dtypes that NumPy arrays of a type may have."""
  return [name for name in DTYPES if isinstance(
      np.ones(3, jnp.dtype(name.lower())), array_type["3"])]


@pytest.mark.parametrize("name", TYPES)
def test_dtypes(name):
  assert dtypes_of(getattr(kt, name)) == TYPES[name]


@pytest.mark.parametrize("name", TYPES)
def test_type_has_its_name(name):
  assert getattr(kt, name).__name__ == name


@pytest.mark.parametrize("name", OLDER_TYPES)
def test_dtypes_of_the_older_checker(name):
  assert dtypes_of(getattr(kd.typing, name)) == OLDER_TYPES[name]


OF_LIBRARIES = [name for name in TYPES if name != "BFloat16"]


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_x_type_takes_arrays_of_any_library(name):
  array_type = getattr(kt, f"X{name}")
  assert array_type.__name__ == f"X{name}"
  assert dtypes_of(array_type) == TYPES[name]


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_tf_type_takes_no_numpy(name):
  array_type = getattr(kt, f"Tf{name}")
  assert array_type.__name__ == f"Tf{name}"
  assert dtypes_of(array_type) == []


@pytest.mark.parametrize("name", ["Float32", "TfFloat32", "XFloat32"])
def test_which_types_take_tensorflow(name):
  import tensorflow as tf
  is_one = isinstance(tf.ones(3), getattr(kt, name)["3"])
  assert is_one == (name != "Float32")


def test_array_spec_has_shape_and_dtype():
  spec = enp.ArraySpec.from_array(jnp.zeros((2, 3), jnp.float32))
  assert spec.shape == (2, 3)
  assert spec.dtype == np.float32


# Losses


LOGITS, LABELS, MASK = tour.random_predictions()
VALUES = tour.focal_values(LOGITS, LABELS)
CONTEXT = {
    "preds": LOGITS, "step": 4,
    "batch": {"label": LABELS, "mask": MASK, "nothing": 0 * MASK,
              "flat": MASK[:, 0]}}
FOCAL = tour.FocalLoss(logits="preds", labels="batch.label")


def part_of(context, rows):
  """Returns the context of some of the examples."""
  batch = {name: array[rows] for name, array in context["batch"].items()}
  return {**context, "preds": context["preds"][rows], "batch": batch}


FIRST = part_of(CONTEXT, slice(0, 10))
REST = part_of(CONTEXT, slice(10, 30))

LOSSES = {  # Fields of a loss -> its value by hand.
    "plain": ({}, VALUES.mean()),
    "mask": ({"mask": "batch.mask"}, VALUES[MASK == 1].mean()),
    "by-values": ({"mask": "batch.mask", "normalize_by": "values"},
                  (VALUES * MASK).mean()),
    "nothing-counts": ({"mask": "batch.nothing"}, 0.0),
    "weight": ({"weight": 0.25}, 0.25 * VALUES.mean()),
    "schedule": ({"weight": lambda step: 0.5 * step}, 2 * VALUES.mean()),
    "weight-and-mask": ({"weight": 0.25, "mask": "batch.mask"},
                        0.25 * VALUES[MASK == 1].mean()),
}


@table("fields, expected", LOSSES)
def test_loss(fields, expected):
  loss = dataclasses.replace(FOCAL, **fields)
  np.testing.assert_allclose(loss(context=CONTEXT), expected, rtol=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgottenKey(kd.metrics.Metric):
  """A metric with a key for which `get_state` has no argument."""

  preds: kontext.Key = kontext.REQUIRED
  labels: kontext.Key = kontext.REQUIRED

  def get_state(self, preds):
    return preds


def test_key_without_an_argument_is_named():
  metric = ForgottenKey(preds="preds", labels="batch.label")
  with pytest.raises(TypeError, match="does not match the Key annotations"):
    metric.get_state_from_context(CONTEXT)


def test_loss_works_under_jit():
  np.testing.assert_allclose(
      jax.jit(FOCAL)(context=CONTEXT), VALUES.mean(), rtol=1e-5)


@table("fields, expected", LOSSES)
def test_merged_loss_is_that_of_all(fields, expected):
  loss = dataclasses.replace(FOCAL, **fields)
  get_state = jax.jit(loss.get_state_from_context)
  merged = get_state(FIRST).merge(get_state(REST))
  value = merged.finalize().compute()
  np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_mask_is_broadcast_to_the_values():
  context = {"preds": np.eye(3), "targets": np.zeros((3, 3)), "step": 0,
             "mask": np.array([1.0, 1.0, 0.0])}
  loss = kd.losses.L2(preds="preds", targets="targets", mask="mask")
  np.testing.assert_allclose(loss(context=context), 2 / 6)


def test_mask_that_cannot_be_broadcast():
  loss = dataclasses.replace(FOCAL, mask="batch.flat")
  with pytest.raises(ValueError, match="Mask .30,. must always be broadcast"):
    loss(context=CONTEXT)


def test_schedule_as_weight_needs_a_step():
  loss = dataclasses.replace(FOCAL, weight=lambda step: step)
  with pytest.raises(ValueError, match="step is required"):
    loss(logits=LOGITS, labels=LABELS)


# Metrics and their states


def test_merged_metric_is_that_of_all():
  metric = tour.MeanRecall(
      logits="preds", labels="batch.label", mask="batch.mask")
  get_state = jax.jit(metric.get_state_from_context)
  merged = get_state(FIRST).merge(get_state(REST)).finalize().compute()
  kept = MASK[:, 0] == 1
  by_hand = tour.recall_by_hand(LOGITS[kept], LABELS[kept])
  np.testing.assert_allclose(merged, by_hand, rtol=1e-5)


@flax.struct.dataclass
class Collected(kd.metrics.AutoState):
  """A state with a field of every kind."""

  total: kt.Float[""] = kd.metrics.sum_field()
  every: kt.Int["n"] = kd.metrics.concat_field()
  first: kt.Int["n"] = kd.metrics.truncate_field(num_field="num")
  num: int = kd.metrics.static_field(default=3)


def collected(number):
  """Returns a state of the numbers from 0 on."""
  numbers = jnp.arange(number)
  return Collected(total=jnp.float32(number), every=numbers, first=numbers)


MERGED = {  # Field -> its value in the merged state of 2 and 4.
    "total": ("total", 6),
    "every": ("every", [0, 1, 0, 1, 2, 3]),
    "first": ("first", [0, 1, 0]),
    "num": ("num", 3),
}


@table("field, expected", MERGED)
def test_fields_of_merged_states(field, expected):
  merged = collected(2).merge(collected(4)).finalize()
  np.testing.assert_array_equal(getattr(merged, field), expected)


@table("field, expected", MERGED)
def test_empty_state_changes_nothing(field, expected):
  merged = Collected.empty().merge(collected(2)).merge(collected(4)).finalize()
  np.testing.assert_array_equal(getattr(merged, field), expected)


def test_finalize_makes_numpy_arrays():
  state = collected(2).finalize()
  assert isinstance(state.every, np.ndarray)


def test_types_of_fields_are_not_checked():
  assert Collected(
      total="text", every=None, first=jnp.ones((2, 2))).total == "text"


def test_sums_merge_under_jit():
  metric = tour.MeanRecall(logits="preds", labels="batch.label")
  state = metric.get_state_from_context(CONTEXT)
  twice = jax.jit(lambda state: state.merge(state))(state)
  np.testing.assert_array_equal(twice.seen, 2 * state.seen)


def test_collections_do_not_merge_under_jit():
  with pytest.raises(RuntimeError, match="should not be JIT"):
    jax.jit(lambda state: state.merge(state))(collected(2))


def test_states_of_different_metrics_do_not_merge():
  metric = tour.MeanRecall(logits="preds", labels="batch.label")
  masked = dataclasses.replace(metric, mask="batch.mask")
  state = metric.get_state_from_context(CONTEXT)
  other = masked.get_state_from_context(CONTEXT)
  with pytest.raises(ValueError, match="different metrics"):
    state.merge(other)


ROWS = {"a": np.array([[3.0, 4.0], [0.0, 5.0]]), "b": np.array([[12.0, 0.0]])}
NORMS = {  # Arguments of a reduced Norm -> what it is for ROWS.
    "concat": ({"axis": None, "aggregation_type": "concat"}, 194 ** 0.5),
    "average": ({"axis": None, "aggregation_type": "average"},
                (50 ** 0.5 + 12) / 2),
    "rows": ({}, (5 + 5 + 12) / 3),
}


@table("arguments, expected", NORMS)
def test_norm_of_a_tree(arguments, expected):
  metric = kd.metrics.TreeReduce(
      metric=kd.metrics.Norm(tensor="tree", **arguments))
  value = metric.get_state_from_context({"tree": ROWS}).compute()
  np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_tree_map_makes_a_value_of_each_array():
  metric = kd.metrics.TreeMap(metric=kd.metrics.Norm(tensor="tree", axis=None))
  values = metric.get_state_from_context({"tree": ROWS}).compute()
  np.testing.assert_allclose(values["a"], 50 ** 0.5)
  np.testing.assert_allclose(values["b"], 12)


def test_skip_if_missing_skips():
  metric = kd.metrics.SkipIfMissing(kd.metrics.Norm(tensor="grads"))
  assert metric.get_state_from_context({"tree": ROWS}).compute() == {}


# Trainer: what is checked when


def resolved(**changes):
  """Returns the Trainer of the tour's config, with changes, without workdir."""
  cfg = tour.get_config()
  cfg.workdir = "/not/used"
  for path, value in changes.items():
    kontext.set_by_path(cfg, path.replace("__", "."), value)
  return konfig.resolve(cfg)


def test_config_needs_a_workdir():
  with pytest.raises(TypeError, match="workdir"):
    konfig.resolve(tour.get_config())


def test_workdir_of_a_config_is_a_text():
  cfg = tour.get_config()
  with pytest.raises(TypeError, match="cannot be casted"):
    cfg.workdir = pathlib.Path("/not/used")


def test_trainer_without_config_has_a_workdir():
  trainer = kd.train.Trainer(
      train_ds=None, model=None, train_losses={}, optimizer=None)
  assert str(trainer.workdir) == "."


def test_misspelt_key_of_the_model_fails_at_init():
  trainer = resolved(model__image="batch.imag")
  with pytest.raises(KeyError, match="(?s)Did you mean.*'batch.image'"):
    trainer.init_state()


def test_misspelt_key_of_a_loss_fails_in_context_specs():
  trainer = resolved(train_losses__focal__labels="batch.labels")
  trainer.init_state()
  with pytest.raises(KeyError, match="(?s)Did you mean.*'batch.label'"):
    _ = trainer.context_specs


def test_misspelt_key_of_a_metric_fails_in_context_specs():
  trainer = resolved(train_metrics__recall__labels="batch.labels")
  with pytest.raises(KeyError, match="Did you mean"):
    _ = trainer.context_specs


def test_misspelt_key_of_an_evaluator_fails_when_it_runs():
  metric = lazy_kd.metrics.Norm(tensor="preds.logit")
  cfg = tour.get_config()
  cfg.workdir = "/not/used"
  cfg.eval_ds = held_out_ds()
  cfg.evals = {"test": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.EveryNSteps(1), metrics={"norm": metric})}
  trainer = konfig.resolve(cfg)
  _ = trainer.context_specs
  with pytest.raises(KeyError, match="Did you mean"):
    jax.eval_shape(
        trainer.evals["test"].step, step_nr=0, state=trainer.state_specs,
        batch=trainer.eval_ds.element_spec)


def test_misspelt_key_inside_skip_if_missing_is_not_seen():
  trainer = resolved(train_metrics__recall=lazy_kd.metrics.SkipIfMissing(
      lazy_kd.metrics.Norm(tensor="no_such.path")))
  assert trainer.context_specs.grads


def test_model_sees_no_parameters():
  trainer = resolved(model__image="params.head.kernel")
  with pytest.raises(KeyError, match="params"):
    trainer.init_state()


def test_loss_sees_no_gradients():
  trainer = resolved(train_losses__focal=lazy_kd.losses.Value(
      values="grads.head.kernel"))
  with pytest.raises(KeyError, match="grads"):
    _ = trainer.context_specs


SPECS_OF_CONTEXT = {  # Path -> shape.
    "batch.image": (BATCH_SIZE, 8, 8, 1),
    "params.head.kernel": (tour.WIDTH, 4),
    "preds.logits": (BATCH_SIZE, 4),
    "interms.encoder.__call__[0]": (BATCH_SIZE, tour.WIDTH),
    "interms.__call__[0].logits": (BATCH_SIZE, 4),
    "grads.head.kernel": (tour.WIDTH, 4),
    "updates.head.kernel": (tour.WIDTH, 4),
    "opt_state[0].mu.head.kernel": (tour.WIDTH, 4),
    "loss_total": (),
    "step": (),
}


@pytest.fixture(scope="module")
def context_paths():
  """Path -> what the context of a training step has there."""
  return kontext.flatten_with_path(resolved().context_specs)


@pytest.mark.parametrize("path", SPECS_OF_CONTEXT)
def test_context_has(context_paths, path):
  assert context_paths[path].shape == SPECS_OF_CONTEXT[path]


def test_context_has_collections():
  cfg = tour.get_config()
  cfg.workdir = "/not/used"
  cfg.model = lazy_tour.Normalized(image="batch.image")
  paths = kontext.flatten_with_path(konfig.resolve(cfg).context_specs)
  assert paths["collections.batch_stats.norm.mean"].shape == (64,)


def test_batch_that_the_devices_cannot_divide():
  if BATCH_SIZE % jax.device_count() or jax.device_count() == 1:
    pytest.skip("this needs several devices")
  trainer = resolved(train_ds__batch_size=jax.device_count() + 1)
  (batch,) = trainer.train_ds.take(1)
  with pytest.raises(ValueError, match="should evenly divide"):
    kd.sharding.device_put(batch, trainer.sharding.batch)


def test_batch_is_divided():
  trainer = resolved()
  (batch,) = trainer.train_ds.take(1).device_put(trainer.sharding.batch)
  shards = batch["image"].addressable_shards
  assert len(shards) == jax.device_count()
  assert shards[0].data.shape[0] == BATCH_SIZE // jax.device_count()


# A training of ten steps, looked at from all sides


NUM_STEPS = 10


def many_images():
  """Returns 250 examples, which are five batches of 48 and ten more."""
  return tour.stripes(250, seed=tour.SEED + 2)


def held_out_ds():
  """Returns the config of a data set that ends."""
  return lazy_kd.data.InMemoryPipeline(
      loader=lazy_here.many_images, batch_size=BATCH_SIZE, num_epochs=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown(kd.metrics.Metric):
  """A summary of what it is told to, whatever it sees."""

  as_text: bool

  @flax.struct.dataclass
  class State(kd.metrics.AutoState["Shown"]):
    """Holds nothing."""

    def compute(self):
      if self.parent.as_text:
        return "some text"
      return np.ones((1, 8, 8, 2), np.float32)  # Neither grey nor colours.

  def get_state(self):
    return self.State()


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class Scaled(kd.losses.Loss):
  """A loss with an input that may be left out."""

  preds: kontext.Key = kontext.REQUIRED
  scale: kontext.Key | None = None

  def get_values(self, preds, scale=2.0):
    return scale * preds


@pytest.mark.parametrize("scale, expected", [(None, 2), ("scale", 3)])
def test_argument_of_a_key_that_is_none_has_its_default(scale, expected):
  context = {"preds": np.ones(4), "scale": np.full(4, 3.0), "step": 0}
  loss = Scaled(preds="preds", scale=scale)
  assert loss(context=context) == expected


class ScaledEvaluator(kd.evals.EvaluatorBase):
  """An evaluator with a field of its own."""

  scale: float = 1.0


def test_evaluator_is_a_dataclass_already():
  evaluator = ScaledEvaluator(run=kd.evals.Once(0), scale=2.0)
  assert evaluator.scale == 2.0
  decorate = dataclasses.dataclass(frozen=True, kw_only=True)
  with pytest.raises(TypeError, match="Cannot overwrite attribute"):
    decorate(ScaledEvaluator)


class NormOfHead(kd.evals.EvaluatorBase):
  """Calculates on the device, which `train()` does not allow."""

  def evaluate(self, state, step):
    self.writer.write_scalars(step=step, scalars={"norm": float(
        jnp.linalg.norm(state.params["head"]["kernel"] + 1.0))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeverWanted(kd.ckpts.InitTransform):
  """Fails when it is used."""

  def transform(self, state):
    raise AssertionError("the transform was used")


def watched_config():
  """Returns a config with everything of which the tests below ask."""
  layer = "interms.encoder.__call__[0]"
  focal = lazy_tour.FocalLoss(logits="preds.logits", labels="batch.label")
  recall = lazy_tour.MeanRecall(logits="preds.logits", labels="batch.label")
  cfg = tour.get_config()
  cfg.num_train_steps = NUM_STEPS
  cfg.log_metrics_every = 10
  cfg.log_summaries_every = 5
  cfg.train_losses = {
      "growing": focal | {"weight": lazy_optax.linear_schedule(
          init_value=0.0, end_value=20.0, transition_steps=20)},
      "half": focal | {"weight": 0.5}}
  cfg.train_metrics = {
      "recall": recall,
      "layer": lazy_kd.metrics.Norm(tensor=layer),
      "gradient": lazy_kd.metrics.SkipIfMissing(
          lazy_kd.metrics.Norm(tensor="grads.head.kernel", axis=None))}
  cfg.train_summaries = {
      "layer": lazy_kd.summaries.HistogramSummary(tensor=layer),
      "images": lazy_kd.summaries.ShowImages(
          images="batch.image", in_vrange=(-2, 2), cmap="gray",
          num_images=60),
      "text": lazy_here.Shown(as_text=True),
      "two_channels": lazy_here.Shown(as_text=False)}
  cfg.eval_ds = held_out_ds()
  cfg.evals = {
      "held_out": lazy_kd.evals.Evaluator(run=lazy_kd.evals.EveryNSteps(5)),
      "two_batches": lazy_kd.evals.Evaluator(
          run=lazy_kd.evals.Once(10), num_batches=2, cache=True,
          metrics={"recall": recall}, summaries={})}
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(save_interval_steps=5)
  return cfg


@dataclasses.dataclass
class Run:
  """A training that has ended, and the same steps taken one by one."""

  cfg: konfig.ConfigDict
  state: kd.train.TrainState  # What `train()` returned.
  aux: kd.train.AuxiliariesState
  states: list[kd.train.TrainState]  # Before each of the steps 0 to 10 ...
  batches: list  # ... the batch of that step ...
  last: kd.train.TrainState  # ... and the state after it.

  def events(self, tag, collection="train"):
    return tour.read_events(self.cfg.workdir, tag, collection)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The training."""
  cfg = watched_config()
  cfg.workdir = str(tmp_path_factory.mktemp("watched"))
  state, aux = konfig.resolve(cfg).train()

  trainer = konfig.resolve(cfg)
  last = trainer.init_state()
  states = []
  batches = []
  ds = trainer.train_ds.take(NUM_STEPS + 1)
  for batch in ds.device_put(trainer.sharding.batch):
    states.append(jax.device_get(last))
    batches.append(jax.device_get(batch))
    last, _ = trainer.trainstep.step(last, batch)
  return Run(cfg, state, aux, states, batches, last)


def layers_by_hand(params, image):
  """Returns what encoder and head of the MLP put out."""
  flat = image.reshape(image.shape[0], -1)
  encoded = flat @ params["encoder"]["kernel"]
  return encoded, np.maximum(encoded, 0) @ params["head"]["kernel"]


def loss_by_hand(params, batch):
  """Returns the focal loss of a batch."""
  _, logits = layers_by_hand(params, batch["image"])
  return tour.focal_values(logits, batch["label"]).mean()


def first_images(number):
  """Returns the first of the held-out images, as the evaluator sees them."""
  return {name: array[:number] for name, array in many_images().items()}


def test_whole_state_is_that_of_the_loop(run):
  assert int(run.state.step) == NUM_STEPS + 1
  assert tour.distance(run.state.params, run.last.params) == 0
  assert tour.distance(run.state.opt_state, run.last.opt_state) == 0


def test_optimizer_counts_steps_too(run):
  assert int(run.state.opt_state[0].count) == NUM_STEPS + 1


def test_state_is_used_up_by_a_step():
  trainer = resolved()
  state = trainer.init_state()
  (batch,) = trainer.train_ds.take(1).device_put(trainer.sharding.batch)
  trainer.trainstep.step(state, batch)
  assert state.params["head"]["kernel"].is_deleted()


def test_checkify_names_the_operation_that_made_a_nan(tmp_path):
  with konfig.imports():
    from jax.experimental import checkify
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.writer = None
  cfg.checkpointer = None
  cfg.train_ds.loader = tour.lazy_tour.spoilt_images
  cfg.train_ds.shuffle = False
  cfg.stop_after_steps = 4  # A NaN is in the second batch.
  cfg.checkify_error_categories = checkify.float_checks
  with pytest.raises(ValueError, match="nan generated by primitive: dot"):
    konfig.resolve(cfg).train()


def test_step_returns_no_auxiliaries_unless_asked():
  trainer = resolved()
  state = trainer.init_state()
  (batch,) = trainer.train_ds.take(1).device_put(trainer.sharding.batch)
  state, aux = trainer.trainstep.step(state, batch)
  assert aux.loss_states is None
  _, aux = trainer.trainstep.step(state, batch, return_losses=True)
  assert set(aux.compute().loss_values) == {"losses/focal", "losses/total"}


@pytest.mark.parametrize("collection", ["train", "held_out"])
def test_weight_of_a_loss_is_that_of_the_step(run, collection):
  steps, growing = run.events("losses/growing", collection)
  _, half = run.events("losses/half", collection)
  weights = np.array(growing) / (2 * np.array(half))
  assert steps == [0, 5, 10]
  np.testing.assert_allclose(weights, [0, 5, 10], rtol=1e-5)


def test_reported_loss_includes_its_weight(run):
  _, half = run.events("losses/half")
  by_hand = [loss_by_hand(run.states[step].params, run.batches[step]) / 2
             for step in (0, 5, 10)]
  np.testing.assert_allclose(half, by_hand, rtol=1e-4)


def test_total_loss_is_the_sum(run):
  _, growing = run.events("losses/growing")
  _, half = run.events("losses/half")
  _, total = run.events("losses/total")
  np.testing.assert_allclose(total, np.add(growing, half), rtol=1e-6)


LOGGED = {  # Tag -> the steps at which it is written.
    "losses/half": ("losses/half", [0, 5, 10]),
    "schedules/learning_rate": ("schedules/learning_rate", [0, 5, 10]),
    "metrics/recall": ("metrics/recall", [0, 10]),
    "summaries/layer": ("summaries/layer", [0, 5, 10]),
    "summaries/images": ("summaries/images", [0, 5, 10]),
    "summaries/text": ("summaries/text", [0, 5, 10]),
    "parameters": ("parameters", [0]),
    "context_spec": ("context_spec", [0]),
}


@table("tag, expected", LOGGED)
def test_steps_at_which_it_is_logged(run, tag, expected):
  steps, _ = run.events(tag)
  assert steps == expected


def test_schedule_is_logged_as_it_is_used(run):
  steps, rates = run.events("schedules/learning_rate")
  schedule = optax.cosine_decay_schedule(tour.LEARNING_RATE, NUM_STEPS)
  by_hand = [schedule(step) for step in steps]
  np.testing.assert_allclose(rates, by_hand, rtol=1e-6)


def test_metric_sees_the_parameters_before_their_update(run):
  _, norms = run.events("metrics/layer")
  encoded, _ = layers_by_hand(
      run.states[10].params, run.batches[10]["image"])
  by_hand = np.linalg.norm(encoded, axis=-1).mean()
  np.testing.assert_allclose(norms[-1], by_hand, rtol=1e-4)


def test_metric_sees_gradients(run):
  def loss(params):
    preds = tour.MLP().apply({"params": params}, run.batches[10]["image"])
    values = tour.focal_values(preds["logits"], run.batches[10]["label"], jnp)
    return 10.5 * values.mean()  # At step 10, the weights are 10 and 0.5.
  grads = jax.grad(loss)(run.states[10].params)
  _, norms = run.events("metrics/gradient")
  by_hand = np.linalg.norm(grads["head"]["kernel"])
  np.testing.assert_allclose(norms[-1], by_hand, rtol=1e-4)


def test_last_auxiliaries_are_what_was_written(run):
  values = run.aux.compute()
  _, losses = run.events("losses/total")
  _, recalls = run.events("metrics/recall")
  assert losses[-1] == np.float32(values.loss_values["losses/total"])
  assert recalls[-1] == np.float32(values.metric_values["metrics/recall"])


def test_histogram_holds_what_the_layer_puts_out(run):
  encoded, _ = layers_by_hand(
      run.states[10].params, run.batches[10]["image"])
  histogram = run.aux.summary_states["layer"].finalize().compute()
  np.testing.assert_allclose(histogram.tensor, encoded.ravel(), atol=1e-4)


def test_histogram_is_that_of_numpy(run):
  tensor = run.aux.summary_states["layer"].finalize().compute().tensor
  _, histograms = run.events("summaries/layer")
  left, right, counts = np.array(histograms[-1]).T
  expected, edges = np.histogram(tensor, bins=30)
  np.testing.assert_allclose(left, edges[:-1], atol=1e-5)
  np.testing.assert_allclose(right, edges[1:], atol=1e-5)
  np.testing.assert_allclose(counts, expected, atol=1)


def pictures_of(written):
  """Returns the pixels of PNG files, (n, h, w, channels), in [0, 1]."""
  from matplotlib import image
  _, _, *files = written
  return np.array([image.imread(io.BytesIO(file)) for file in files])


def test_images_go_through_a_colour_map(run):
  _, written = run.events("summaries/images")
  pixels = pictures_of(written[-1])[..., :3]
  grey = (run.batches[10]["image"] + 2) / 4  # From [-2, 2] to [0, 1].
  np.testing.assert_allclose(pixels, grey.repeat(3, -1), atol=2 / 255)


def test_images_of_several_batches(run):
  _, written = run.events("summaries/images", "held_out")
  pixels = pictures_of(written[-1])[..., :1]
  grey = (first_images(60)["image"] + 2) / 4
  np.testing.assert_allclose(pixels, grey, atol=2 / 255)


def test_summary_of_two_channels_is_dropped(run):
  values = run.aux.compute().summary_values
  assert values["summaries/two_channels"].shape == (1, 8, 8, 2)
  with pytest.raises(KeyError):
    run.events("summaries/two_channels")


def test_text_is_written(run):
  _, texts = run.events("summaries/text")
  assert b"some text" in np.ravel(texts[0])


def test_paths_of_the_context_are_written(run):
  _, (text,) = run.events("context_spec")
  assert b"interms" in np.ravel(text)[0]


FILES = ["config.json", "element_spec.json", "checkpoints", "train", "held_out"]


@pytest.mark.parametrize("name", FILES)
def test_work_directory_has(run, name):
  assert pathlib.Path(run.cfg.workdir, name).exists()


# Evaluators


def test_evaluator_drops_what_fills_no_batch(run):
  _, losses = run.events("losses/half", "held_out")
  by_hand = loss_by_hand(run.states[10].params, first_images(240)) / 2
  of_all = loss_by_hand(run.states[10].params, first_images(250)) / 2
  np.testing.assert_allclose(losses[-1], by_hand, rtol=1e-5)
  assert abs(of_all - by_hand) > 1e-5 * by_hand, "250 cannot be told from 240"


def test_evaluator_takes_so_many_batches(run):
  _, (loss,) = run.events("losses/half", "two_batches")
  by_hand = loss_by_hand(
      run.states[10].params, first_images(2 * BATCH_SIZE)) / 2
  np.testing.assert_allclose(loss, by_hand, rtol=1e-5)


def test_evaluation_by_a_call_is_logged(tmp_path):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.eval_ds = held_out_ds()
  cfg.evals = {"test": lazy_kd.evals.Evaluator(run=lazy_kd.evals.Once(50))}
  trainer = konfig.resolve(cfg)
  trainer.evals["test"].evaluate(state=trainer.init_state(), step=7)
  steps, _ = tour.read_events(cfg.workdir, "losses/total", "test")
  assert steps == [7]


def test_evaluator_has_the_losses_of_training(run):
  steps, _ = run.events("losses/growing", "two_batches")
  assert steps == [10]


EVENTS = {  # Collection and tag -> is it written.
    "train-gradient": ("train", "metrics/gradient", True),
    "held_out-layer": ("held_out", "metrics/layer", True),
    "held_out-gradient": ("held_out", "metrics/gradient", False),
    "held_out-images": ("held_out", "summaries/images", True),
    "two_batches-recall": ("two_batches", "metrics/recall", True),
    "two_batches-layer": ("two_batches", "metrics/layer", False),
    "two_batches-images": ("two_batches", "summaries/images", False),
}


@table("collection, tag, expected", EVENTS)
def test_what_an_evaluator_writes(run, collection, tag, expected):
  try:
    run.events(tag, collection)
    is_written = True
  except KeyError:
    is_written = False
  assert is_written == expected


def test_cache_needs_a_number_of_batches():
  cfg = tour.get_config()
  cfg.workdir = "/not/used"
  cfg.eval_ds = held_out_ds()
  cfg.evals = {"test": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.Once(10), cache=True)}
  with pytest.raises(ValueError, match="only cache if num_batches"):
    _ = konfig.resolve(cfg).evals["test"].ds_iter


def test_cached_batches_are_kept():
  ds = resolved().train_ds.take(2).cache()
  first = next(iter(ds))
  again = next(iter(ds))
  assert first["image"] is again["image"]


class TwoInputs(nn.Module):
  """Tells labels by labels."""

  image: kontext.Key = kontext.REQUIRED
  label: kontext.Key = kontext.REQUIRED

  @nn.compact
  def __call__(self, image, label):
    one_hot = jax.nn.one_hot(label[:, 0], 4)
    return {"logits": one_hot + 0 * nn.Dense(4)(image[:, 0, :, 0])}


def test_model_with_two_inputs():
  model = lazy_here.TwoInputs(image="batch.image", label="batch.label")
  trainer = resolved(model=model)
  state = trainer.init_state()
  batch = next(iter(trainer.train_ds))
  _, context = trainer.trainstep._step(state, batch)
  found = context.preds["logits"].argmax(axis=1)
  np.testing.assert_array_equal(found, batch["label"][:, 0])


class Printing(nn.Module):
  """Prints the largest pixel of each batch."""

  image: kontext.Key = kontext.REQUIRED

  @nn.compact
  def __call__(self, image):
    jax.debug.print("largest pixel {x:.2f}", x=image.max())
    return {"logits": nn.Dense(4)(image.reshape(image.shape[0], -1))}


def test_print_in_a_model(tmp_path, capsys):
  resolved(workdir=str(tmp_path), stop_after_steps=2, writer=None,
           checkpointer=None, model=lazy_here.Printing(image="batch.image"),
          ).train()
  printed = capsys.readouterr().out
  assert printed.count("largest pixel 0.00") == 1  # When it is initialised.
  assert printed.count("largest pixel") == 3


def test_leftover_of_a_checkpoint_does_no_harm(run, tmp_path):
  moved = shutil.copytree(run.cfg.workdir, tmp_path / "moved")
  (moved / "checkpoints" / "ckpt_50.orbax-checkpoint-tmp").mkdir()
  cfg = copy.deepcopy(run.cfg)
  cfg.workdir = str(moved)
  state = restored(cfg)
  assert int(state.step) == 10


def test_run_that_was_stopped_counts_as_complete(tmp_path):
  resolved(workdir=str(tmp_path), stop_after_steps=1, writer=None).train()
  assert (tmp_path / "train_complete.txt").exists()


def test_evaluator_of_its_own_scores_the_newest_checkpoint(run, tmp_path):
  cfg = copy.deepcopy(run.cfg)
  cfg.workdir = str(shutil.copytree(run.cfg.workdir, tmp_path / "moved"))
  cfg.evals = {"late": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.StandaloneEveryCheckpoint())}
  # After the last checkpoint it would wait for seconds: its clock runs fast.
  clock = mock.Mock(time=itertools.count(step=9).__next__)
  with mock.patch("orbax.checkpoint.checkpoint_utils.time", clock):
    aux = konfig.resolve(cfg).continuous_eval("late")["late"]
  _, losses = run.events("losses/total", "held_out")
  found = aux.compute().loss_values["losses/total"]
  np.testing.assert_allclose(found, losses[-1], rtol=1e-5)


def test_train_allows_no_hidden_transfers(tmp_path):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.checkpointer = None
  cfg.evals = {
      "norm": lazy_here.NormOfHead(run=lazy_kd.evals.EveryNSteps(1))}
  error = jax.errors.JaxRuntimeError
  with pytest.raises(error, match="Disallowed host-to-device"):
    konfig.resolve(cfg).train()


def test_loss_may_be_the_metric_that_decides():
  assert issubclass(kd.losses.Loss, kd.metrics.Metric)


@pytest.mark.parametrize("as_metric", [True, False])
def test_loss_decides_only_as_a_metric(tmp_path, as_metric):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.stop_after_steps = 3
  cfg.eval_ds = held_out_ds()
  if as_metric:
    cfg.train_metrics["focal"] = cfg.train_losses["focal"]
  cfg.evals = {"test": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.EveryNSteps(1))}
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(
      save_interval_steps=1, max_to_keep=1, best_metric_path="test.focal",
      best_mode="min")
  if not as_metric:
    with pytest.raises(KeyError, match="test.focal"):
      konfig.resolve(cfg).train()
    return
  konfig.resolve(cfg).train()
  steps, losses = tour.read_events(cfg.workdir, "metrics/focal", "test")
  kept = konfig.resolve(cfg).checkpointer.all_steps
  assert list(kept) == [steps[np.argmin(losses)]]


# Checkpoints


@pytest.fixture
def continued(run, tmp_path):
  """The config of a run of which the last checkpoint, of step 10, is lost."""
  cfg = copy.deepcopy(run.cfg)
  cfg.workdir = str(shutil.copytree(run.cfg.workdir, tmp_path / "moved"))
  shutil.rmtree(tmp_path / "moved" / "checkpoints" / "ckpt_10")
  cfg.evals = {}
  return cfg


def restored(cfg):
  """Returns the newest state that a fresh Trainer finds.

  Without a Checkpointer it would be the untrained one, whatever is there
  (tests/upstream/test_restore_without_checkpointer.py).
  """
  trainer = konfig.resolve(cfg)
  return trainer.checkpointer.restore(trainer.init_state())


def test_moved_checkpoint_holds_the_state_before_its_step(run, continued):
  state = restored(continued)
  assert int(state.step) == 5
  assert tour.distance(state.params, run.states[5].params) == 0
  assert tour.distance(state.opt_state, run.states[5].opt_state) == 0


def test_restore_uses_up_what_it_is_given(continued):
  trainer = konfig.resolve(continued)
  state = trainer.init_state()
  trainer.checkpointer.restore(state)
  assert state.params["head"]["kernel"].is_deleted()


def test_restore_can_leave_what_it_is_given(continued):
  trainer = konfig.resolve(continued)
  state = trainer.init_state()
  trainer.checkpointer.restore(state, donate=False)
  assert not state.params["head"]["kernel"].is_deleted()


def test_missing_step_is_not_restored(continued):
  trainer = konfig.resolve(continued)
  with pytest.raises(FileNotFoundError, match="ckpt_7"):
    trainer.checkpointer.restore(trainer.init_state(), step=7)


def test_second_call_of_train_resumes(tmp_path):
  trainer = resolved(
      workdir=str(tmp_path), stop_after_steps=6, writer=None,
      checkpointer__save_interval_steps=4)
  once, _ = trainer.train()
  newest = trainer.checkpointer.latest_step
  twice, _ = trainer.train()  # In memory the data starts over.
  assert (newest, int(twice.step)) == (4, 6)
  assert tour.distance(once.params, twice.params) > 0


def test_state_without_transforms(continued):
  continued.init_transform = lazy_here.NeverWanted()
  state = konfig.resolve(continued).init_state(skip_transforms=True)
  assert int(state.step) == 0


def test_resumed_run_repeats_batches_and_no_init_transform(run, continued):
  continued.init_transform = lazy_here.NeverWanted()
  with pytest.raises(AssertionError, match="was used"):
    konfig.resolve(continued).init_state()
  resumed, _ = konfig.resolve(continued).train()
  assert int(resumed.step) == NUM_STEPS + 1
  # In memory the data starts over, so it is not the run that went through.
  assert tour.distance(resumed.params, run.state.params) > 0


MISFITS = {  # Path in the config -> another value, and what is said of it.
    "shape": ("model.width", 16, "not compatible with the stored shape"),
    "optimizer": ("optimizer", lazy_optax.sgd(learning_rate=0.1),
                  "structures do not match"),
}


@table("path, value, message", MISFITS)
def test_checkpoint_is_refused(continued, path, value, message):
  kontext.set_by_path(continued, path, value)
  with pytest.raises(ValueError, match=message):
    restored(continued)


FITS = {  # Path in the config -> another value.
    "rate": ("schedules.learning_rate.init_value", 0.5),
    "loss": ("train_losses", {"l2": lazy_kd.losses.L2()}),
}


@table("path, value", FITS)
def test_checkpoint_is_taken(continued, path, value):
  kontext.set_by_path(continued, path, value)
  assert int(restored(continued).step) == 5


@pytest.mark.parametrize("load_opt_state", [False, True])
def test_loaded_run_starts_at_step_0(run, load_opt_state):
  cfg = copy.deepcopy(run.cfg)
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=run.cfg.workdir, load_opt_state=load_opt_state)
  state = konfig.resolve(cfg).init_state()
  assert tour.distance(state.params, run.states[10].params) == 0
  assert int(state.step) == 0
  count = int(state.opt_state[0].count)
  assert count == (10 if load_opt_state else 0)


def test_quoted_config_for_finetuning(run):
  """What section `frozen_weights` shows as text."""
  source = pathlib.Path(tour.__file__).read_text(encoding="utf-8")
  quoted = source.partition("#     def get_finetuning_config")[2]
  quoted = f"#     def get_finetuning_config{quoted}".partition("\n#\n")[0]
  code = quoted.replace("#     ", "").replace(
      "/where/the/first/run/is", run.cfg.workdir)
  names = dict(vars(tour))
  exec(code, names)
  cfg = names["get_finetuning_config"]()
  cfg.workdir = "/not/used"
  params = konfig.resolve(cfg).init_state().params
  encoder = run.states[10].params["encoder"]
  moves = konfig.resolve(cfg.optimizer.mask)(params)
  labels = konfig.resolve(cfg.train_ds).loader()["label"]
  assert set(labels.ravel()) == {0, 1}  # The new head has two outputs.
  assert tour.distance(params["encoder"], encoder) == 0
  assert moves == {"encoder": {"kernel": False}, "new_head": {"kernel": True}}


KEPT = {  # Fields of the checkpointer -> steps with a checkpoint at the end.
    "max_to_keep": (dict(max_to_keep=1), [6]),
    "keep_period": (dict(max_to_keep=1, keep_period=4), [0, 4, 6]),
    "save_on_steps": (dict(max_to_keep=9, save_on_steps=[3]), [0, 2, 3, 4, 6]),
    "never_save_step_zero": (
        dict(max_to_keep=9, never_save_step_zero=True), [1, 2, 4, 6]),
}


@pytest.mark.parametrize("fields, steps", KEPT.values(), ids=KEPT)
def test_steps_with_a_checkpoint(tmp_path, fields, steps):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.writer = None
  cfg.stop_after_steps = 7
  cfg.checkpointer = lazy_kd.ckpts.Checkpointer(save_interval_steps=2, **fields)
  konfig.resolve(cfg).train()
  assert list(konfig.resolve(cfg).checkpointer.all_steps) == steps


def test_default_workdir_is_refused():
  (field,) = [field for field in dataclasses.fields(kd.train.Trainer)
              if field.name == "workdir"]
  trainer = resolved(stop_after_steps=1, checkpointer=None, writer=None)
  trainer = dataclasses.replace(trainer, workdir=field.default)
  with pytest.raises(ValueError, match="workdir must be set"):
    trainer.train()


def test_evaluation_can_skip_step_0():
  run = kd.evals.EveryNSteps(2, skip_first=True)
  assert [run.should_eval_in_train(step) for step in range(5)] == [
      False, False, True, False, True]


@pytest.mark.parametrize("step", [0, 10])
def test_step_to_load_can_be_chosen(run, step):
  cfg = copy.deepcopy(run.cfg)
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=run.cfg.workdir, step=step)
  state = konfig.resolve(cfg).init_state()
  assert tour.distance(state.params, run.states[step].params) == 0


class OtherEncoder(nn.Module):
  """The MLP of the tour, but for the name of its first layer."""

  image: kontext.Key = kontext.REQUIRED

  @nn.compact
  def __call__(self, image):
    x = image.reshape(image.shape[0], -1)
    x = nn.Dense(tour.WIDTH, use_bias=False, name="other")(x)
    head = nn.Dense(tour.NUM_CLASSES, use_bias=False, name="head")
    return {"logits": head(nn.relu(x))}


def usual_and_loaded(model, run):
  """Returns the first parameters of a model, without and with loading."""
  cfg = tour.get_config()
  cfg.workdir = "/not/used"
  cfg.model = model
  usual = konfig.resolve(cfg).init_state().params
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=run.cfg.workdir)
  return usual, konfig.resolve(cfg).init_state().params


def test_modules_are_loaded_by_their_names(run):
  model = lazy_here.OtherEncoder(image="batch.image")
  usual, loaded = usual_and_loaded(model, run)
  assert set(loaded) == {"other", "head"}
  assert tour.distance(loaded["head"], run.states[10].params["head"]) == 0
  assert tour.distance(loaded["other"], usual["other"]) == 0


class Backbone(nn.Module):
  """The MLP of the tour, one level further down."""

  image: kontext.Key = kontext.REQUIRED

  @nn.compact
  def __call__(self, image):
    return tour.MLP(name="backbone")(image)


def test_module_elsewhere_in_the_tree_gets_nothing(run):
  model = lazy_here.Backbone(image="batch.image")
  usual, loaded = usual_and_loaded(model, run)
  assert set(loaded["backbone"]) == {"encoder", "head"}
  assert tour.distance(loaded, usual) == 0


def test_loaded_module_must_have_the_same_shape(run, tmp_path):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.model.width = 16
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=run.cfg.workdir)
  trainer = konfig.resolve(cfg)
  trainer.init_state()  # It has the saved shape now.
  with pytest.raises(flax.errors.ScopeParamShapeError, match="encoder"):
    trainer.train()


def test_collections_are_loaded_too(tmp_path):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path / "new")
  cfg.model = lazy_tour.Normalized(image="batch.image")
  state = konfig.resolve(cfg).init_state()
  ones = jax.tree.map(jnp.ones_like, state.collections)
  with kd.ckpts.Checkpointer(
      workdir=tmp_path, save_interval_steps=1) as checkpointer:
    checkpointer.save(state.replace(collections=ones), step=0)
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=str(tmp_path))
  loaded = konfig.resolve(cfg).init_state().collections
  assert tour.distance(loaded, jax.device_get(ones)) == 0


def test_plain_dict_does_not_give_back_the_run(run):
  text = pathlib.Path(run.cfg.workdir, "config.json").read_text()
  with pytest.raises(TypeError, match="__id__"):
    konfig.resolve(json.loads(text))
  read_back = konfig.ConfigDict(json.loads(text))
  assert isinstance(konfig.resolve(read_back), kd.train.Trainer)


def pygrain_config():
  """Returns the tour's config with PyGrain, without event files."""
  cfg = tour.get_config()
  cfg.writer = None
  cfg.train_ds = lazy_kd.data.py.DataSource(
      data_source=lazy_tour.train_examples(), batch_size=BATCH_SIZE,
      shuffle=True, num_workers=0)
  return cfg


def test_run_with_pygrain_resumes_its_optimizer_too(tmp_path):
  cfg = pygrain_config()
  cfg.num_train_steps = 6
  cfg.checkpointer.save_interval_steps = 3
  cfg.workdir = str(tmp_path / "whole")
  whole, _ = konfig.resolve(cfg).train()
  cfg.workdir = str(tmp_path / "stopped")
  cfg.stop_after_steps = 4
  konfig.resolve(cfg).train()
  cfg.stop_after_steps = None
  resumed, _ = konfig.resolve(cfg).train()
  assert tour.distance(resumed.opt_state, whole.opt_state) == 0


@pytest.fixture(scope="module")
def stopped_pygrain(tmp_path_factory):
  """The config of a run with PyGrain that has a checkpoint."""
  cfg = pygrain_config()
  cfg.workdir = str(tmp_path_factory.mktemp("pygrain"))
  cfg.stop_after_steps = 1
  konfig.resolve(cfg).train()
  return cfg


def test_position_does_not_fit_other_workers(stopped_pygrain):
  cfg = copy.deepcopy(stopped_pygrain)
  cfg.train_ds.num_workers = 2
  with pytest.raises(KeyError, match="exhausted"):
    konfig.resolve(cfg).train()


def test_position_is_not_there_after_data_in_memory(continued, stopped_pygrain):
  continued.train_ds = stopped_pygrain.train_ds
  with pytest.raises(ValueError, match="process_0-of-1.json"):
    konfig.resolve(continued).train()


# Optimizers


PARAMS = {name: {"kernel": np.ones(2), "bias": np.ones(2)}
          for name in ("encoder", "head_a", "my_head")}
PATTERNS = {  # Pattern -> the paths that it selects in PARAMS.
    "head": "",
    "head_a": "head_a.bias head_a.kernel",
    "encoder.kernel": "encoder.kernel",
    "kernel": "encoder.kernel head_a.kernel my_head.kernel",
    ".*head.*": "head_a.bias head_a.kernel my_head.bias my_head.kernel",
    "head_.": "",
    "head*": "",
    "params.encoder": "",
    "enc|my_head": "encoder.bias encoder.kernel my_head.bias my_head.kernel",
    "encoder|head": "encoder.bias encoder.kernel my_head.bias my_head.kernel",
    "(enc|my_head)": "my_head.bias my_head.kernel",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_select(pattern):
  mask = kontext.flatten_with_path(kd.optim.select(pattern)(PARAMS))
  selected = sorted(path for path, is_selected in mask.items() if is_selected)
  assert " ".join(selected) == PATTERNS[pattern]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exclude_is_the_opposite(pattern):
  selected = kontext.flatten_with_path(kd.optim.select(pattern)(PARAMS))
  left = kontext.flatten_with_path(kd.optim.exclude(pattern)(PARAMS))
  assert left == {path: not value for path, value in selected.items()}


def test_optax_masked_hands_gradients_on():
  params = {"a": np.ones(2), "b": np.ones(2)}
  optimizer = optax.masked(optax.sgd(0.1), kd.optim.select("a"))
  updates, _ = optimizer.update(params, optimizer.init(params), params)
  np.testing.assert_allclose(updates["a"], [-0.1, -0.1], rtol=1e-6)
  np.testing.assert_allclose(updates["b"], params["b"])


def test_several_patterns_select_what_any_does():
  mask = kd.optim.select(["head_a", "my_head"])(PARAMS)
  assert not any(mask["encoder"].values())
  assert all(mask["head_a"].values())
  assert all(mask["my_head"].values())


def test_loaded_parameters_stay_when_they_are_frozen(run, tmp_path):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.num_train_steps = 2
  cfg.log_metrics_every = 1
  cfg.checkpointer = None
  cfg.init_transform = lazy_kd.ckpts.SimpleCheckpointLoader(
      workdir=run.cfg.workdir)
  cfg.optimizer = lazy_kd.optim.partial_updates(
      lazy_optax.adam(learning_rate=0.01),
      mask=lazy_kd.optim.exclude("encoder"))
  state, _ = konfig.resolve(cfg).train()
  loaded = run.states[10].params
  assert tour.distance(state.params["encoder"], loaded["encoder"]) == 0
  assert tour.distance(state.params["head"], loaded["head"]) > 0.005


def test_statistics_of_a_frozen_layer_move(tmp_path):
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.writer = None
  cfg.checkpointer = None
  cfg.stop_after_steps = 2
  cfg.model = lazy_tour.Normalized(image="batch.image")
  cfg.optimizer = lazy_kd.optim.partial_updates(
      lazy_optax.adam(learning_rate=0.01), mask=lazy_kd.optim.select("head"))
  trainer = konfig.resolve(cfg)
  before = jax.device_get(trainer.init_state())
  after, _ = trainer.train()
  assert tour.distance(after.params["norm"], before.params["norm"]) == 0
  assert tour.distance(after.collections, before.collections) > 0.01


def test_apply_if_finite_looks_at_gradients():
  """Not at what the inner optimizer makes of them."""
  optimizer = optax.apply_if_finite(
      optax.scale(np.inf), max_consecutive_errors=3)
  state = optimizer.init(np.ones(2))
  updates, state = optimizer.update(np.ones(2), state)
  assert np.isinf(updates).all()
  updates, state = optimizer.update(np.full(2, np.nan), state)
  np.testing.assert_array_equal(updates, 0)


def test_schedule_in_multi_steps_counts_moves():
  cfg = tour.get_config()
  cfg.optimizer = lazy_optax.MultiSteps(cfg.optimizer, every_k_schedule=3)
  optimizer = konfig.resolve(cfg.optimizer)
  update = jax.jit(optimizer.update)
  state = optimizer.init(PARAMS)
  for _ in range(6):
    _, state = update(PARAMS, state, PARAMS)
  assert int(state.gradient_step) == 2
  assert int(state.inner_opt_state[1].count) == 2


# Several devices


def fsdp_spec(array):
  """Returns how a device mesh divides an array, whatever its size."""
  divide = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  return divide(array).is_fully_replicated


NUM_DEVICES = jax.device_count()
COPIED = {  # Shape -> does every device have a copy of it.
    "matrix": ((4 * NUM_DEVICES, 3), NUM_DEVICES == 1),
    "second-axis": ((1, 4 * NUM_DEVICES), NUM_DEVICES == 1),
    "indivisible": ((NUM_DEVICES + 1, 1), True),
    "scalar": ((), True),
}


@table("shape, expected", COPIED)
def test_what_fsdp_copies(shape, expected):
  assert fsdp_spec(np.zeros(shape, np.float32)) == expected


def test_state_of_the_optimizer_is_divided(tmp_path):
  if NUM_DEVICES == 1 or 64 % NUM_DEVICES:
    pytest.skip("this needs several devices")
  divide = lazy_kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.sharding = lazy_kd.sharding.ShardingStrategy(
      params=divide, opt_state=divide)
  state = konfig.resolve(cfg).init_state()
  shards = state.opt_state[0].mu["encoder"]["kernel"].addressable_shards
  shapes = {shard.data.shape for shard in shards}
  assert shapes == {(64 // NUM_DEVICES, tour.WIDTH)}


# Export


def exporter_of(workdir):
  """Returns the config of an exporter for CPUs."""
  return lazy_kd.export.JaxModelExporter(
      platforms=["cpu"], workdir=str(workdir))


def test_nothing_is_exported_by_default(run):
  trainer = konfig.resolve(run.cfg)
  assert isinstance(trainer.exporter, kd.export.NoopExporter)
  assert not list(pathlib.Path(run.cfg.workdir).glob("*.jax_exported"))


def export(trainer):
  """Exports the model of a trainer for use."""
  trainer.exporter.export(
      model=trainer.model, state=trainer.init_state(),
      element_spec=trainer.train_ds.element_spec, is_training=False)


@pytest.fixture(scope="module")
def exported_path(tmp_path_factory):
  """The path of the exported MLP."""
  workdir = tmp_path_factory.mktemp("exported")
  export(resolved(exporter=exporter_of(workdir)))
  (path,) = workdir.glob("*.jax_exported")
  return path


def test_both_exports_have_one_name(exported_path):
  exporter = konfig.resolve(exporter_of("/not/used"))
  assert exported_path.stem == exporter.name


def test_exported_model_is_for_so_many_devices(exported_path):
  exported = jax.export.deserialize(exported_path.read_bytes())
  assert exported.nr_devices == jax.device_count()


class FixedSize(nn.Module):
  """Asks for `len(image)`, which is a number of its own to a tracer."""

  image: kontext.Key = kontext.REQUIRED

  @nn.compact
  def __call__(self, image):
    return {"logits": nn.Dense(4)(image.reshape(len(image), -1))}


def test_exported_model_must_not_ask_for_len(tmp_path):
  trainer = resolved(exporter=exporter_of(tmp_path),
                     model=lazy_here.FixedSize(image="batch.image"))
  with pytest.raises(TypeError, match="_DimExpr"):
    export(trainer)


# Random streams


class NoisyModel(nn.Module):
  """Puts out noise, ones of which some are dropped, and whether it trains."""

  image: kontext.Key = kontext.REQUIRED
  is_training = kd.nn.train_property()

  @nn.compact
  def __call__(self, image):
    ones = jnp.ones(image.shape)
    return {"noise": jax.random.normal(self.make_rng("noise"), image.shape),
            "dropped": kd.nn.Dropout(rate=0.25)(ones),
            "training": ones * self.is_training}


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
  """What a noisy model puts out at steps 0 and 1, and in an evaluator."""
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path_factory.mktemp("noisy"))
  cfg.model = lazy_here.NoisyModel(image="batch.image")
  cfg.train_losses = {}
  cfg.train_metrics = {}
  cfg.train_summaries = {
      name: lazy_kd.summaries.HistogramSummary(tensor=f"preds.{name}")
      for name in ("noise", "dropped", "training")}
  cfg.rng_streams = lazy_kd.train.RngStreams(
      [lazy_kd.train.RngStream("noise", eval=True)])
  cfg.evals = {"test": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.EveryNSteps(1), ds=cfg.train_ds)}
  trainer = konfig.resolve(cfg)
  (batch,) = trainer.train_ds.take(1).device_put(trainer.sharding.batch)
  state = trainer.init_state()
  auxs = [trainer.evals["test"].step(step_nr=0, state=state, batch=batch)]
  for _ in range(2):
    state, aux = trainer.trainstep.step(state, batch, return_summaries=True)
    auxs.append(aux)
  found = {}
  for name, aux in zip(("evaluator", 0, 1), auxs, strict=True):
    found[name] = {key: state.finalize().compute().tensor
                   for key, state in aux.summary_states.items()}
  return trainer, jax.device_get(batch), found


@pytest.mark.parametrize("when", ["evaluator", 0, 1])
def test_flag_says_whether_it_trains(noisy, when):
  _, _, found = noisy
  expected = when != "evaluator"
  np.testing.assert_array_equal(found[when]["training"], expected)


class Asking(nn.Module):
  """Returns the keys that it gets when it asks twice for the same stream."""

  @nn.compact
  def __call__(self):
    return [jax.random.key_data(self.make_rng("noise")) for _ in range(2)]


class AskingTwice(nn.Module):
  """Two modules that ask."""

  @nn.compact
  def __call__(self):
    return Asking(name="a")() + Asking(name="b")()


def test_each_module_gets_another_key_each_time():
  keys = AskingTwice().apply({}, rngs={"noise": kd.random.PRNGKey(0)})
  assert len({tuple(key.tolist()) for key in keys}) == 4


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", ["noise", "dropped"])
def test_keys_of_a_step_can_be_made_again(noisy, step, name):
  trainer, batch, found = noisy
  rngs = trainer.rng_streams.train_rngs(step)
  preds = trainer.model.apply(
      {}, batch["image"], rngs=rngs, is_training_property=True)
  np.testing.assert_allclose(found[step][name], np.ravel(preds[name]))


def test_keys_of_an_evaluator_can_be_made_again(noisy):
  trainer, batch, found = noisy
  rngs = trainer.rng_streams.eval_rngs(0)
  preds = trainer.model.apply(
      {}, batch["image"], rngs=rngs, is_training_property=False)
  np.testing.assert_allclose(
      found["evaluator"]["noise"], np.ravel(preds["noise"]))


def test_evaluator_drops_nothing(noisy):
  _, _, found = noisy
  np.testing.assert_array_equal(found["evaluator"]["dropped"], 1)


def test_step_has_noise_of_its_own(noisy):
  _, _, found = noisy
  assert np.abs(found[0]["noise"] - found[1]["noise"]).mean() > 0.5


def test_evaluator_has_noise_of_its_own(noisy):
  _, _, found = noisy
  assert np.abs(found[0]["noise"] - found["evaluator"]["noise"]).mean() > 0.5


def test_streams_differ():
  rngs = resolved().rng_streams.train_rngs(1)
  assert set(rngs) == {"default", "dropout"}
  assert (jax.random.key_data(rngs["default"])
          != jax.random.key_data(rngs["dropout"])).any()


def test_evaluator_has_no_streams_by_default():
  assert resolved().rng_streams.eval_rngs(0) == {}


def test_another_seed_has_other_keys():
  key = resolved().rng_streams.train_rngs(0)["dropout"]
  other = resolved(seed=1).rng_streams.train_rngs(0)["dropout"]
  assert (jax.random.key_data(key) != jax.random.key_data(other)).any()


def test_flag_must_be_said_outside_a_trainer():
  with pytest.raises(ValueError, match="is_training_property"):
    nn.Sequential([kd.nn.Dropout(rate=0.5)]).apply({}, np.ones((2, 2)))


# Data


NUMBERS = [{"x": np.float32(i), "image": np.full((4, 4, 1), i, np.float32)}
           for i in range(10)]


def source(data=NUMBERS, **changes):
  """Returns a data set of the numbers 0 to 9, in batches of four."""
  arguments = {"shuffle": False, "batch_size": 4, "num_epochs": 1,
               "num_workers": 0, "seed": 0, **changes}
  return kd.data.py.DataSource(data_source=data, **arguments)


def batches_of(ds, key="x"):
  """Returns the batches as lists of numbers."""
  return [batch[key].tolist() for batch in ds]


REMAINDERS = {  # What is said of it -> the last batch.
    "drop": (True, [4, 5, 6, 7]),
    "keep": (False, [8, 9]),
    "pad": ("pad", [8, 9, 0, 0]),
}


@table("remainder, expected", REMAINDERS)
def test_remainder(remainder, expected):
  ds = source(batch_drop_remainder=remainder)
  assert batches_of(ds)[-1] == expected


def test_index_is_what_iteration_gives():
  ds = source()
  assert ds[1]["x"].tolist() == batches_of(ds)[1]


def test_length_counts_batches():
  assert len(source()) == 2


def test_batches_are_as_the_element_spec_says():
  ds = source()
  assert ds.element_spec["image"].shape == (4, 4, 4, 1)
  assert ds.element_spec["image"].dtype == np.float32
  assert next(iter(ds))["image"].shape == (4, 4, 4, 1)


def test_data_repeats_before_it_is_batched():
  (batch,) = batches_of(source(batch_size=12, num_epochs=None).take(1))
  assert batch == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_lists_are_batched_number_by_number():
  ds = source([{"x": [1, 2]}, {"x": [3, 4]}], batch_size=2)
  (batch,) = ds
  assert [array.tolist() for array in batch["x"]] == [[1, 3], [2, 4]]


def test_shuffle_depends_on_the_seed():
  first = batches_of(source(shuffle=True))
  again = batches_of(source(shuffle=True))
  other = batches_of(source(shuffle=True, seed=1))
  assert first == again
  assert first != other


def test_shuffle_in_memory_depends_on_the_seed():
  def labels(seed):
    (batch,) = resolved(seed=seed).train_ds.take(1)
    return batch["label"].tolist()
  assert labels(0) == labels(0)
  assert labels(0) != labels(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddOne(kd.data.MapTransform):
  """Adds one to `x`: a transform of the whole example."""

  def map(self, example):
    return {**example, "x": example["x"] + 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddNoise(kd.data.py.ElementWiseRandomTransform):
  """Adds a random number to what `key` names."""

  def random_map_element(self, element, rng):
    return element + rng.normal()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepEven(kd.data.FilterTransform):
  """Keeps every second example."""

  def filter(self, example):
    return bool(example["x"] % 2 == 0)


def map_x(example):
  """Makes `x` hundred times as large: a function is a transform, too."""
  return {**example, "x": 100 * example["x"]}


TRANSFORMS = {  # Transform -> the first batch.
    "MapTransform": (AddOne(), [1, 2, 3, 4]),
    "function": (map_x, [0, 100, 200, 300]),
    "ElementWiseTransform": (tour.Scale(key="x", by=0.5), [0, 0.5, 1, 1.5]),
    "FilterTransform": (KeepEven(), [0, 2, 4, 6]),
    "SliceDataset": (kd.data.py.SliceDataset(4), [0, 1, 2, 3]),
}


@table("transform, expected", TRANSFORMS)
def test_transform(transform, expected):
  ds = source(transforms=[transform])
  np.testing.assert_allclose(next(iter(ds))["x"], expected)


def test_value_range():
  scale = kd.data.ValueRange(key="image", in_vrange=(0, 10), vrange=(0, 1))
  batch = next(iter(source(transforms=[scale])))
  np.testing.assert_allclose(batch["image"][:, 0, 0, 0], [0, 0.1, 0.2, 0.3])


def test_random_transform_is_as_the_seed_says():
  noise = [AddNoise(key="x")]
  first = batches_of(source(transforms=noise))
  again = batches_of(source(transforms=noise, batch_size=8))
  other = batches_of(source(transforms=noise, seed=1))
  assert first[0] == again[0][:4]
  assert first != other


def test_random_transform_is_another_for_each_example():
  (batch,) = source(transforms=[AddNoise(key="x")]).take(1)
  noise = batch["x"] - np.arange(4)
  assert len(set(np.round(noise, 4))) == 4


def test_random_crop():
  arrays = [{"image": np.arange(8.0).reshape(1, 8, 1)}] * 48
  crop = kd.data.py.RandomCrop(key="image", shape=(None, 6, None))
  (batch,) = source(arrays, batch_size=48, transforms=[crop])
  starts = batch["image"][:, 0, 0, 0]
  np.testing.assert_array_equal(
      batch["image"], (starts[:, None] + np.arange(6))[:, None, :, None])
  assert set(starts) == {0, 1, 2}


def test_misspelt_key_of_a_transform_is_named():
  ds = source(transforms=[tour.Scale(key="y", by=2.0)])
  with pytest.raises(KeyError, match="did not match any keys"):
    next(iter(ds))


def test_mixture_has_its_shares():
  other = [{"x": np.float32(100 + i)} for i in range(10)]
  parts = [kd.data.py.DataSource(data_source=data, shuffle=False)
           for data in ([{"x": x["x"]} for x in NUMBERS], other)]
  ds = kd.data.py.Mix(datasets=parts, weights=[3, 1], shuffle=False,
                      batch_size=8, num_epochs=1, num_workers=0, seed=0)
  (batch,) = batches_of(ds)
  assert batch == [0, 1, 2, 100, 3, 4, 5, 101]


@pytest.mark.parametrize("first, second, expected", [
    (12, 100, 16), (3, 12, 4), (100, 2, 8)])
def test_mixture_ends_with_the_first_source_that_does(first, second, expected):
  parts = [source([{"x": np.float32(i)} for i in range(num_examples)])
           for num_examples in (first, second)]
  ds = kd.data.py.Mix(datasets=parts, weights=[3, 1], shuffle=False,
                      batch_size=1, num_epochs=1, num_workers=0, seed=0)
  assert len(list(ds)) == expected


def test_mixture_in_a_config_gets_the_seed():
  parts = [lazy_kd.data.py.DataSource(
      data_source=tour.lazy_tour.train_examples(), shuffle=True)
           for _ in range(2)]
  mix = lazy_kd.data.py.Mix(datasets=parts, weights=[3, 1], shuffle=True,
                            batch_size=8, num_workers=0)
  ds = resolved(train_ds=mix, seed=3).train_ds
  assert ds.seed == 3
  assert ds.element_spec["image"].shape == (8, 8, 8, 1)


def test_workers_drop_what_fills_no_batch_of_their_own():
  """What a worker reads, without starting one."""
  examples = [{"x": np.float32(i)} for i in range(24)]
  ds = source(examples, batch_size=6, num_workers=5)
  assert len(ds) == 4
  shares = [source(examples[i::5], batch_size=6) for i in range(5)]
  assert [len(share) for share in shares] == [0] * 5


def test_notebook_has_no_workers(monkeypatch):
  from kauldron.data.py import base
  monkeypatch.setattr(base.epy, "is_test", lambda: False)
  assert base._get_num_workers(2) == 2
  monkeypatch.setattr(base.epy, "is_notebook", lambda: True)
  assert base._get_num_workers(2) == 0


def test_profiler_traces_so_long():
  profiler = kd.inspect.Profiler(workdir="/not/used")
  found = (profiler.first_profile, profiler.num_profile_steps,
           profiler.profile_duration_ms, profiler.every_secs)
  assert found == (10, 5, 3000, 3600)


def test_workers_are_sixteen_by_default():
  fields = {field.name: field.default
            for field in dataclasses.fields(kd.data.py.DataSource)}
  assert fields["num_workers"] == 16


DOWNLOADED = {  # What needs a download resolves without it.
    "Tfds": (lazy_kd.data.py.Tfds(
        name="mnist", split="train", shuffle=True, batch_size=32),),
    "HuggingFace": (lazy_kd.data.py.HuggingFace(
        path="ylecun/mnist", config=None, split="train", shuffle=True,
        batch_size=32),),
}


@table("cfg,", DOWNLOADED)
def test_source_that_is_downloaded_resolves(cfg):
  assert isinstance(konfig.resolve(cfg), kd.data.Pipeline)


# What there is


CLASSES = {  # Base class -> some classes of Kauldron that derive from it.
    "losses.Loss": """AbsoluteValue Huber L1 L2 SigmoidBinaryCrossEntropy
        SoftmaxCrossEntropyWithIntLabels Value""",
    "metrics.Metric": """Accuracy Ari BinaryAccuracy LpipsVgg NoopMetric Norm
        Precision1 Psnr RocAuc SingleDimension SkipIfMissing Ssim Std TreeMap
        TreeReduce""",
    "metrics.State": """AutoState AverageState CollectFirstState
        CollectingState""",
    "data.Pipeline": """InMemoryPipeline py.DataSource py.HuggingFace py.Json
        py.Mix py.SelectFromDatasets py.Tfds""",
    "data.MapTransform": """AddConstants Cast CenterCrop Elements Gather
        Rearrange Resize ValueRange""",
    "ckpts.InitTransform": """MultiTransform NoopTransform
        PartialKauldronLoader SimpleCheckpointLoader""",
    "ckpts.BaseCheckpointer": "Checkpointer NoopCheckpointer",
    "evals.EvaluatorBase": "Evaluator",
}
DERIVED = [(base, f"{base.partition('.')[0]}.{name}")
           for base, names in CLASSES.items() for name in names.split()]


def test_metrics_are_hashable():
  metric = kd.metrics.Norm(tensor="a")
  assert hash(metric) == hash(kd.metrics.Norm(tensor="a"))


def test_training_steps_are_told_apart_by_identity():
  trainer = resolved()
  assert trainer.trainstep != dataclasses.replace(trainer.trainstep)


@pytest.mark.parametrize("base, path", DERIVED)
def test_class_derives_from(base, path):
  base = kontext.get_by_path(kd, base)
  assert issubclass(kontext.get_by_path(kd, path), base)


SUMMARIES = """HistogramSummary ShowBoxes ShowDifferenceImages ShowImages
    ShowPointCloud ShowSegmentations ShowTexts""".split()


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary_is_a_metric(name):
  assert issubclass(getattr(kd.summaries, name), kd.metrics.Metric)


NAMES = """konfig.WithRef konfig.export konfig.mock_modules konfig.placeholder
    konfig.ref_copy konfig.ref_fn konfig.required summaries.Histogram
    summaries.PointCloud optim.UseEmaParams optim.ema_params
    optim.named_chain""".split()


@pytest.mark.parametrize("path", NAMES)
def test_public_name(path):
  assert callable(kontext.get_by_path(kd, path))


def test_light_parts_import_no_tensorflow():
  code = ("import sys; from kauldron import kd, konfig, kontext; "
          "kd.ktyping; kd.losses.L2; kd.metrics.Norm; "
          "print('tensorflow' in sys.modules)")
  process = subprocess.run([sys.executable, "-c", code], check=True,
                           capture_output=True, text=True)
  assert process.stdout == "False\n"


# kd.optim: averaged parameters


def test_evaluator_uses_averaged_parameters(tmp_path):
  """With decay 0.5 each step halves the way from the average to the new."""
  cfg = tour.get_config()
  cfg.workdir = str(tmp_path)
  cfg.stop_after_steps = 4
  cfg.checkpointer = None
  cfg.optimizer = lazy_kd.optim.named_chain(
      adam=cfg.optimizer,
      ema=lazy_kd.optim.ema_params(decay=0.5, debias=False))
  cfg.eval_ds = lazy_kd.data.InMemoryPipeline(
      loader=lazy_tour.held_out_images, batch_size=BATCH_SIZE, num_epochs=1)
  cfg.evals = {"averaged": lazy_kd.evals.Evaluator(
      run=lazy_kd.evals.Once(3), init_transform=lazy_kd.optim.UseEmaParams())}
  konfig.resolve(cfg).train()
  _, (logged,) = tour.read_events(str(tmp_path), "losses/total", "averaged")

  trainer = konfig.resolve(cfg)
  state = trainer.init_state()
  average = jax.device_get(state.params)
  for batch in trainer.train_ds.take(3).device_put(trainer.sharding.batch):
    state, _ = trainer.trainstep.step(state, batch)
    average = jax.tree.map(
        lambda old, new: (old + np.asarray(new)) / 2, average, state.params)

  def held_out_loss(params):
    held_out = tour.held_out_images()
    preds = trainer.model.apply({"params": params}, held_out["image"])
    logits = np.asarray(preds["logits"])
    return tour.focal_values(logits, held_out["label"]).mean()

  np.testing.assert_allclose(logged, held_out_loss(average), rtol=1e-5)
  assert abs(logged - held_out_loss(state.params)) > 1e-3
