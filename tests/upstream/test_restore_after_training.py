"""The trainer that has trained cannot restore its own checkpoint.

Its checkpointer still expects what `train()` saves: a state, a timer and an
iterator. A fresh trainer of the same config restores the state.
"""

from kauldron import konfig
import pytest

with konfig.imports():
  from kauldron import kd


def test_restore_after_training(cfg):
  cfg.checkpointer = kd.ckpts.Checkpointer(save_interval_steps=2)
  trainer, fresh = konfig.resolve(cfg), konfig.resolve(cfg)
  trainer.train()
  with pytest.raises(ValueError, match="Must provide `args` of type `Compos"):
    trainer.checkpointer.restore(trainer.init_state())
    pytest.fail("mended upstream: remove the caveat in section resumed_run")
  assert fresh.checkpointer.restore(fresh.init_state()).step == 2
