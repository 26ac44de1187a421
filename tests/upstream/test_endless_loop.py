"""An `InMemoryPipeline` with less data than one batch loops for ever.

Every epoch is empty, so that the first `next()` never returns.
"""

import types

from kauldron import kd
from kauldron.data import in_memory
import numpy as np


def a_thousand_epochs():
  yield from range(1000)
  raise TimeoutError("not a batch in a thousand epochs")


def test_endless_loop(monkeypatch):
  bounded = types.SimpleNamespace(count=a_thousand_epochs)
  monkeypatch.setattr(in_memory, "itertools", bounded)
  ds = kd.data.InMemoryPipeline(loader=lambda: np.ones((4, 2)), batch_size=8)
  try:
    batch = next(iter(ds), None)
  except (TimeoutError, ValueError) as error:
    batch = error
  assert isinstance(batch, TimeoutError), (
      "mended upstream: remove the caveat in section data_pipeline")
