"""A ktyping `Config` that is left by an error keeps checking switched off.

Its context manager removes the override after the block, without `finally`.
"""

from kauldron import ktyping as kt
from kauldron.ktyping import config
import numpy as np
import pytest


@kt.typechecked
def scalar(x: kt.Float[""]):
  return x


def test_config_after_error(monkeypatch):
  monkeypatch.setattr(config, "CONFIG_OVERRIDES", {})
  with pytest.raises(kt.KTypeCheckError):
    scalar(np.ones(3))
  with pytest.raises(ValueError), kt.Config(typechecking_enabled=False):
    raise ValueError
  try:
    scalar(np.ones(3))
  except kt.KTypeCheckError:
    pytest.fail("mended upstream: remove the caveat in test_kauldron.py")
