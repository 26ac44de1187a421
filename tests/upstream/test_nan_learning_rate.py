"""A training whose parameters all become NaN ends as if it had succeeded."""

import jax
from kauldron import konfig
import numpy as np
import pytest


def test_nan_learning_rate(cfg):
  cfg.optimizer.learning_rate = float("nan")
  try:
    state, _ = konfig.resolve(cfg).train()
  except FloatingPointError:
    pytest.fail("mended upstream: remove the caveat in section own_parts")
  assert state.step == 3
  assert all(np.isnan(x).all() for x in jax.tree.leaves(state.params)), (
      "mended upstream: remove the caveat in section own_parts")
