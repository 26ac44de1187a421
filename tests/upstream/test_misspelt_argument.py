"""A config takes an argument that its function does not have.

The misspelt name is found only by `konfig.resolve`.
"""

from kauldron import konfig
import pytest

with konfig.imports():
  import optax


def test_misspelt_argument():
  cfg = optax.sgd(learning_rate=0.1)
  try:
    cfg.learning_rat = 0.5
  except (AttributeError, KeyError, TypeError, ValueError):
    pytest.fail("mended upstream: remove the caveat in section config_errors")
  with pytest.raises(TypeError, match="unexpected keyword .*'learning_rat'"):
    konfig.resolve(cfg)
