"""A section fails when what it claims is no longer true.

Each case breaks one thing inside Kauldron or beside it, and names the section
that claims it. `make proofs` says which check of the section notices it, and
which checks no case needs.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import sys
import types

import jax
import jax.numpy as jnp
from kauldron import kd
from kauldron import konfig
from kauldron import kontext
import kauldron.train  # noqa: F401  Before anything is broken.
from kauldron.konfig import fake_import_utils
from kauldron.kontext import annotate
from kauldron.ktyping import config
from kauldron.ktyping import dim_view
from kauldron.ktyping import errors
from kauldron.ktyping import shape_spec
from kauldron.ktyping import typeguard_checkers
from kauldron.ktyping import utils as ktyping_utils
from kauldron.losses import base as losses_base
from kauldron.metrics import auto_state
from kauldron.optim import _masks
from kauldron.train import metric_writer
from kauldron.train import train_loop
import numpy as np
import optax
import pytest

import kauldron_tour

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sharding info not provided")  # orbax's.

CASES = {}


@dataclasses.dataclass(frozen=True)
class Case:
  """A fault: the section that it ends, how, and what makes it."""

  section: str
  error: type[Exception]
  sabotage: object


def breaks(section, error=AssertionError):
  """Registers a function that breaks what a section claims.

  The section must end with an AssertionError, or with the error that is named.
  """

  def register(function):
    assert function.__name__ not in CASES, function.__name__
    CASES[function.__name__] = Case(section, error, function)
    return function

  return register


def replaces(monkeypatch, owner, name):
  """Puts the function below in the place of `owner.name`.

  It gets what it replaces as its first argument.
  """
  original = getattr(owner, name)

  def install(function):
    @functools.wraps(original)
    def replacement(*args, **kwargs):
      return function(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)

  return install


@contextlib.contextmanager
def broken(case, monkeypatch):
  """Breaks what a case says; `monkeypatch` mends it afterwards."""
  case.sabotage(kauldron_tour, monkeypatch)
  jax.clear_caches()  # What is compiled already would not notice.
  try:
    yield
  finally:
    config.CONFIG_OVERRIDES.clear()  # Failures leave them: tests/upstream.


# Part I.


@breaks("where_we_are")
def imported_is_not_installed(tour, monkeypatch):
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")


@breaks("where_we_are", AttributeError)
def etils_cannot_read_a_dtype(tour, monkeypatch):
  def asks_private_module(dtype):
    return isinstance(dtype, jax._src.no_such_module.KeyTy)

  monkeypatch.setattr(
      tour.enp.array_spec, "_is_jax_random_dtype", asks_private_module)


@breaks("where_we_are")
def a_spec_has_the_shape_backwards(tour, monkeypatch):
  @replaces(monkeypatch, tour.enp.ArraySpec, "from_array")
  def transposed(original, array):
    return original(array.T)


@breaks("config_tree")
def resolve_ignores_the_config(tour, monkeypatch):
  @replaces(monkeypatch, konfig, "resolve")
  def always_sgd(original, cfg, **kwargs):
    if getattr(cfg, "__qualname__", "") == "optax:chain":
      cfg = {"__qualname__": "optax:sgd", "learning_rate": 0.5}
    return original(cfg, **kwargs)


@breaks("config_tree")
def json_forgets_a_change(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "to_json")
  def old_json(original, cfg):
    return original(cfg).replace("0.4", "0.5")


@breaks("config_tree")
def json_forgets_an_argument(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "to_json")
  def without_momentum(original, cfg):
    return original(cfg).replace('"momentum": 0.9', '"momentum": null')


@breaks("config_tree")
def resolve_keeps_a_list(tour, monkeypatch):
  @replaces(monkeypatch, konfig, "resolve")
  def unfrozen(original, cfg, *, freeze=False):
    return original(cfg, freeze=freeze)


@breaks("config_tree")
def resolve_ignores_freeze(tour, monkeypatch):
  @replaces(monkeypatch, konfig, "resolve")
  def always_frozen(original, cfg, *, freeze=True):
    return original(cfg)


@breaks("config_tree")
def json_forgets_that_a_part_is_shared(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "to_json")
  def without_ids(original, cfg):
    return original(cfg).replace(', "__id__": 0', "")


def _in_the_block(monkeypatch, **modules):
  """Lets a block of mock_modules() have other modules than stand-ins."""

  @replaces(monkeypatch, fake_import_utils, "_mock_modules")
  @contextlib.contextmanager
  def mock_others(original, frame, property_name):
    with original(frame, property_name):
      if property_name == "f_globals":
        frame.f_globals.update(modules)
      yield


@breaks("mock_modules")
def calls_are_recorded_as_plain_dicts(tour, monkeypatch):
  _in_the_block(monkeypatch, optax=types.SimpleNamespace(
      sgd=lambda **kwargs: {"__qualname__": "optax:sgd"} | kwargs))


@breaks("mock_modules")
def numpy_is_not_replaced(tour, monkeypatch):
  _in_the_block(monkeypatch, np=np)


@breaks("mock_modules")
def functions_are_replaced_too(tour, monkeypatch):
  monkeypatch.setattr(tour, "sgd", tour.lazy_optax.sgd)


@breaks("mock_modules")
def after_the_block_calls_are_recorded_too(tour, monkeypatch):
  @replaces(monkeypatch, fake_import_utils, "_mock_modules")
  @contextlib.contextmanager
  def endless(original, frame, property_name):
    with original(frame, property_name):
      yield
    if property_name == "f_globals":
      monkeypatch.setattr(tour, "optax", types.SimpleNamespace(
          sgd=tour.lazy_optax.sgd,
          GradientTransformation=optax.GradientTransformation))


@breaks("mock_modules")
def optax_makes_another_class(tour, monkeypatch):
  @replaces(monkeypatch, optax, "sgd")
  def other_class(original, **kwargs):
    optimizer = original(**kwargs)
    return types.SimpleNamespace(init=optimizer.init, update=optimizer.update)


@breaks("mock_modules")
def a_recorded_number_is_lost(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "__init__")
  def without_numbers(original, cfg, init=None, **kwargs):
    original(cfg, init, **kwargs)
    if dict(cfg) == {"__qualname__": "optax:sgd", "learning_rate": 0.5}:
      cfg.learning_rate = 0.0


@breaks("config_errors")
def a_text_in_place_of_a_float_is_dropped(tour, monkeypatch):
  _is_not_set(monkeypatch, "momentum", "high")


@breaks("config_errors")
def a_float_becomes_an_int(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "__setattr__")
  def rounding_down(original, cfg, name, value):
    if name == "decay_steps" and isinstance(value, float):
      value = int(value)
    original(cfg, name, value)


@breaks("config_errors")
def real_objects_are_dropped(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "__setattr__")
  def forgiving(original, cfg, name, value):
    with contextlib.suppress(ValueError):
      original(cfg, name, value)


@breaks("config_errors")
def what_is_refused_is_zero_afterwards(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "__setattr__")
  def set_to_zero(original, cfg, name, value):
    try:
      original(cfg, name, value)
    except TypeError:
      if name == "momentum":
        original(cfg, name, 0.0)
      raise


def _is_not_set(monkeypatch, field, dropped):
  """Lets configs ignore a value of a field silently."""

  @replaces(monkeypatch, konfig.ConfigDict, "__setattr__")
  def ignore(original, cfg, name, value):
    if name != field or value is not dropped:
      original(cfg, name, value)


@breaks("config_errors")
def an_integer_is_dropped(tour, monkeypatch):
  _is_not_set(monkeypatch, "learning_rate", 1)


@breaks("config_errors", TypeError)
def none_is_dropped(tour, monkeypatch):
  _is_not_set(monkeypatch, "momentum", None)


@breaks("config_errors")
def a_text_in_place_of_none_is_dropped(tour, monkeypatch):
  _is_not_set(monkeypatch, "momentum", "low")


@breaks("config_errors")
def merging_changes_the_original(tour, monkeypatch):
  def merge(cfg, other):
    cfg.update(other)
    return cfg

  monkeypatch.setattr(konfig.ConfigDict, "__or__", merge)


@breaks("config_errors")
def a_misspelt_argument_is_dropped(tour, monkeypatch):
  @replaces(monkeypatch, konfig, "resolve")
  def forgiving(original, cfg):
    if isinstance(cfg, konfig.ConfigDict) and "learning_rat" in cfg:
      cfg = {k: v for k, v in dict(cfg).items() if k != "learning_rat"}
    return original(cfg)


@breaks("config_references")
def a_function_of_a_reference_is_a_copy(tour, monkeypatch):
  monkeypatch.setattr(
      konfig, "ref_fn", lambda function, x: function(x.get()))


@breaks("config_references")
def a_reference_is_a_copy(tour, monkeypatch):
  monkeypatch.setattr(konfig.ConfigDict, "ref", property(lambda cfg: cfg))
  monkeypatch.setattr(konfig, "ref_fn", lambda function, x: function(x))


def _changes_too(monkeypatch, field):
  """Lets a change of num_train_steps change a copied field as well."""

  @replaces(monkeypatch, konfig.ConfigDict, "__setattr__")
  def set_both(original, cfg, name, value):
    original(cfg, name, value)
    if name == "num_train_steps" and value == 200:
      cfg.schedules["copied"][field] = cfg.schedules["follows"][field]


@breaks("config_references")
def a_copied_number_follows(tour, monkeypatch):
  _changes_too(monkeypatch, "decay_steps")


@breaks("config_references")
def what_was_calculated_from_a_copy_follows(tour, monkeypatch):
  _changes_too(monkeypatch, "warmup_steps")


@breaks("config_references")
def a_reference_to_a_whole_part_is_a_copy(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "__setattr__")
  def copy_part(original, cfg, name, value):
    if name == "optimizer":
      copied = json.loads(value.learning_rate.to_json())
      value = value | {"learning_rate": konfig.ConfigDict(copied)}
    original(cfg, name, value)


@breaks("config_references")
def optax_warms_up_slowly(tour, monkeypatch):
  @replaces(monkeypatch, optax, "warmup_cosine_decay_schedule")
  def slow(original, warmup_steps, decay_steps, **kwargs):
    schedule = original(
        warmup_steps=warmup_steps, decay_steps=decay_steps, **kwargs)
    slower = 2 if warmup_steps == 20 else 1
    return lambda step: schedule(
        jnp.where(step < warmup_steps, step / slower, step))


@breaks("config_references")
def optax_decays_slowly(tour, monkeypatch):
  @replaces(monkeypatch, optax, "warmup_cosine_decay_schedule")
  def slow(original, decay_steps, **kwargs):
    slower = 2 if decay_steps == 200 else 1
    return original(decay_steps=slower * decay_steps, **kwargs)


@breaks("config_references")
def json_has_the_numbers_from_before(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "to_json")
  def old_json(original, cfg):
    return original(cfg).replace("200", "1000")


@breaks("key_paths")
def a_path_stops_at_its_first_index(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "resolve_from_keyed_obj")
  def first_head(original, context, keyed, **kwargs):
    arrays = original(context, keyed, **kwargs)
    if getattr(keyed, "logits", None) == "preds.heads[1].logits":
      arrays["logits"] = context["preds"]["heads"][0]["logits"]
    return arrays


@breaks("key_paths")
def an_array_by_itself_is_rounded(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "resolve_from_keyed_obj")
  def rounded(original, context, keyed, **kwargs):
    arrays = original(context, keyed, **kwargs)
    if getattr(keyed, "logits", None) == "preds":
      arrays["logits"] = arrays["logits"] * 0.999
    return arrays


@breaks("key_paths")
def a_misspelt_path_is_only_refused(tour, monkeypatch):
  @replaces(monkeypatch, annotate, "_get_missing_key_error_message")
  def terse(original, missing_key, missing_path, all_paths):
    return f"no {missing_path}: " + " ".join(all_paths)


@breaks("key_paths")
def the_nearest_path_is_left_out(tour, monkeypatch):
  @replaces(monkeypatch, annotate, "_get_missing_key_error_message")
  def other_paths(original, missing_key, missing_path, all_paths):
    return original(
        missing_key, missing_path, [x for x in all_paths if "[1]" not in x])


@breaks("key_paths")
def a_path_that_was_left_out_is_not_named(tour, monkeypatch):
  @replaces(monkeypatch, annotate, "_assert_no_required_keys")
  def terse(original, key_paths):
    if "__KEY_REQUIRED__" in key_paths.values():
      raise ValueError("a key is missing")


@breaks("paths")
def a_path_has_no_slices(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "get_by_path")
  def without_slices(original, tree, path):
    return original(tree, path.partition("[...")[0])


@breaks("paths")
def the_last_path_is_left_out(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "flatten_with_path")
  def shorter(original, tree, **kwargs):
    return dict(list(original(tree, **kwargs).items())[:-1])


@breaks("paths")
def one_path_cannot_be_set(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "set_by_path")
  def globs_only(original, tree, path, value):
    return original(tree, path, value) if path != "heads[0].logits" else []


@breaks("paths", ValueError)
def a_glob_sets_one_match_only(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "set_by_path")
  def set_first(original, tree, path, value):
    return original(tree, path.replace("**", "heads[0]"), value)


@breaks("paths")
def what_is_set_past_the_end_is_appended(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "set_by_path")
  def append(original, tree, path, value):
    if path == "heads[2]":
      return tree["heads"].append(value)
    return original(tree, path, value)


@breaks("paths", KeyError)
def a_key_takes_what_matches_first(tour, monkeypatch):
  @replaces(monkeypatch, annotate.paths, "get_by_path")
  def first_match(original, tree, path, default):
    return original(tree, path.replace("**", "heads[0]"), default)


@breaks("shape_checker")
def nothing_is_checked(tour, monkeypatch):
  monkeypatch.setattr(tour, "centered", tour.centered.__wrapped__)


@breaks("shape_checker")
def equal_sizes_are_refused(tour, monkeypatch):
  @replaces(monkeypatch, tour, "centered")
  def refuse(original, x, *args, **kwargs):
    result = original(x, *args, **kwargs)
    if result.shape == (5, 5):
      raise AssertionError("two names with one size")
    return result


@breaks("shape_checker", kd.ktyping.KTypeCheckError)
def a_star_stands_for_one_axis_at_least(tour, monkeypatch):
  monkeypatch.setattr(shape_spec.NamedDims, "min_length", 1)


@breaks("shape_checker")
def the_report_does_not_say_which_argument(tour, monkeypatch):
  @replaces(monkeypatch, errors.KTypeCheckError, "append_path_element")
  def without_arguments(original, self, element):
    if not element.startswith("argument"):
      original(self, element)


@breaks("shape_checker")
def the_report_marks_no_argument(tour, monkeypatch):
  monkeypatch.setattr(
      errors.KTypeCheckError, "maybe_set_highlight", lambda *_: None)


@breaks("shape_checker")
def the_report_has_no_sizes(tour, monkeypatch):
  monkeypatch.setattr(errors.KTypeCheckError, "candidates_block", "")


@breaks("shape_checker")
def what_is_returned_is_not_checked(tour, monkeypatch):
  @replaces(monkeypatch, ktyping_utils, "get_type_hints")
  def arguments_only(original, function):
    hints = dict(original(function))
    hints.pop("return", None)
    return hints


def _field_is_not_checked(tour, monkeypatch, field):
  """Lets a field of the dataclass be anything."""

  @replaces(monkeypatch, tour, "Noise")
  def forgiving(original, **fields):
    try:
      return original(**fields)
    except tour.kt.KTypeCheckError as error:
      if f"'{field}'" not in str(error):
        raise


@breaks("shapes_elsewhere")
def fields_share_no_axes(tour, monkeypatch):
  _field_is_not_checked(tour, monkeypatch, "scale")


@breaks("shapes_elsewhere")
def a_choice_of_types_takes_any_type(tour, monkeypatch):
  _field_is_not_checked(tour, monkeypatch, "mean")


@breaks("shapes_elsewhere")
def a_number_is_a_random_key(tour, monkeypatch):
  _field_is_not_checked(tour, monkeypatch, "key")


@breaks("shapes_elsewhere")
def the_first_leaf_is_skipped(tour, monkeypatch):
  @replaces(monkeypatch, jax.tree, "leaves")
  def last_twice(original, tree):
    return original(tree)[-1:] * len(original(tree))


@breaks("shapes_elsewhere")
def the_last_leaf_is_skipped(tour, monkeypatch):
  @replaces(monkeypatch, jax.tree, "leaves")
  def first_twice(original, tree):
    return original(tree)[:1] * len(original(tree))


@breaks("shapes_elsewhere", ValueError)
def a_nest_may_have_any_structure(tour, monkeypatch):
  monkeypatch.setattr(typeguard_checkers, "_apply_structure_binding",
                      lambda candidates, *_: candidates)


@breaks("shapes_elsewhere")
def a_block_counts_a_column_twice(tour, monkeypatch):
  check_type = tour.kt.check_type

  def wider(value, spec):
    __ktyping_ignore_frame__ = True  # noqa: F841  For the search for a scope.
    return check_type(np.concatenate([value, value[..., :1]], axis=-1), spec)

  monkeypatch.setattr(tour.kt, "check_type", wider)


@breaks("shapes_elsewhere", ValueError)
def a_size_counts_one_more(tour, monkeypatch):
  size_of = dim_view.DimView.__getitem__

  def larger(self, name):
    __ktyping_ignore_frame__ = True  # noqa: F841  For the search for a scope.
    size = size_of(self, name)
    return size + 1 if isinstance(size, int) else size

  monkeypatch.setattr(dim_view.DimView, "__getitem__", larger)


@breaks("shapes_elsewhere")
def a_calculated_shape_is_backwards(tour, monkeypatch):
  @replaces(monkeypatch, tour.kt, "shape")
  def backwards(original, spec):
    return original(spec, nested_ok=True)[::-1]


@breaks("shapes_elsewhere")
def nothing_fits_a_shape(tour, monkeypatch):
  monkeypatch.setattr(tour.kt, "isinstance", lambda value, spec: False)


@breaks("shapes_elsewhere")
def everything_fits_a_shape(tour, monkeypatch):
  monkeypatch.setattr(tour.kt, "isinstance", lambda value, spec: True)


@breaks("shapes_elsewhere")
def names_outlive_their_block(tour, monkeypatch):
  size_of = dim_view.DimView.__getitem__

  def lasting(self, name):
    __ktyping_ignore_frame__ = True  # noqa: F841  For the search for a scope.
    try:
      return size_of(self, name)
    except tour.kt.NoActiveScopeError:
      return 8

  monkeypatch.setattr(dim_view.DimView, "__getitem__", lasting)


@breaks("custom_loss")
def a_loss_is_constant(tour, monkeypatch):
  monkeypatch.setattr(
      tour.FocalLoss, "get_values",
      lambda self, logits, labels: jnp.ones(labels.shape))


@breaks("custom_loss")
def a_loss_ignores_its_mask(tour, monkeypatch):
  @replaces(monkeypatch, losses_base.AllReduceMean, "from_values")
  def unmasked(original, values, mask, **kwargs):
    return original(values, None, **kwargs)


@breaks("custom_loss")
def a_loss_without_options_counts_twice(tour, monkeypatch):
  @replaces(monkeypatch, kd.losses.Loss, "get_weight")
  def doubled(original, self, step):
    plain = self.mask is None and self.weight == 1.0
    return original(self, step) * (2 if plain else 1)


@breaks("custom_loss")
def a_mask_sums_to_one_at_most(tour, monkeypatch):
  @replaces(monkeypatch, losses_base.AllReduceMean, "from_values")
  def clipped(original, values, mask, weight, normalize_by):
    state = original(values, mask, weight, normalize_by)
    if mask is None or normalize_by == "values":
      return state
    return state.replace(count=jnp.minimum(state.count, 1.0))


@breaks("custom_loss")
def a_loss_is_always_divided_by_its_mask(tour, monkeypatch):
  @replaces(monkeypatch, losses_base.AllReduceMean, "from_values")
  def by_mask(original, values, mask, weight, normalize_by):
    return original(values, mask, weight)


@breaks("custom_loss")
def a_mask_sums_to_one_at_least(tour, monkeypatch):
  monkeypatch.setattr(
      losses_base.AllReduceMean, "compute",
      lambda self: self.value / jnp.clip(self.count, min=1.0))


@breaks("custom_loss")
def a_loss_has_the_weight_of_step_0(tour, monkeypatch):
  @replaces(monkeypatch, kd.losses.Loss, "get_weight")
  def first(original, self, step):
    return original(self, 0)


@breaks("custom_loss")
def a_mask_hides_nan(tour, monkeypatch):
  @replaces(monkeypatch, losses_base.AllReduceMean, "from_values")
  def replaced(original, values, mask, weight, normalize_by):
    if mask is not None:
      values = jnp.where(mask, values, 0)
    return original(values, mask, weight, normalize_by)


@breaks("custom_loss", ValueError)
def labels_of_any_shape_are_taken(tour, monkeypatch):
  monkeypatch.setattr(tour.FocalLoss, "get_values",
                      tour.FocalLoss.get_values.__wrapped__)


@breaks("custom_metric")
def merging_drops_a_batch(tour, monkeypatch):
  monkeypatch.setattr(
      tour.MeanRecall.State, "merge", lambda self, other: self)


@breaks("custom_metric")
def a_state_computes_all_that_was_seen(tour, monkeypatch):
  merged = []

  @replaces(monkeypatch, tour.MeanRecall.State, "merge")
  def remembered(original, self, other):
    merged.append(original(self, other))
    return merged[-1]

  @replaces(monkeypatch, tour.MeanRecall.State, "finalize")
  def of_all(original, self):
    is_part = self.parent.mask is None and self.seen.sum() == 15
    return original(merged[-1] if is_part else self)


@breaks("custom_metric")
def a_metric_gets_no_mask(tour, monkeypatch):
  @replaces(monkeypatch, tour.MeanRecall, "get_state_from_context")
  def unmasked(original, self, context):
    return original(dataclasses.replace(self, mask=None), context)


# Part II.


def _changes_scalars(monkeypatch, prefix, factor, collection="train"):
  """Lets a run write other values than it has."""

  @replaces(monkeypatch, kd.train.KDMetricWriter, "write_scalars")
  def scaled(original, self, step, scalars):
    if self.collection == collection:
      scalars = {tag: np.asarray(value) * (
          factor if tag.startswith(prefix) else 1)
                 for tag, value in scalars.items()}
    return original(self, step, scalars)


@breaks("real_trainer")
def other_losses_are_written(tour, monkeypatch):
  _changes_scalars(monkeypatch, "losses/", 1.001)


@breaks("real_trainer")
def a_new_model_knows_all(tour, monkeypatch):
  monkeypatch.setattr(tour, "recall_by_hand", lambda logits, labels: 1.0)


@breaks("real_trainer")
def nothing_is_learnt(tour, monkeypatch):
  monkeypatch.setattr(optax, "apply_updates", lambda params, updates: params)


@breaks("real_trainer", AttributeError)
def the_extra_step_is_gone(tour, monkeypatch):
  @replaces(monkeypatch, train_loop, "_enum_steps_with_hooks")
  def one_less(original, num_train_steps, **kwargs):
    return original(num_train_steps=num_train_steps - 1, **kwargs)


def _changes_trained(monkeypatch, change):
  """Lets `change` edit, given the trainer, the state that `train()` returns."""

  @replaces(monkeypatch, kd.train.Trainer, "train")
  def train(original, self):
    state, aux = original(self)
    return change(self, state), aux


def _counts_one_step_less(monkeypatch, applies=lambda trainer: True):
  """Lets `train()` return a state with a smaller step number."""
  _changes_trained(monkeypatch, lambda trainer, state: (
      state.replace(step=state.step - 1) if applies(trainer) else state))


@breaks("real_trainer")
def the_step_before_is_returned(tour, monkeypatch):
  _counts_one_step_less(monkeypatch)


@breaks("real_trainer")
def a_schedule_is_logged_too_late(tour, monkeypatch):
  @replaces(monkeypatch, metric_writer, "_compute_schedule")
  def late(original, schedule, step):
    return original(schedule, step + 1)


@breaks("real_trainer")
def no_config_is_written(tour, monkeypatch):
  monkeypatch.setattr(
      kd.train.KDMetricWriter, "write_config", lambda self, config: None)


@breaks("real_trainer")
def two_checkpoints_are_kept(tour, monkeypatch):
  defaults = kd.ckpts.Checkpointer.__init__.__kwdefaults__
  monkeypatch.setitem(defaults, "max_to_keep", 2)


@breaks("plain_trainer")
def a_config_is_always_written(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.KDMetricWriter, "write_config")
  def write(original, self, config):
    return original(self, config or konfig.ConfigDict({}))


@breaks("plain_trainer")
def a_config_is_resolved_with_another_seed(tour, monkeypatch):
  @replaces(monkeypatch, konfig, "resolve")
  def reseeded(original, cfg):
    if "seed" in cfg:
      cfg.seed += 1
    return original(cfg)


@breaks("readable_loop")
def a_loop_sees_other_batches(tour, monkeypatch):
  @replaces(monkeypatch, kd.data.IterableDataset, "device_put")
  def backwards(original, self, sharding):
    return list(original(self, sharding))[::-1]


@breaks("readable_loop")
def the_optimizer_starts_elsewhere(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.TrainStep, "_init_optimizer")
  def later(original, self, state):
    state = original(self, state)
    opt_state = jax.tree.map(lambda x: x + 1, state.opt_state)
    return state.replace(opt_state=opt_state)


@breaks("readable_loop")
def the_last_step_shrinks_the_parameters(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.TrainStep, "_step")
  def shrink(original, self, state, batch):
    new_state, context = original(self, state, batch)
    factor = jnp.where(state.step == tour.FEW_STEPS - 1, 0.999, 1.0)
    params = jax.tree.map(lambda x: x * factor, new_state.params)
    return new_state.replace(params=params), context


@breaks("readable_loop")
def the_loss_is_halved(tour, monkeypatch):
  monkeypatch.setattr(
      kd.losses.Loss, "get_weight", lambda self, step=None: jnp.asarray(0.5))


@breaks("inner_layer")
def a_metric_sees_half_a_layer(tour, monkeypatch):
  @replaces(monkeypatch, kd.metrics.Norm, "get_state")
  def half(original, self, tensor):
    return original(self, tensor=tensor[..., ::2])


@breaks("inner_layer")
def a_spread_is_a_variance(tour, monkeypatch):
  @replaces(monkeypatch, kd.metrics.stats.StdState, "compute")
  def variance(original, self):
    return original(self) ** 2


@breaks("inner_layer")
def the_gradient_is_the_mean_of_its_parts(tour, monkeypatch):
  @replaces(monkeypatch, kd.metrics.Norm.State, "compute")
  def mean(original, self):
    return original(self) / jnp.sqrt(2.0) if self.parent.axis is None else (
        original(self))


@breaks("inner_layer")
def a_histogram_has_no_sign(tour, monkeypatch):
  @replaces(monkeypatch, kd.summaries.HistogramSummary, "get_state")
  def absolute(original, self, tensor):
    return original(self, tensor=jnp.abs(tensor))


def _changes_histograms(tour, monkeypatch, change):
  """Lets a histogram be read as another; its rows are left, right, count."""

  @replaces(monkeypatch, tour, "read_events")
  def read(original, workdir, tag, *collection):
    steps, values = original(workdir, tag, *collection)
    if tag == "summaries/layer":
      for histogram in values:
        change(histogram)
    return steps, values


@breaks("inner_layer")
def a_histogram_counts_some_values_twice(tour, monkeypatch):
  def change(histogram):
    histogram[10][2] *= 2

  _changes_histograms(tour, monkeypatch, change)


@breaks("inner_layer")
def a_histogram_starts_too_far_left(tour, monkeypatch):
  def change(histogram):
    histogram[0][0] -= 1

  _changes_histograms(tour, monkeypatch, change)


@breaks("inner_layer")
def a_misspelt_key_is_ignored(tour, monkeypatch):
  @replaces(monkeypatch, kd.metrics.Norm, "get_state_from_context")
  def forgiving(original, self, context):
    try:
      return original(self, context)
    except KeyError:
      return self.empty()


@breaks("inner_layer")
def a_histogram_ends_too_far_right(tour, monkeypatch):
  def change(histogram):
    histogram[-1][1] += 1

  _changes_histograms(tour, monkeypatch, change)


@breaks("inner_layer")
def a_path_leads_to_another_value(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "get_by_path")
  def negative(original, *args, **kwargs):
    return -original(*args, **kwargs)


@breaks("sweep")
def an_override_is_lost(tour, monkeypatch):
  monkeypatch.setattr(kontext, "set_by_path", lambda cfg, path, value: [])


@breaks("sweep")
def an_override_changes_something_else_too(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "set_by_path")
  def set_two(original, cfg, path, value):
    cfg.num_train_steps = 50
    return original(cfg, path, value)


@breaks("sweep")
def a_change_cannot_be_seen(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "flatten_with_path")
  def nothing(original, tree, **kwargs):
    if isinstance(tree, konfig.ConfigDict):
      return {}
    return original(tree, **kwargs)


def _resolves_variants(tour, monkeypatch, change):
  """Lets `change` edit the config of a variant before it is resolved."""

  @replaces(monkeypatch, konfig, "resolve")
  def changed(original, cfg):
    if isinstance(cfg, konfig.ConfigDict) and (
        "focal" in cfg.get("train_losses", {})):
      change(cfg)
    return original(cfg)


@breaks("sweep")
def a_slow_variant_has_its_own_seed(tour, monkeypatch):
  def change(cfg):
    if cfg.schedules.learning_rate.init_value < tour.LEARNING_RATE:
      cfg.seed += 1

  _resolves_variants(tour, monkeypatch, change)


@breaks("sweep")
def another_optimizer_has_its_own_seed(tour, monkeypatch):
  def change(cfg):
    if cfg.optimizer.__qualname__ == "optax:rmsprop":
      cfg.seed += 1

  _resolves_variants(tour, monkeypatch, change)


@breaks("sweep")
def a_sharp_variant_is_a_slow_one(tour, monkeypatch):
  def change(cfg):
    if cfg.train_losses.focal.gamma > 1:
      cfg.train_losses.focal.gamma = 1.0
      cfg.schedules.learning_rate.init_value = tour.LEARNING_RATE / 10

  _resolves_variants(tour, monkeypatch, change)


@breaks("sweep")
def a_slow_variant_is_the_base(tour, monkeypatch):
  def change(cfg):
    if cfg.schedules.learning_rate.init_value == tour.LEARNING_RATE / 10:
      cfg.schedules.learning_rate.init_value = tour.LEARNING_RATE

  _resolves_variants(tour, monkeypatch, change)


@breaks("resumed_run")
def a_stopped_run_counts_one_step_less(tour, monkeypatch):
  _counts_one_step_less(
      monkeypatch, lambda trainer: trainer.stop_after_steps is not None)


@breaks("resumed_run")
def a_run_does_not_stop(tour, monkeypatch):
  @replaces(monkeypatch, train_loop, "_enum_steps_with_hooks")
  def endless(original, stop_after_steps, **kwargs):
    return original(stop_after_steps=None, **kwargs)


@breaks("resumed_run")
def the_latest_checkpoint_has_another_name(tour, monkeypatch):
  latest_step = kd.ckpts.Checkpointer.latest_step.fget

  def renamed(self):
    in_section = sys._getframe(1).f_code.co_name == "stop_and_resume"
    return latest_step(self) + in_section if in_section else latest_step(self)

  monkeypatch.setattr(kd.ckpts.Checkpointer, "latest_step", property(renamed))


def _changes_restored(monkeypatch, change):
  """Lets `change` edit each training state that a checkpoint gives back."""

  @replaces(monkeypatch, kd.ckpts.Checkpointer, "restore")
  def changed(original, self, state, **kwargs):
    is_found = self.latest_step is not None
    state = original(self, state, **kwargs)
    if not is_found:
      return state
    if isinstance(state, kd.train.TrainState):
      return change(state)
    if hasattr(state, "train_state"):
      return state._replace(train_state=change(state.train_state))
    return state


@breaks("resumed_run")
def a_resumed_run_counts_from_zero(tour, monkeypatch):
  _changes_restored(
      monkeypatch, lambda state: state.replace(step=state.step - 10))


@breaks("resumed_run")
def a_data_iterator_restarts(tour, monkeypatch):
  from kauldron.data.iterators import PyGrainIterator

  monkeypatch.setattr(
      PyGrainIterator, "__kd_ocp_restore_post__",
      lambda self, value: iter(self.source))


@breaks("resumed_run")
def a_resume_starts_from_scratch(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.Checkpointer, "restore", lambda self, state, **kwargs: state)


@breaks("resumed_run")
def a_resumed_run_skips_a_batch_in_memory(tour, monkeypatch):
  from kauldron.data.iterators import NonCheckpointableIterator

  def skip(self, value):
    next(self)
    return self

  monkeypatch.setattr(
      NonCheckpointableIterator, "__kd_ocp_restore_post__", skip)


@breaks("resumed_run")
def all_batches_in_memory_are_the_same(tour, monkeypatch):
  @replaces(monkeypatch, kd.data.InMemoryPipeline, "iter")
  def first_batch(original, self):
    yield from itertools.repeat(next(original(self)))


# Part III.


@breaks("evaluators")
def training_data_is_scored(tour, monkeypatch):
  def batches(self):
    ds = self.base_cfg.train_ds.take(4)
    return ds.device_put(self.base_cfg.sharding.batch)

  monkeypatch.setattr(kd.evals.Evaluator, "ds_iter", property(batches))


@breaks("evaluators")
def the_first_state_is_scored(tour, monkeypatch):
  first = []

  @replaces(monkeypatch, kd.evals.Evaluator, "evaluate")
  def stale(original, self, state, step):
    first.append(jax.tree.map(lambda x: x.copy(), state))
    return original(self, first[0], step)


@breaks("evaluators")
def an_evaluator_runs_at_every_step(tour, monkeypatch):
  monkeypatch.setattr(
      kd.evals.EveryNSteps, "should_eval_in_train", lambda *_: True)


@breaks("evaluators")
def other_held_out_losses_are_written(tour, monkeypatch):
  _changes_scalars(monkeypatch, "losses/", 1.001, "held_out")


@breaks("evaluators")
def the_metrics_of_the_last_batch_are_kept(tour, monkeypatch):
  monkeypatch.setattr(
      tour.MeanRecall.State, "merge", lambda self, other: other)


@breaks("evaluators")
def other_held_out_metrics_are_written(tour, monkeypatch):
  _changes_scalars(monkeypatch, "metrics/", 1.001, "held_out")


@breaks("evaluators")
def an_evaluator_runs_twice(tour, monkeypatch):
  monkeypatch.setattr(kd.evals.Once, "should_eval_in_train",
                      lambda self, step: step in (1, self.step))


@breaks("evaluators")
def the_metrics_of_training_are_always_used(tour, monkeypatch):
  monkeypatch.setattr(kd.evals.Evaluator, "metrics", property(
      lambda self: self.base_cfg.train_metrics, lambda *_: None))


@breaks("evaluators")
def another_loss_is_returned(tour, monkeypatch):
  @replaces(monkeypatch, kd.evals.Evaluator, "evaluate")
  def evaluate(original, self, state, step):
    aux = original(self, state, step)
    with jax.transfer_guard("allow"):
      losses = {name: dataclasses.replace(x, value=x.value * 1.001)
                for name, x in aux.loss_states.items()}
      return aux.replace(loss_states=losses)


@breaks("best_checkpoint")
def the_run_gets_ever_better(tour, monkeypatch):
  monkeypatch.setattr(
      optax, "exponential_decay", lambda *args, **kwargs: optax.schedules.
      constant_schedule(0.003))


@breaks("best_checkpoint")
def the_newest_checkpoint_is_kept(tour, monkeypatch):
  monkeypatch.setattr(kd.ckpts.Checkpointer, "best_metric_path", property(
      lambda self: None, lambda *_: None))


@breaks("best_checkpoint")
def the_worst_checkpoint_is_kept(tour, monkeypatch):
  monkeypatch.setattr(kd.ckpts.Checkpointer, "best_mode", property(
      lambda self: "min", lambda *_: None))


@breaks("best_checkpoint")
def removed_checkpoints_are_listed(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.Checkpointer, "all_steps", property(lambda self: [0, 10, 20]))


@breaks("best_checkpoint")
def a_run_goes_on_at_its_last_step(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.Checkpointer, "latest_step", property(
          lambda self: max(self.all_steps) + 10 if self.all_steps else None))


@breaks("rebuilt_run")
def nothing_is_restored(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.Checkpointer, "restore", lambda self, state, **_: state)


@breaks("rebuilt_run")
def the_step_is_not_restored(tour, monkeypatch):
  _changes_restored(monkeypatch, lambda state: state.replace(step=0))


@breaks("rebuilt_run")
def another_config_is_written(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.KDMetricWriter, "write_config")
  def other(original, self, config):
    config = konfig.ConfigDict(json.loads(config.to_json()))
    config.schedules.learning_rate.init_value *= 2
    original(self, config)


@breaks("rebuilt_run")
def parameters_are_restored_roughly(tour, monkeypatch):
  def change(state):
    params = jax.tree.map(lambda x: x * (1 + 1e-6), state.params)
    return state.replace(params=params)

  _changes_restored(monkeypatch, change)


@breaks("rebuilt_run")
def no_optimizer_state_is_restored(tour, monkeypatch):
  def change(state):
    fresh = jax.tree.map(jnp.zeros_like, state.opt_state)
    return state.replace(opt_state=fresh)

  _changes_restored(monkeypatch, change)


@breaks("loaded_weights")
def the_source_is_of_another_step(tour, monkeypatch):
  _changes_restored(monkeypatch, lambda state: state.replace(step=0))


@breaks("loaded_weights")
def the_source_has_learnt_nothing(tour, monkeypatch):
  monkeypatch.setattr(optax, "apply_updates", lambda params, updates: params)


def _nothing_is_loaded_into(monkeypatch, layer):
  @replaces(monkeypatch, kd.ckpts.SimpleCheckpointLoader, "transform")
  def without_layer(original, self, state):
    return state if layer in state.params else original(self, state)


@breaks("loaded_weights")
def nothing_is_loaded(tour, monkeypatch):
  _nothing_is_loaded_into(monkeypatch, "head")


@breaks("loaded_weights")
def nothing_is_loaded_into_another_model(tour, monkeypatch):
  _nothing_is_loaded_into(monkeypatch, "new_head")


@breaks("loaded_weights")
def what_was_not_saved_is_changed(tour, monkeypatch):
  @replaces(monkeypatch, kd.ckpts.SimpleCheckpointLoader, "transform")
  def with_zeros(original, self, state):
    loaded = original(self, state)
    new = jax.tree.map(jnp.zeros_like, loaded.params.get("new_head", {}))
    return loaded.replace(
        params=loaded.params | ({"new_head": new} if new else {}))


@breaks("loaded_weights")
def the_step_is_loaded_too(tour, monkeypatch):
  @replaces(monkeypatch, kd.ckpts.SimpleCheckpointLoader, "_partial_restore")
  def with_step(original, self, state, keys):
    state = original(self, state, keys)
    return state.replace(step=self._ckpt_mgr.latest_step)


@breaks("loaded_weights")
def the_optimizer_is_always_loaded(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.SimpleCheckpointLoader, "transform_after_optimizer",
      lambda self, state: self._partial_restore(state, ("opt_state",)))


@breaks("loaded_weights")
def the_optimizer_is_never_loaded(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.SimpleCheckpointLoader, "transform_after_optimizer",
      lambda self, state: state)


def _masks_of_shapes(monkeypatch, selected):
  """Lets a mask say the same of all parameters that are mere shapes."""

  @replaces(monkeypatch, kd.optim, "select")
  def select(original, pattern):
    def mask(tree):
      if isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct):
        return jax.tree.map(lambda _: selected, tree)
      return original(pattern)(tree)

    return mask


@breaks("frozen_weights")
def a_mask_of_shapes_selects_nothing(tour, monkeypatch):
  _masks_of_shapes(monkeypatch, False)


@breaks("frozen_weights")
def a_mask_of_shapes_selects_everything(tour, monkeypatch):
  _masks_of_shapes(monkeypatch, True)


@breaks("frozen_weights")
def a_pattern_matches_what_starts_so(tour, monkeypatch):
  monkeypatch.setattr(_masks, "_make_regex", _masks.re.compile)


@breaks("frozen_weights")
def a_pattern_is_no_regular_expression(tour, monkeypatch):
  monkeypatch.setattr(_masks, "_REGEX_SPECIAL_CHARS", set())


@breaks("frozen_weights")
def nothing_is_frozen(tour, monkeypatch):
  monkeypatch.setattr(
      kd.optim, "partial_updates", lambda optimizer, mask: optimizer)


@breaks("frozen_weights")
def everything_is_frozen(tour, monkeypatch):
  monkeypatch.setattr(kd.optim, "partial_updates",
                      lambda optimizer, mask: optax.set_to_zero())


@breaks("large_batches")
def a_small_step_is_not_counted(tour, monkeypatch):
  _counts_one_step_less(
      monkeypatch, lambda trainer: trainer.train_ds.batch_size == 12)


@breaks("large_batches")
def a_large_step_is_not_counted(tour, monkeypatch):
  _counts_one_step_less(
      monkeypatch, lambda trainer: trainer.train_ds.batch_size == 48)


@breaks("large_batches")
def two_batches_make_a_step(tour, monkeypatch):
  @replaces(monkeypatch, optax, "MultiSteps")
  def two(original, optimizer, every_k_schedule):
    return original(optimizer, every_k_schedule=2)


@breaks("large_batches")
def a_move_is_counted_twice(tour, monkeypatch):
  def change(trainer, state):
    del trainer
    if not isinstance(state.opt_state, optax.MultiStepsState):
      return state
    moves = state.opt_state.gradient_step
    return state.replace(
        opt_state=state.opt_state._replace(gradient_step=2 * moves))

  _changes_trained(monkeypatch, change)


@breaks("large_batches")
def a_move_is_too_large(tour, monkeypatch):
  @replaces(monkeypatch, optax, "MultiSteps")
  def larger(original, optimizer, every_k_schedule):
    return original(
        optax.chain(optimizer, optax.scale(1.01)), every_k_schedule)


@breaks("event_files")
def other_scalars_are_written(tour, monkeypatch):
  _changes_scalars(monkeypatch, "", 1.001)


@breaks("event_files")
def a_step_is_not_written(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.KDMetricWriter, "write_scalars")
  def seldom(original, self, step, scalars):
    if step != 5:
      original(self, step, scalars)


@breaks("event_files")
def negative_images_are_written(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.KDMetricWriter, "write_images")
  def negative(original, self, step, images):
    original(self, step, {k: 1 - v for k, v in images.items()})


@breaks("event_files")
def wide_images_are_written(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.KDMetricWriter, "write_images")
  def wide(original, self, step, images):
    original(self, step, {k: v.repeat(2, axis=2) for k, v in images.items()})


@breaks("event_files")
def the_range_of_values_is_ignored(tour, monkeypatch):
  @replaces(monkeypatch, kd.summaries.ShowImages, "get_state")
  def unscaled(original, self, images):
    return original(dataclasses.replace(self, in_vrange=None), images)


@breaks("event_files")
def no_parameters_are_written(tour, monkeypatch):
  monkeypatch.setattr(metric_writer, "_get_markdown_param_table",
                      lambda params: "Total: 0 -- 0 bytes")


@breaks("sharding")
def a_copy_is_on_one_device_only(tour, monkeypatch):
  def change(trainer, state):
    if isinstance(trainer.sharding.params, kd.sharding.FSDPSharding):
      return state
    return jax.device_put(state, jax.devices()[0])

  _changes_trained(monkeypatch, change)


@breaks("sharding")
def models_are_always_divided(tour, monkeypatch):
  @replaces(monkeypatch, kd.sharding.ShardingStrategy, "__init__")
  def divided(original, self, **kwargs):
    divide = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    original(self, **{"params": divide} | kwargs)


@breaks("sharding")
def small_arrays_are_never_divided(tour, monkeypatch):
  @replaces(monkeypatch, kd.sharding.FSDPSharding, "__call__")
  def at_least_4_mb(original, self, tree):
    size = max(4, self.min_size_to_shard_mb)
    return original(dataclasses.replace(self, min_size_to_shard_mb=size), tree)


def _is_copied_all_the_same(monkeypatch, field):
  """Lets a sharding strategy ignore a field when another one is set as well."""

  @replaces(monkeypatch, kd.sharding.ShardingStrategy, "__init__")
  def init(original, self, **kwargs):
    if "opt_state" in kwargs:
      kwargs[field] = kd.sharding.REPLICATED
    original(self, **kwargs)


@breaks("sharding")
def the_parameters_are_copied_all_the_same(tour, monkeypatch):
  _is_copied_all_the_same(monkeypatch, "params")


@breaks("sharding")
def the_optimizer_is_copied_all_the_same(tour, monkeypatch):
  _is_copied_all_the_same(monkeypatch, "opt_state")


@breaks("sharding")
def a_divided_model_starts_elsewhere(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.TrainStep, "init")
  def other(original, self, *args, **kwargs):
    state = original(self, *args, **kwargs)
    if isinstance(self.sharding.params, kd.sharding.FSDPSharding):
      params = jax.tree.map(lambda x: x * 1.001, state.params)
      state = state.replace(params=params)
    return state


@breaks("sharding")
def a_function_is_no_sharding(tour, monkeypatch):
  @replaces(monkeypatch, type(kd.sharding), "with_sharding_constraint")
  def without_functions(original, self, x, shardings):
    shardings = jax.tree.map(
        lambda s: self.REPLICATED if s is tour.divide_last_axis else s,
        shardings)
    return original(self, x, shardings)


@breaks("sharding")
def small_arrays_are_divided_by_default(tour, monkeypatch):
  defaults = kd.sharding.FSDPSharding.__init__.__kwdefaults__
  monkeypatch.setitem(defaults, "min_size_to_shard_mb", 1)


@breaks("sharding")
def large_arrays_are_copied_by_default(tour, monkeypatch):
  defaults = kd.sharding.FSDPSharding.__init__.__kwdefaults__
  monkeypatch.setitem(defaults, "min_size_to_shard_mb", 8)


@breaks("several_processes")
def each_device_gets_the_whole_batch(tour, monkeypatch):
  @replaces(monkeypatch, type(kd.sharding), "device_put")
  def doubled(original, self, arrays, sharding):
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), arrays)
    return original(self, twice, sharding)


@breaks("several_processes")
def a_loss_is_that_of_half_a_batch(tour, monkeypatch):
  @replaces(monkeypatch, losses_base.AllReduceMean, "from_values")
  def half(original, values, **kwargs):
    return original(values[:len(values) // 2], **kwargs)


@breaks("several_processes")
def each_process_gets_the_same_part(tour, monkeypatch):
  from kauldron.data import in_memory

  monkeypatch.setattr(in_memory.BatchedIndexSampler, "_start", 0)


@breaks("several_processes")
def no_position_is_saved(tour, monkeypatch):
  from kauldron.data.iterators import pygrain_handler

  monkeypatch.setattr(pygrain_handler.PyGrainCheckpointHandler, "save",
                      lambda self, directory, args: None)


@breaks("exported_model")
def another_model_is_exported(tour, monkeypatch):
  @replaces(monkeypatch, kd.export.JaxModelExporter, "export")
  def without_relu(original, self, **kwargs):
    with pytest.MonkeyPatch.context() as during_export:
      during_export.setattr(tour.nn, "relu", lambda x: x)
      return original(self, **kwargs)


@breaks("exported_model")
def an_export_needs_flax(tour, monkeypatch):
  monkeypatch.setattr(tour, "USER_FILE", f"import flax\n{tour.USER_FILE}")


@breaks("project")
def the_arguments_of_get_config_are_ignored(tour, monkeypatch):
  @replaces(monkeypatch, konfig, "get_config_from_module")
  def without_arguments(original, module, arguments):
    return original(module)


@breaks("project")
def arguments_on_the_command_line_are_ignored(tour, monkeypatch):
  from kauldron.konfig import module_configdict

  monkeypatch.setattr(
      module_configdict.ModuleConfigDict, "config_args",
      property(lambda self: self.module.ConfigArgs(
          **module_configdict._parse_kv_string_to_dict(self.cli_str_arg))))


def _override_is_ignored(monkeypatch, path):
  from kauldron.konfig import module_configdict

  @replaces(monkeypatch, module_configdict, "_apply_overrides")
  def without_path(original, config, overrides):
    overrides = {key: x for key, x in overrides.items() if key != path}
    return original(config, overrides)


@breaks("project")
def an_override_of_a_number_is_ignored(tour, monkeypatch):
  _override_is_ignored(monkeypatch, "num_train_steps")


@breaks("project", FileNotFoundError)
def an_override_of_an_object_is_ignored(tour, monkeypatch):
  _override_is_ignored(monkeypatch, "checkpointer")


def _overrides_change_more(monkeypatch, change):
  from kauldron.konfig import module_configdict

  @replaces(monkeypatch, module_configdict, "_apply_overrides")
  def and_change(original, config, overrides):
    original(config, overrides)
    if overrides:
      change(config)


@breaks("project")
def an_override_sets_another_number(tour, monkeypatch):
  def change(cfg):
    cfg.num_train_steps = 25

  _overrides_change_more(monkeypatch, change)


@breaks("project")
def an_override_makes_another_object(tour, monkeypatch):
  def change(cfg):
    cfg.checkpointer.save_interval_steps = 7

  _overrides_change_more(monkeypatch, change)


@breaks("project")
def overrides_change_the_model(tour, monkeypatch):
  def change(cfg):
    cfg.model.width = 16

  _overrides_change_more(monkeypatch, change)


@breaks("project")
def overrides_change_the_rate(tour, monkeypatch):
  def change(cfg):
    cfg.schedules.learning_rate.init_value = 0.01

  _overrides_change_more(monkeypatch, change)


@breaks("project")
def what_refers_to_an_override_does_not_follow(tour, monkeypatch):
  def change(cfg):
    cfg.schedules.learning_rate.decay_steps = 100

  _overrides_change_more(monkeypatch, change)


@breaks("project")
def a_project_learns_nothing(tour, monkeypatch):
  monkeypatch.setattr(optax, "apply_updates", lambda params, updates: params)


@breaks("project")
def the_config_names_another_model(tour, monkeypatch):
  @replaces(monkeypatch, konfig.ConfigDict, "to_json")
  def renamed(original, cfg):
    return original(cfg).replace("project:Classifier", "project:Model")


@breaks("random_streams")
def evaluation_has_all_streams(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.RngStreams, "eval_rngs")
  def all_streams(original, self, step):
    return self.train_rngs(step) | original(self, step)


@breaks("random_streams")
def the_flag_is_never_set(tour, monkeypatch):
  monkeypatch.setattr(tour.Noisy, "is_training", False)


@breaks("random_streams")
def the_flag_is_always_set(tour, monkeypatch):
  monkeypatch.setattr(tour.Noisy, "is_training", True)


def _changes_dropped(monkeypatch, change):
  """Lets `change` edit what dropout returns."""

  @replaces(monkeypatch, kd.nn.Dropout, "__call__")
  def changed(original, self, inputs):
    return change(self, original(self, inputs))


@breaks("random_streams")
def half_is_dropped(tour, monkeypatch):
  def change(self, dropped):
    return dropped.at[: len(dropped) // 2].set(0) if self.is_training else (
        dropped)

  _changes_dropped(monkeypatch, change)


@breaks("random_streams")
def what_is_kept_is_not_scaled_up(tour, monkeypatch):
  def change(self, dropped):
    return dropped * 0.75 if self.is_training else dropped

  _changes_dropped(monkeypatch, change)


@breaks("random_streams")
def evaluation_counts_its_batches_from_one(tour, monkeypatch):
  @replaces(monkeypatch, kd.evals.Evaluator, "_step")
  def next_step(original, self, step_nr, state, batch):
    return original(self, step_nr + 1, state, batch)


@breaks("random_streams")
def each_evaluation_has_noise_of_its_own(tour, monkeypatch):
  asked = itertools.count()

  @replaces(monkeypatch, kd.evals.Evaluator, "step")
  def other_step(original, self, *, step_nr, **kwargs):
    return original(self, step_nr=step_nr + next(asked) // 2, **kwargs)


@breaks("random_streams")
def evaluation_drops_too(tour, monkeypatch):
  def change(self, dropped):
    return dropped if self.is_training else dropped.at[0].set(0)

  _changes_dropped(monkeypatch, change)


def _stream_has_another_key(monkeypatch, name):
  """Gives a stream another key whenever it is asked for one."""
  asked = itertools.count()

  @replaces(monkeypatch, kd.train.RngStreams, "train_rngs")
  def train_rngs(original, self, step):
    keys = original(self, step)
    if name in keys:
      keys = keys | {name: keys[name].fold_in(next(asked))}
    return keys


@breaks("random_streams")
def noise_has_another_key_each_time(tour, monkeypatch):
  _stream_has_another_key(monkeypatch, "noise")


@breaks("random_streams")
def dropout_has_another_key_each_time(tour, monkeypatch):
  _stream_has_another_key(monkeypatch, "dropout")


def _stream_has_one_key(monkeypatch, name):
  """Gives a stream the same key at all steps."""

  @replaces(monkeypatch, kd.train.RngStream, "make")
  def make(original, self, rng, *, step=None, key=None):
    return original(self, rng, step=0 if self.name == name else step, key=key)


@breaks("random_streams")
def noise_has_one_key_for_all_steps(tour, monkeypatch):
  _stream_has_one_key(monkeypatch, "noise")


@breaks("random_streams")
def dropout_has_one_key_for_all_steps(tour, monkeypatch):
  _stream_has_one_key(monkeypatch, "dropout")


@breaks("random_streams")
def a_key_is_the_same_with_another_seed(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.RngStreams, "train_rngs")
  def with_seed_0(original, self, step):
    return original(dataclasses.replace(self, seed=0), step)


@breaks("random_streams")
def noise_is_the_same_in_evaluation(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.RngStream, "make")
  def without_mode(original, self, rng, *, step=None, key=None):
    return original(self, rng, step=step)


def _changes_statistics(monkeypatch, name, change):
  """Lets `train()` return other running statistics."""

  def change_statistics(trainer, state):
    del trainer
    if state.collections:
      stats = state.collections["batch_stats"]["norm"]
      stats[name] = change(stats[name])
    return state

  _changes_trained(monkeypatch, change_statistics)


@breaks("model_state")
def statistics_follow_faster(tour, monkeypatch):
  @replaces(monkeypatch, tour.nn, "BatchNorm")
  def faster(original, momentum, **kwargs):
    return original(momentum=momentum / 2, **kwargs)


@breaks("model_state")
def a_mean_is_rounded(tour, monkeypatch):
  _changes_statistics(monkeypatch, "mean", lambda x: x.round(2))


@breaks("model_state")
def a_variance_is_rounded(tour, monkeypatch):
  _changes_statistics(monkeypatch, "var", lambda x: x.round(2))


@breaks("model_state")
def a_collection_has_another_shape_in_the_context(tour, monkeypatch):
  @replaces(monkeypatch, kontext, "flatten_with_path")
  def flat(original, tree, **kwargs):
    found = original(tree, **kwargs)
    return {path: jax.ShapeDtypeStruct((32,), np.float32)
            if path.endswith("norm.mean") else value
            for path, value in found.items()}


@breaks("model_state")
def collections_are_not_used(tour, monkeypatch):
  @replaces(monkeypatch, tour.MLP.__mro__[1], "apply")
  def apply(original, self, variables, *args, **kwargs):
    if kwargs.get("is_training_property") is False:
      kwargs["is_training_property"] = True
      kwargs["mutable"] = ["batch_stats"]
      return original(self, variables, *args, **kwargs)[0]
    return original(self, variables, *args, **kwargs)


@breaks("data_pipeline")
def an_epoch_counts_the_last_examples(tour, monkeypatch):
  @replaces(monkeypatch, kd.data.py.DataSource, "__len__")
  def rounded_up(original, self):
    return original(self) + 1


@breaks("data_pipeline")
def what_is_renamed_is_zero(tour, monkeypatch):
  @replaces(monkeypatch, kd.data.Elements, "map")
  def zero(original, self, example):
    example = original(self, example)
    return example | {"direction": 0 * example["direction"]}


@breaks("data_pipeline")
def a_transform_is_left_out(tour, monkeypatch):
  monkeypatch.setattr(
      tour.Scale, "map_element", lambda self, element: element)


@breaks("data_pipeline")
def examples_are_always_shuffled(tour, monkeypatch):
  @replaces(monkeypatch, kd.data.py.DataSource, "ds_for_current_process")
  def shuffled(original, self, rng):
    return original(self, rng).shuffle(seed=0)


@breaks("data_pipeline", KeyError)
def transforms_are_applied_backwards(tour, monkeypatch):
  from kauldron.data.py import transform_utils

  @replaces(monkeypatch, transform_utils, "apply_transforms")
  def backwards(original, ds, transforms):
    return original(ds, list(transforms)[::-1])


@breaks("data_pipeline")
def the_spec_has_another_shape(tour, monkeypatch):
  element_spec = kd.data.py.DataSource.element_spec.func

  def transposed(self):
    spec = element_spec(self)
    image = jax.ShapeDtypeStruct((48, 8, 8), np.float32)
    return spec | {"image": image}

  monkeypatch.setattr(
      kd.data.py.DataSource, "element_spec", property(transposed))


@breaks("data_pipeline")
def some_images_are_flipped_the_other_way(tour, monkeypatch):
  @replaces(monkeypatch, kd.data.py.RandomFlipLeftRight, "random_map_element")
  def some(original, self, element, rng):
    flipped = original(self, element, rng)
    return flipped if rng.random() < 0.5 else element[::-1]


@breaks("data_pipeline")
def no_image_is_flipped(tour, monkeypatch):
  monkeypatch.setattr(
      kd.data.py.RandomFlipLeftRight, "random_map_element",
      lambda self, element, rng: element)


def _changes_json_pipelines(monkeypatch, **fields):
  """Lets a config of a JSON file have other fields."""

  @replaces(monkeypatch, konfig, "resolve")
  def changed(original, cfg):
    is_json = getattr(cfg, "__qualname__", "").endswith("Json")
    return original(cfg | fields if is_json else cfg)


@breaks("data_files")
def a_batch_is_half_as_large(tour, monkeypatch):
  _changes_json_pipelines(monkeypatch, batch_size=3)


@breaks("data_files")
def a_file_is_read_in_another_order(tour, monkeypatch):
  _changes_json_pipelines(monkeypatch, shuffle=True)


@breaks("data_files")
def weights_are_ignored(tour, monkeypatch):
  monkeypatch.setattr(kd.data.py.Mix, "weights", property(
      lambda self: [1, 1], lambda *_: None))


@breaks("own_parts")
def parameters_are_not_transformed(tour, monkeypatch):
  monkeypatch.setattr(
      tour.ScaleParams, "transform", lambda self, state: state)


@breaks("own_parts")
def a_skipped_batch_counts_no_step(tour, monkeypatch):
  @replaces(monkeypatch, tour.SkipBadBatches, "_step")
  def uncounted(original, self, state, batch):
    new_state, context = original(self, state, batch)
    is_good = jnp.isfinite(context.loss_total)
    return new_state.replace(step=state.step + is_good), context


@breaks("own_parts")
def bad_batches_are_not_skipped(tour, monkeypatch):
  monkeypatch.setattr(
      tour.SkipBadBatches, "_step", kd.train.TrainStep._step)


@breaks("own_parts")
def a_skipped_batch_moves_the_parameters(tour, monkeypatch):
  @replaces(monkeypatch, tour.SkipBadBatches, "_step")
  def moved(original, self, state, batch):
    kept, context = original(self, state, batch)
    return kept.replace(
        params=jax.tree.map(lambda x: 1.001 * x, kept.params)), context


@breaks("own_parts")
def a_skipped_batch_moves_the_optimizer(tour, monkeypatch):
  @replaces(monkeypatch, tour.SkipBadBatches, "_step")
  def parameters_only(original, self, state, batch):
    kept, context = original(self, state, batch)
    counted = jax.tree.map(
        lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x,
        kept.opt_state)
    return kept.replace(opt_state=counted), context


@breaks("own_parts")
def a_summary_shows_other_weights(tour, monkeypatch):
  @replaces(monkeypatch, tour.KernelImages, "get_state")
  def backwards(original, self, kernel):
    return original(self, kernel[:, ::-1])


@breaks("own_parts")
def a_summary_keeps_all(tour, monkeypatch):
  monkeypatch.setattr(
      auto_state._Truncate, "finalize", lambda self, value, state: value)


@breaks("own_parts")
def an_evaluator_runs_once(tour, monkeypatch):
  monkeypatch.setattr(kd.evals.EveryNSteps, "should_eval_in_train",
                      lambda self, step: step == 0)


@breaks("own_parts")
def an_evaluator_writes_other_numbers(tour, monkeypatch):
  _changes_scalars(monkeypatch, "head", 1.001, "weights")


@breaks("own_experiment")
def the_last_checkpoint_is_not_saved(tour, monkeypatch):
  @replaces(monkeypatch, kd.ckpts.Checkpointer, "should_save")
  def until_99(original, self, step):
    return step < 100 and original(self, step)


@breaks("own_experiment")
def an_experiment_learns_slowly(tour, monkeypatch):
  @replaces(monkeypatch, optax, "cosine_decay_schedule")
  def slow(original, init_value, decay_steps):
    return original(init_value / 30, decay_steps)


@breaks("own_experiment")
def a_metric_of_two_heads_is_scaled(tour, monkeypatch):
  @replaces(monkeypatch, tour.RSquared.State, "compute")
  def scaled(original, self):
    return original(self) * 0.99


@breaks("own_experiment")
def the_total_is_a_mean(tour, monkeypatch):
  @replaces(monkeypatch, kd.train.AuxiliariesState, "compute")
  def mean(original, self, **kwargs):
    values = original(self, **kwargs)
    losses = values.loss_values
    if "losses/total" in losses:
      losses["losses/total"] = losses["losses/total"] / (len(losses) - 1)
    return values


@breaks("own_experiment")
def a_loss_has_no_weight(tour, monkeypatch):
  monkeypatch.setattr(
      kd.losses.Loss, "get_weight", lambda self, step=None: jnp.asarray(1.0))


@pytest.mark.parametrize("name", CASES)
def test_section_fails(name, monkeypatch, capsys):
  case = CASES[name]
  monkeypatch.setattr(kauldron_tour, "RESULTS", {})
  with broken(case, monkeypatch):
    kauldron_tour.run_section(kauldron_tour.SECTIONS[case.section])
  result = kauldron_tour.RESULTS[case.section]
  assert result["status"] == "FAIL"
  kind = result["reason"].partition(":")[0]
  assert kind in ("AssertionError", case.error.__name__), result["reason"]
  assert kauldron_tour.print_summary() == 1
  assert f"--only {case.section}" in capsys.readouterr().out


def test_every_section_has_a_case():
  sections = {case.section for case in CASES.values()}
  assert sections == set(kauldron_tour.SECTIONS)
