"""An annotation of `*args` is checked against the tuple, and so never holds.

It should be checked against each of the arguments.
"""

from kauldron import kd
import numpy as np
import pytest
import typeguard


@pytest.mark.parametrize("name", ["ktyping", "typing"])
def test_variadic_arguments(name):
  checker = getattr(kd, name)

  @checker.typechecked
  def one(arg: checker.Float["n"]):
    return arg

  @checker.typechecked
  def any_number(*args: checker.Float["n"]):
    return args

  assert one(np.ones(3)).shape == (3,)
  with pytest.raises(typeguard.TypeCheckError, match="args.*tuple"):
    any_number(np.ones(3), np.ones(3))
    pytest.fail(
        "mended upstream: remove the caveat in section shapes_elsewhere")
