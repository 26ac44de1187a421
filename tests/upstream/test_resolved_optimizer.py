"""A resolved optax transformation in a config gives an error about `__new__`.

Any other resolved object is refused with the advice to use `konfig.imports()`.
"""

from kauldron import konfig
import optax
import pytest


def test_resolved_optimizer():
  with pytest.raises(TypeError, match=r"GradientTransformation\.__new__"):
    try:
      konfig.ConfigDict({"optimizer": optax.sgd(0.1)})
    except ValueError as error:
      if "only accept other configurables" not in str(error):
        raise
    pytest.fail("mended upstream: remove the caveat in test_kauldron.py")
