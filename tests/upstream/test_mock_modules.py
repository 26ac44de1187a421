"""A module that a function imports stays mocked after `mock_modules()`.

From Python 3.11 on, `PyFrame_LocalsToFast` writes only once after `f_locals`
is read: the originals are not written back. PEP 667 (3.13) has no such step.
"""

import inspect
import types

from kauldron import konfig
import pytest


def imported_in_a_function():
  import math
  with konfig.mock_modules():
    within = math
  return within, math


def test_mock_modules():
  if not isinstance(inspect.currentframe().f_locals, dict):
    pytest.skip("f_locals is a write-through proxy (PEP 667)")
  within, after = imported_in_a_function()
  assert not isinstance(within, types.ModuleType)
  assert not isinstance(after, types.ModuleType), (
      "mended upstream: remove the caveat in section mock_modules")
