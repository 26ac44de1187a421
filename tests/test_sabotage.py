"""A section fails when what it claims is no longer true.

Each case breaks one thing inside Kauldron or beside it, and names the section
that claims it and the error that must end it.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata

import jax
import jax.numpy as jnp
from kauldron import kd
from kauldron import konfig
from kauldron import kontext
from kauldron.konfig import module_configdict
from kauldron.ktyping import config
import optax
import pytest

CASES = {}


def breaks(section, error=AssertionError):
  """Registers a function that breaks what a section claims."""

  def register(function):
    CASES[function.__name__.strip("_")] = (section, error, function)
    return function

  return register


# Part I.


@breaks("where_we_are")
def _imported_is_not_installed(tour, monkeypatch):
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")


@breaks("where_we_are", AttributeError)
def _etils_cannot_read_a_dtype(tour, monkeypatch):
  def asks_private_module(dtype):
    return isinstance(dtype, jax._src.no_such_module.KeyTy)

  monkeypatch.setattr(
      tour.enp.array_spec, "_is_jax_random_dtype", asks_private_module)


@breaks("config_tree")
def _resolve_ignores_the_config(tour, monkeypatch):
  resolve = konfig.resolve
  always = {"__qualname__": "optax:sgd", "learning_rate": 0.5}
  monkeypatch.setattr(konfig, "resolve", lambda cfg: resolve(always))


@breaks("config_tree")
def _json_forgets_a_mutation(tour, monkeypatch):
  to_json = konfig.ConfigDict.to_json
  monkeypatch.setattr(
      konfig.ConfigDict, "to_json",
      lambda cfg: to_json(cfg).replace("0.4", "0.5"))


@breaks("config_tree")
def _json_forgets_that_a_part_is_shared(tour, monkeypatch):
  to_json = konfig.ConfigDict.to_json
  monkeypatch.setattr(
      konfig.ConfigDict, "to_json",
      lambda cfg: to_json(cfg).replace(', "__id__": 0', ""))


@breaks("config_tree")
def _a_misspelt_argument_is_dropped(tour, monkeypatch):
  resolve = konfig.resolve

  def forgiving(cfg):
    return resolve({k: v for k, v in dict(cfg).items() if k != "learning_rat"})

  monkeypatch.setattr(konfig, "resolve", forgiving)


@breaks("config_tree")
def _any_type_is_accepted(tour, monkeypatch):
  set_field = konfig.ConfigDict.__setattr__

  def forgiving(cfg, name, value):
    with contextlib.suppress(TypeError):
      set_field(cfg, name, value)

  monkeypatch.setattr(konfig.ConfigDict, "__setattr__", forgiving)


@breaks("config_tree", TypeError)
def _merging_changes_the_original(tour, monkeypatch):
  def merge(cfg, other):
    cfg.update(other)
    return cfg

  monkeypatch.setattr(konfig.ConfigDict, "__or__", merge)


@breaks("config_references")
def _a_function_of_a_reference_is_a_copy(tour, monkeypatch):
  monkeypatch.setattr(
      konfig, "ref_fn", lambda function, x: function(x.get()))


@breaks("config_references")
def _a_reference_is_a_copy(tour, monkeypatch):
  monkeypatch.setattr(konfig.ConfigDict, "ref", property(lambda cfg: cfg))


@breaks("config_references")
def _lists_are_not_frozen(tour, monkeypatch):
  resolve = konfig.resolve
  monkeypatch.setattr(
      konfig, "resolve", lambda cfg: resolve(cfg, freeze=False))


@breaks("key_paths")
def _a_path_stops_at_its_first_index(tour, monkeypatch):
  resolve = kontext.resolve_from_keyed_obj

  def first_head(context, keyed):
    arrays = resolve(context, keyed)
    if isinstance(context["preds"], dict):
      arrays["logits"] = context["preds"]["heads"][0]["logits"]
    return arrays

  monkeypatch.setattr(kontext, "resolve_from_keyed_obj", first_head)


@breaks("key_paths")
def _a_path_has_no_slices(tour, monkeypatch):
  from_str = kontext.Path.from_str
  monkeypatch.setattr(
      kontext.Path, "from_str",
      lambda text: from_str(text.partition("[...")[0]))


@breaks("key_paths", KeyError)
def _a_builder_forgets_the_first_part(tour, monkeypatch):
  build = kontext.path_builder_from
  monkeypatch.setattr(
      kontext, "path_builder_from", lambda prefix, cls: build("batch", cls))


@breaks("key_paths")
def _what_is_set_past_the_end_is_appended(tour, monkeypatch):
  set_by_path = kontext.set_by_path

  def append(context, path, value):
    if path == "preds.heads[2]":
      context["preds"]["heads"].append(value)
    else:
      return set_by_path(context, path, value)

  monkeypatch.setattr(kontext, "set_by_path", append)


@breaks("key_paths")
def _a_glob_sets_one_match_only(tour, monkeypatch):
  set_by_path = kontext.set_by_path
  monkeypatch.setattr(
      kontext, "set_by_path",
      lambda tree, path, value: set_by_path(
          tree, path.replace("**", "preds.heads[0]"), value))


@breaks("shape_checker")
def _nothing_is_checked(tour, monkeypatch):
  typechecked = tour.kt.typechecked
  monkeypatch.setattr(tour.kt, "typechecked", lambda *function: (
      function[0] if function else typechecked()))


@breaks("shape_checker")
def _a_block_knows_every_axis(tour, monkeypatch):
  from kauldron.ktyping import dim_view
  monkeypatch.setattr(dim_view.DimView, "__contains__", lambda *_: True)


@breaks("shape_checker")
def _nothing_fits_a_shape(tour, monkeypatch):
  monkeypatch.setattr(tour.kt, "isinstance", lambda value, spec: False)


@breaks("shape_checker", ValueError)
def _everything_is_refused(tour, monkeypatch):
  def refuse(function):
    def call(*args, **kwargs):
      raise ValueError("refused")
    return call

  monkeypatch.setattr(tour.kt, "typechecked", refuse)


def _refuses_nothing_of(monkeypatch, tour, spec):
  """Lets the checkers read one axis spec as any shape."""
  matches = tour.kt.Float["a b"].__class__.__getitem__
  monkeypatch.setattr(
      tour.kt.Float.__class__, "__getitem__",
      lambda cls, axes: matches(cls, "..." if axes == spec else axes))


@breaks("type_checkers")
def _an_optional_axis_is_any_axes(tour, monkeypatch):
  _refuses_nothing_of(monkeypatch, tour, "b? a")


@breaks("type_checkers")
def _a_product_of_axes_is_any_size(tour, monkeypatch):
  _refuses_nothing_of(monkeypatch, tour, "a*b")


@breaks("shape_checker")
def _a_dataclass_is_not_checked(tour, monkeypatch):
  monkeypatch.setattr(tour, "Noise", dataclasses.make_dataclass(
      "Noise", ["mean", "scale", "key"]))


@breaks("shape_checker")
def _a_generator_is_not_checked(tour, monkeypatch):
  def unchecked(tree, scales):
    for leaf in jax.tree.leaves(tree):
      yield leaf[..., 0]

  monkeypatch.setattr(tour, "norms", unchecked)


@breaks("loss_and_metric")
def _a_loss_is_constant(tour, monkeypatch):
  monkeypatch.setattr(
      tour.FocalLoss, "get_values",
      lambda self, logits, labels: jnp.ones(labels.shape))


@breaks("loss_and_metric")
def _a_loss_ignores_its_mask(tour, monkeypatch):
  state = kd.losses.Loss.State
  from_values = state.from_values
  monkeypatch.setattr(
      state, "from_values",
      lambda values, mask=None, **kwargs: from_values(values, **kwargs))


@breaks("loss_and_metric")
def _small_weights_are_not_normalized(tour, monkeypatch):
  monkeypatch.setattr(
      kd.losses.Loss.State, "compute",
      lambda self: self.value / jnp.clip(self.count, min=1.0))


@breaks("loss_and_metric")
def _merging_drops_a_batch(tour, monkeypatch):
  monkeypatch.setattr(
      tour.BalancedAccuracy.State, "merge", lambda self, other: self)


@breaks("loss_and_metric")
def _batches_are_averaged(tour, monkeypatch):
  def merge(self, other):
    return type(self)(value=(self.compute() + other.compute()) / 2,
                      count=jnp.ones(()))

  monkeypatch.setattr(kd.losses.Loss.State, "merge", merge)


# Part II.


@breaks("real_trainer")
def _nothing_is_learnt(tour, monkeypatch):
  monkeypatch.setattr(optax, "apply_updates", lambda params, updates: params)


@breaks("real_trainer")
def _a_placeholder_has_a_default(tour, monkeypatch):
  resolve = konfig.resolve

  def filled(cfg):
    return resolve(cfg if cfg.workdir else cfg | {"workdir": "/tmp"})

  monkeypatch.setattr(konfig, "resolve", filled)


@breaks("real_trainer")
def _the_extra_step_is_gone(tour, monkeypatch):
  from kauldron.train import train_loop

  enum_steps = train_loop._enum_steps_with_hooks

  def one_less(*, num_train_steps, **kwargs):
    return enum_steps(num_train_steps=num_train_steps - 1, **kwargs)

  monkeypatch.setattr(train_loop, "_enum_steps_with_hooks", one_less)


@breaks("readable_loop")
def _the_loss_is_halved(tour, monkeypatch):
  monkeypatch.setattr(
      kd.losses.Loss, "get_weight",
      lambda self, step=None: jnp.asarray(0.5))


@breaks("readable_loop")
def _the_optimizer_starts_elsewhere(tour, monkeypatch):
  init = kd.train.TrainStep._init_optimizer

  def later(self, state):
    state = init(self, state)
    opt_state = jax.tree.map(lambda x: x + 1, state.opt_state)
    return state.replace(opt_state=opt_state)

  monkeypatch.setattr(kd.train.TrainStep, "_init_optimizer", later)


@breaks("inner_layer")
def _a_metric_sees_another_layer(tour, monkeypatch):
  get_state = kd.metrics.Norm.get_state
  monkeypatch.setattr(
      kd.metrics.Norm, "get_state",
      lambda self, tensor: get_state(self, tensor=tensor[..., ::2]))


@breaks("inner_layer")
def _a_spread_is_a_variance(tour, monkeypatch):
  compute = kd.metrics.stats.StdState.compute
  monkeypatch.setattr(
      kd.metrics.stats.StdState, "compute", lambda self: compute(self) ** 2)


@breaks("inner_layer")
def _what_is_concatenated_merges_under_jit(tour, monkeypatch):
  monkeypatch.setattr(
      kd.summaries.HistogramSummary.State, "merge", lambda self, other: self)


@breaks("inner_layer")
def _a_histogram_counts_some_values_twice(tour, monkeypatch):
  read_events = tour.read_events

  def read(workdir, tag, *collection):
    steps, values = read_events(workdir, tag, *collection)
    if tag == "summaries/layer":
      values[-1][3][2] *= 2
    return steps, values

  monkeypatch.setattr(tour, "read_events", read)


@breaks("inner_layer")
def _a_histogram_loses_its_sign(tour, monkeypatch):
  get_state = kd.summaries.HistogramSummary.get_state
  monkeypatch.setattr(
      kd.summaries.HistogramSummary, "get_state",
      lambda self, tensor: get_state(self, tensor=jnp.abs(tensor)))


@breaks("sweep")
def _an_override_is_lost(tour, monkeypatch):
  monkeypatch.setattr(kontext, "set_by_path", lambda cfg, path, value: [])


@breaks("sweep")
def _a_variant_is_resolved_as_the_base(tour, monkeypatch):
  resolve = konfig.resolve

  def ignore_width(cfg):
    if "model" in cfg:
      cfg.model.width = tour.WIDTH
    return resolve(cfg)

  monkeypatch.setattr(konfig, "resolve", ignore_width)


@breaks("resumed_run")
def _a_data_iterator_restarts(tour, monkeypatch):
  from kauldron.data.iterators import PyGrainIterator

  monkeypatch.setattr(
      PyGrainIterator, "__kd_ocp_restore_post__",
      lambda self, value: iter(self.source))


@breaks("resumed_run")
def _a_resume_starts_from_scratch(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.Checkpointer, "restore", lambda self, state, **kwargs: state)


# Part III.


@breaks("evaluators")
def _reuses_training_data(tour, monkeypatch):
  def batches(self):
    ds = self.base_cfg.train_ds.take(4)
    return ds.device_put(self.base_cfg.sharding.batch)

  monkeypatch.setattr(kd.evals.Evaluator, "ds_iter", property(batches))


@breaks("evaluators")
def _scores_one_batch_only(tour, monkeypatch):
  def batches(self):
    return self.ds.take(1).device_put(self.base_cfg.sharding.batch)

  monkeypatch.setattr(kd.evals.Evaluator, "ds_iter", property(batches))


@breaks("evaluators")
def _scores_the_first_state_only(tour, monkeypatch):
  evaluate, first = kd.evals.Evaluator.evaluate, []

  def stale(self, state, step):
    first.append(jax.tree.map(lambda x: x.copy(), state))
    return evaluate(self, first[0], step)

  monkeypatch.setattr(kd.evals.Evaluator, "evaluate", stale)


@breaks("evaluators")
def _scores_the_last_parameters_only(tour, monkeypatch):
  monkeypatch.setattr(
      kd.optim.UseEmaParams, "transform", lambda self, state: state)


@breaks("evaluators")
def _keeps_the_last_images(tour, monkeypatch):
  from kauldron.metrics import auto_state
  monkeypatch.setattr(
      auto_state._Truncate, "merge", lambda self, old, new, state: new)


@breaks("evaluators")
def _runs_at_every_step(tour, monkeypatch):
  monkeypatch.setattr(
      kd.evals.EveryNSteps, "should_eval_in_train", lambda *_: True)


@breaks("evaluators")
def _keeps_the_newest_checkpoint(tour, monkeypatch):
  monkeypatch.setattr(kd.ckpts.Checkpointer, "best_metric_path", property(
      lambda self: None, lambda *_: None))


@breaks("evaluators")
def _always_uses_the_metrics_of_training(tour, monkeypatch):
  monkeypatch.setattr(kd.evals.Evaluator, "metrics", property(
      lambda self: self.base_cfg.train_metrics, lambda *_: None))


@breaks("rebuilt_run")
def _restores_nothing(tour, monkeypatch):
  monkeypatch.setattr(kd.ckpts.Checkpointer, "restore",
             lambda self, state, **_: state)


@breaks("rebuilt_run")
def _restores_no_optimizer_state(tour, monkeypatch):
  restore = kd.ckpts.Checkpointer.restore

  def partly(self, state, **kwargs):
    fresh = jax.tree.map(lambda x: x.copy(), getattr(state, "opt_state", None))
    new = restore(self, state, **kwargs)
    return new.replace(opt_state=fresh) if fresh else new

  monkeypatch.setattr(kd.ckpts.Checkpointer, "restore", partly)


@breaks("rebuilt_run")
def _scores_an_untrained_state_later(tour, monkeypatch):
  from kauldron.evals import eval_impl

  def forget(*, trainer_ckpt, state, step):
    return trainer_ckpt.restore(state, step=step).replace(
        params=jax.tree.map(jnp.zeros_like, state.params))

  monkeypatch.setattr(eval_impl, "_restore_checkpoint", forget)


@breaks("rebuilt_run")
def _writes_another_config(tour, monkeypatch):
  write = kd.train.KDMetricWriter.write_config

  def other(self, config):
    config = tour.konfig.ConfigDict(tour.json.loads(config.to_json()))
    config.optimizer.learning_rate *= 2
    write(self, config)

  monkeypatch.setattr(kd.train.KDMetricWriter, "write_config", other)


@breaks("partial_training")
def _freezes_nothing(tour, monkeypatch):
  monkeypatch.setattr(
      kd.optim, "partial_updates", lambda optimizer, mask: optimizer)


@breaks("partial_training")
def _freezes_everything(tour, monkeypatch):
  monkeypatch.setattr(kd.optim, "partial_updates",
             lambda optimizer, mask: optax.set_to_zero())


@breaks("partial_training")
def _selects_the_rest(tour, monkeypatch):
  monkeypatch.setattr(kd.optim, "exclude", kd.optim.select)


@breaks("partial_training")
def _loads_nothing(tour, monkeypatch):
  monkeypatch.setattr(kd.ckpts.SimpleCheckpointLoader, "transform",
             lambda self, state: state)


@breaks("event_files")
def _writes_scaled_scalars(tour, monkeypatch):
  write = kd.train.KDMetricWriter.write_scalars

  def scaled(self, step, scalars):
    write(self, step, {k: v * 1.01 for k, v in scalars.items()})

  monkeypatch.setattr(kd.train.KDMetricWriter, "write_scalars", scaled)


@breaks("event_files")
def _writes_summaries_with_the_metrics_only(tour, monkeypatch):
  write = kd.train.KDMetricWriter.write_step_metrics

  def seldom(self, *, step, **kwargs):
    if step % tour.LOG_EVERY == 0:
      write(self, step=step, **kwargs)

  monkeypatch.setattr(kd.train.KDMetricWriter, "write_step_metrics", seldom)


@breaks("loss_and_metric")
def _a_loss_has_the_weight_of_step_0(tour, monkeypatch):
  weight = kd.losses.Loss.get_weight
  monkeypatch.setattr(
      kd.losses.Loss, "get_weight", lambda self, step=None: weight(self, 0))


@breaks("event_files")
def _writes_negative_images(tour, monkeypatch):
  write = kd.train.KDMetricWriter.write_images

  def negative(self, step, images):
    write(self, step, {k: 1 - v for k, v in images.items()})

  monkeypatch.setattr(kd.train.KDMetricWriter, "write_images", negative)


@breaks("event_files")
def _ignores_the_value_range(tour, monkeypatch):
  get_state = kd.summaries.ShowImages.get_state

  def unscaled(self, images):
    return get_state(dataclasses.replace(self, in_vrange=None), images)

  monkeypatch.setattr(kd.summaries.ShowImages, "get_state", unscaled)


@breaks("event_files")
def _writes_no_parameters(tour, monkeypatch):
  monkeypatch.setattr(kd.train.KDMetricWriter, "write_param_overview",
             lambda self, step, params: self.write_texts(
                 step, {"parameters": "Total: 0 -- 0 bytes"}))


@breaks("sharding")
def _small_arrays_are_divided_by_default(tour, monkeypatch):
  defaults = kd.sharding.FSDPSharding.__init__.__kwdefaults__
  monkeypatch.setitem(defaults, "min_size_to_shard_mb", 1)


@breaks("sharding")
def _copies_instead(tour, monkeypatch):
  monkeypatch.setattr(kd.sharding.FSDPSharding, "__call__",
             lambda self, tree: kd.sharding.REPLICATED)


@breaks("sharding")
def _copies_the_optimizer_state(tour, monkeypatch):
  monkeypatch.setattr(kd.sharding.ShardingStrategy, "opt_state",
             kd.sharding.REPLICATED)
  init = kd.sharding.ShardingStrategy.__init__

  def replicated(self, **kwargs):
    init(self, **kwargs | {"opt_state": kd.sharding.REPLICATED})

  monkeypatch.setattr(kd.sharding.ShardingStrategy, "__init__", replicated)


@breaks("sharding")
def _trains_otherwise_when_sharded(tour, monkeypatch):
  init = kd.train.Trainer.init_state

  def other(self, *args, **kwargs):
    state = init(self, *args, **kwargs)
    if isinstance(self.sharding.params, kd.sharding.FSDPSharding):
      params = jax.tree.map(lambda x: x * 1.001, state.params)
      state = state.replace(params=params)
    return state

  monkeypatch.setattr(kd.train.Trainer, "init_state", other)


def _changes_overrides(monkeypatch, change):
  """Lets `change` edit config and overrides before the flags are applied."""
  apply = module_configdict._apply_overrides

  def changed(config, overrides):
    overrides = dict(overrides)
    change(config, overrides)
    return apply(config, overrides=overrides)

  monkeypatch.setattr(module_configdict, "_apply_overrides", changed)


@breaks("config_file")
def _ignores_an_override(tour, monkeypatch):
  _changes_overrides(monkeypatch, lambda config, overrides: overrides.pop(
      "train_losses.focal.gamma"))


@breaks("config_file")
def _ignores_an_object(tour, monkeypatch):
  _changes_overrides(
      monkeypatch, lambda config, overrides: overrides.pop("model"))


@breaks("config_file")
def _reads_a_call_as_its_name(tour, monkeypatch):
  def quote(config, overrides):
    overrides["aux"] = overrides["aux"].replace("a.b()", "'a.b'")

  _changes_overrides(monkeypatch, quote)


@breaks("config_file")
def _cuts_references(tour, monkeypatch):
  _changes_overrides(
      monkeypatch,
      lambda config, overrides: setattr(config, "log_summaries_every", 10))


@breaks("random_streams")
def _never_trains(tour, monkeypatch):
  monkeypatch.setattr(
      kd.nn.Dropout, "is_training", property(lambda self: False))


@breaks("random_streams")
def _has_one_mask_for_all_steps(tour, monkeypatch):
  make = kd.train.RngStream.make
  monkeypatch.setattr(kd.train.RngStream, "make",
             lambda self, rng, *, step=None, key=None: make(
                 self, rng, step=0, key=key))


@breaks("random_streams")
def _gives_every_stream_the_same_key(tour, monkeypatch):
  fold_in = kd.random.PRNGKey.fold_in
  monkeypatch.setattr(kd.random.PRNGKey, "fold_in",
             lambda self, data: self if isinstance(data, str)
             else fold_in(self, data))


@breaks("random_streams")
def _does_not_rescale(tour, monkeypatch):
  call = kd.nn.Dropout.__call__

  def unscaled(self, inputs, **kwargs):
    return call(self, inputs, **kwargs) * 0.75

  monkeypatch.setattr(kd.nn.Dropout, "__call__", unscaled)


@breaks("data_pipeline")
def _ignores_the_input_range(tour, monkeypatch):
  map_element = kd.data.ValueRange.map_element

  def wrong(self, element):
    object.__setattr__(self, "in_vrange", (0, 1))
    return map_element(self, element)

  monkeypatch.setattr(kd.data.ValueRange, "map_element", wrong)


@breaks("data_pipeline")
def _never_flips(tour, monkeypatch):
  monkeypatch.setattr(
      kd.data.py.RandomFlipLeftRight, "random_map_element",
      lambda self, element, rng: element)


@breaks("data_pipeline")
def _crops_the_same_columns_always(tour, monkeypatch):
  monkeypatch.setattr(
      kd.data.py.RandomCrop, "random_map_element",
      lambda self, element, rng: element[:, :6])


@breaks("data_pipeline", KeyError)
def _applies_transforms_backwards(tour, monkeypatch):
  from kauldron.data.py import transform_utils
  apply = transform_utils.apply_transforms
  monkeypatch.setattr(transform_utils, "apply_transforms",
             lambda ds, transforms: apply(ds, list(transforms)[::-1]))


@breaks("data_pipeline")
def _always_shuffles(tour, monkeypatch):
  source = kd.data.py.DataSource.ds_for_current_process

  def shuffled(self, rng):
    object.__setattr__(self, "shuffle", True)
    return source(self, rng)

  monkeypatch.setattr(kd.data.py.DataSource, "ds_for_current_process", shuffled)


@breaks("data_pipeline")
def _reports_the_source_as_its_spec(tour, monkeypatch):
  from etils import etree
  monkeypatch.setattr(kd.data.py.DataSource, "element_spec", property(
      lambda self: etree.spec_like(self.data_source[0])))


@breaks("type_checkers")
def _older_one_checks_nothing(tour, monkeypatch):
  monkeypatch.setattr(kd.typing, "typechecked", lambda function: function)


@breaks("type_checkers", kd.ktyping.NoActiveScopeError)
def _newer_one_checks_nothing(tour, monkeypatch):
  monkeypatch.setattr(kd.ktyping, "typechecked", lambda function: function)


class Refused(kd.ktyping.KTypeCheckError):
  """What a checker raises that refuses every call."""

  def __init__(self):
    pass

  def __str__(self):
    return "refused"


@breaks("type_checkers", Refused)
def _newer_one_refuses_everything(tour, monkeypatch):
  def refuse(function):
    def call(*args):
      raise Refused
    return call

  monkeypatch.setattr(kd.ktyping, "typechecked", refuse)


@breaks("type_checkers", kd.ktyping.KTypeCheckError)
def _newer_one_cannot_be_switched_off(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ktyping, "Config", lambda **_: contextlib.nullcontext())


@breaks("type_checkers")
def _a_type_takes_other_dtypes(tour, monkeypatch):
  monkeypatch.setattr(kd.ktyping, "UInt16", kd.ktyping.Int16)


@breaks("type_checkers")
def _a_type_has_the_name_of_another(tour, monkeypatch):
  monkeypatch.setattr(kd.ktyping, "TfInt8", kd.ktyping.TfInt16)


@breaks("type_checkers")
def _a_type_of_any_library_takes_only_one(tour, monkeypatch):
  monkeypatch.setattr(kd.ktyping, "XFloat", kd.ktyping.TfFloat)


@breaks("type_checkers")
def _what_is_returned_is_not_checked(tour, monkeypatch):
  def typechecked(function):
    annotations = function.__annotations__
    function.__annotations__ = {
        key: x for key, x in annotations.items() if key != "return"}
    return checked(function)

  checked = kd.typing.typechecked
  monkeypatch.setattr(kd.typing, "typechecked", typechecked)


@breaks("base_classes", KeyError)
def _a_name_is_gone(tour, monkeypatch):
  monkeypatch.delattr(kd.losses, "Huber")


@breaks("base_classes")
def _a_metric_derives_from_nothing(tour, monkeypatch):
  monkeypatch.setattr(kd.metrics, "RocAuc", object)


CACHED = "train_once", "first_steps"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_section_fails(tour, monkeypatch, capsys, case):
  name, error, sabotage = case
  section = getattr(tour, name)
  importlib.import_module("kauldron.train")  # Before anything is broken.
  sabotage(tour, monkeypatch)
  jax.clear_caches()  # What is compiled already does not notice.
  for function in CACHED:  # Nor does what is trained.
    getattr(tour, function).cache_clear()
  tour.run_section(section)
  for function in CACHED:
    getattr(tour, function).cache_clear()
  config.CONFIG_OVERRIDES.clear()  # A failure leaves them, see tests/upstream.
  result = tour.RESULTS[name]
  assert result["status"] == "FAIL"
  assert result["reason"].startswith(error.__name__), result["reason"]
  assert tour.summary() == 1
  assert f"--only {name}" in capsys.readouterr().out


def test_every_section_has_a_case(tour):
  assert {section for section, _, _ in CASES.values()} == set(tour.SECTIONS)
