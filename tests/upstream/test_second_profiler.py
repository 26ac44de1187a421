"""The profiler of a second Trainer in one process logs an error.

It starts while the first one, which stops by the clock, is still running.
"""

import contextlib

import jax
from kauldron import kd


def test_second_profiler(tmp_path, caplog):
  try:
    for name in ("first", "second"):
      profiler = kd.inspect.Profiler(workdir=tmp_path / name)
      for step in range(12):
        profiler(step)
  finally:
    with contextlib.suppress(RuntimeError):  # Nothing is being traced.
      jax.profiler.stop_trace()
  errors = [record for record in caplog.records if record.levelname == "ERROR"]
  assert errors, "mended upstream: remove the caveat in section real_trainer"
  assert "Could not start profiling" in errors[0].getMessage()
