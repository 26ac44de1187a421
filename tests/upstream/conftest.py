"""The smallest config that trains, for the reproductions in this folder."""

from kauldron import konfig
import pytest

with konfig.imports():
  from flax import linen as nn
  import functools
  from kauldron import kd
  import numpy as np
  import optax


@pytest.fixture
def cfg(tmp_path):
  """The config of a linear model, which trains in `tmp_path`."""
  cfg = kd.train.Trainer()
  cfg.workdir = str(tmp_path)
  cfg.train_ds = kd.data.InMemoryPipeline(
      loader=functools.partial(np.ones, (4, 2), "float32"), batch_size=2)
  cfg.model = kd.nn.ExternalModule(
      model=nn.Dense(2), keys={"inputs": "batch"})
  cfg.train_losses = {"l2": kd.losses.L2(preds="preds", targets="batch")}
  cfg.optimizer = optax.sgd(learning_rate=0.1)
  cfg.num_train_steps = 2
  cfg.profiler = None
  return cfg
