"""A run ends if the evaluator of `best_metric_path` skips a checkpoint.

An evaluator that runs less often than the Checkpointer saves is not refused at
the start; what fails is to choose among more checkpoints than are to be kept.
"""

from kauldron import konfig
import pytest

with konfig.imports():
  from kauldron import kd


def test_best_metric(cfg):
  metric = kd.metrics.Norm(tensor="preds")
  ds = kd.data.InMemoryPipeline(
      loader=cfg.train_ds.loader, batch_size=2, num_epochs=1)
  cfg.evals = {"test": kd.evals.Evaluator(
      run=kd.evals.EveryNSteps(2), ds=ds, metrics={"norm": metric})}
  cfg.checkpointer = kd.ckpts.Checkpointer(
      save_interval_steps=1, max_to_keep=1, best_metric_path="test.norm")
  with pytest.raises(KeyError, match="'test.norm'"):
    konfig.resolve(cfg).train()
    pytest.fail("mended upstream: remove the caveat in section best_checkpoint")
