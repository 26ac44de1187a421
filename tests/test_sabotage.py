"""A section fails when what it claims is no longer true.

Each case breaks one thing inside Kauldron or beside it, and names the section
that claims it and the error that must end it.
"""

import importlib.metadata

import jax
import jax.numpy as jnp
from kauldron import kd
from kauldron import konfig
from kauldron import kontext
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
      lambda cfg: to_json(cfg).replace("0.8", "0.9"))


@breaks("config_references")
def _a_reference_is_a_copy(tour, monkeypatch):
  monkeypatch.setattr(konfig.ConfigDict, "ref", property(lambda cfg: cfg))


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
def _a_glob_sets_one_match_only(tour, monkeypatch):
  set_by_path = kontext.set_by_path
  monkeypatch.setattr(
      kontext, "set_by_path",
      lambda tree, path, value: set_by_path(
          tree, path.replace("**", "preds.heads[0]"), value))


@breaks("shape_checker")
def _nothing_is_checked(tour, monkeypatch):
  monkeypatch.setattr(tour.kt, "typechecked", lambda function: function)


@breaks("shape_checker", ValueError)
def _everything_is_refused(tour, monkeypatch):
  def refuse(function):
    def call(*args, **kwargs):
      raise ValueError("refused")
    return call

  monkeypatch.setattr(tour.kt, "typechecked", refuse)


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
def _the_extra_step_is_gone(tour, monkeypatch):
  from kauldron.train import train_loop

  enum_steps = train_loop._enum_steps_with_hooks

  def one_less(*, num_train_steps, **kwargs):
    return enum_steps(num_train_steps=num_train_steps - 1, **kwargs)

  monkeypatch.setattr(train_loop, "_enum_steps_with_hooks", one_less)


@breaks("real_trainer")
def _restoring_gives_a_fresh_state(tour, monkeypatch):
  monkeypatch.setattr(
      kd.ckpts.Checkpointer, "restore", lambda self, state, **kwargs: state)


@breaks("readable_loop")
def _the_loss_is_halved(tour, monkeypatch):
  monkeypatch.setattr(
      kd.losses.Loss, "get_weight",
      lambda self, step=None: jnp.asarray(0.5))


@breaks("readable_loop")
def _the_optimizer_starts_elsewhere(tour, monkeypatch):
  monkeypatch.setattr(
      kd.train.TrainStep, "_init_optimizer",
      lambda self, state: state.replace(opt_state=jax.tree.map(
          lambda x: x + 1, self.optimizer.init(state.params))))


@breaks("inner_layer")
def _a_metric_sees_another_layer(tour, monkeypatch):
  get_state = kd.metrics.Norm.get_state
  monkeypatch.setattr(
      kd.metrics.Norm, "get_state",
      lambda self, tensor: get_state(self, tensor=tensor[:, ::2]))


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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_section_fails(tour, monkeypatch, capsys, case):
  name, error, sabotage = case
  section = getattr(tour, name)
  if section.imports:
    tour.import_quietly(section.imports)
  sabotage(tour, monkeypatch)
  tour.run_section(section)
  result = tour.RESULTS[name]
  assert result["status"] == "FAIL"
  assert result["reason"].startswith(error.__name__), result["reason"]
  assert tour.summary() == 1
  assert f"--only {name}" in capsys.readouterr().out


def test_every_section_has_a_case(tour):
  assert {section for section, _, _ in CASES.values()} == set(tour.SECTIONS)
