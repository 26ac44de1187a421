"""One process of several: trains what test_processes.py asks for.

  python process.py NUMBER COUNT PORT FOLDER JOB...

The jobs run one after the other, in FOLDER. What a process finds goes into
FOLDER/JOB.NUMBER.json, and the parameters go into FOLDER/JOB.NUMBER.npz.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
from jax.experimental import multihost_utils
import kauldron_tour as tour
import numpy as np

SAVED = 10  # The step of the only checkpoint but that of step 0.
STOP = 15   # Where a run is stopped.
END = 25    # Where a run ends that is resumed.
HEARTBEAT_SECONDS = 10  # JAX's default is 100.


def experiment(workdir):
  """Returns the config of the tour, with an evaluator and checkpoints."""
  cfg = tour.get_config()
  cfg.workdir = str(workdir)
  cfg.stop_after_steps = STOP
  cfg.log_metrics_every = 5
  cfg.checkpointer.save_interval_steps = SAVED
  cfg.eval_ds = tour.lazy_kd.data.InMemoryPipeline(
      loader=tour.lazy_tour.held_out_images,
      batch_size=tour.BATCH_SIZE,
      num_epochs=1)
  cfg.evals = {"held_out": tour.lazy_kd.evals.Evaluator(
      run=tour.lazy_kd.evals.EveryNSteps(5))}
  return cfg


def plain(folder):
  """Trains with the model copied to every device."""
  return train(experiment(folder / "plain"))


def divided(folder):
  """Trains with the model divided among the devices."""
  cfg = experiment(folder / "divided")
  divide = tour.lazy_kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  cfg.sharding = tour.lazy_kd.sharding.ShardingStrategy(
      params=divide, opt_state=divide)
  return train(cfg)


def resumed(folder):
  """Goes on with a run that stands in `stopped`."""
  cfg = experiment(folder / "stopped")
  cfg.stop_after_steps = END
  return train(cfg)


def pygrain(folder, name="pygrain"):
  """Trains with PyGrain, which divides the examples among the processes."""
  cfg = experiment(folder / name)
  cfg.train_ds = tour.lazy_kd.data.py.DataSource(
      data_source=tour.lazy_tour.train_examples(),
      batch_size=tour.BATCH_SIZE,
      shuffle=True,
      num_workers=0)
  return train(cfg)


def pygrain_resumed(folder):
  """Goes on with a PyGrain run that stands in `pygrain_stopped`."""
  return pygrain(folder, "pygrain_stopped")


def endless(folder, stop=None):
  """Trains for hours, or to a step, in `endless`."""
  cfg = experiment(folder / "endless")
  cfg.num_train_steps = 10**6
  cfg.stop_after_steps = stop
  return train(cfg)


def train(cfg):
  """Trains; returns what this process finds, and all of the parameters."""
  trainer = tour.konfig.resolve(cfg)
  resumes_at = trainer.checkpointer.latest_step
  batch = next(iter(trainer.train_ds))
  state, _ = trainer.train()
  kernel = state.params["encoder"]["kernel"]
  found = {
      "processes": jax.process_count(),
      "devices": jax.device_count(),
      "first batch": fingerprints(batch["image"]),
      "resumes at": resumes_at,
      "step": int(state.step),
      "shards": [shard.data.shape for shard in kernel.addressable_shards]}
  params = multihost_utils.process_allgather(state.params, tiled=True)
  return found, tour.kontext.flatten_with_path(params)


def fingerprints(images):
  """Returns one number for each image, by which it is known again."""
  return np.sum(images, axis=(1, 2, 3), dtype=np.float64).tolist()


JOBS = {job.__name__: job for job in (
    plain, divided, resumed, pygrain, pygrain_resumed, endless)}


def main(number, count, port, folder, *names):
  """Joins the other processes, and runs the jobs."""
  jax.distributed.initialize(
      f"127.0.0.1:{port}",
      num_processes=int(count),
      process_id=int(number),
      coordinator_bind_address=f"127.0.0.1:{port}",  # Nobody else may join.
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
  for name in names:
    params = {}
    try:
      found, params = JOBS[name](pathlib.Path(folder))
    except ValueError as error:  # As `pygrain_resumed` must end.
      found = {"error": str(error)}
    path = pathlib.Path(folder, f"{name}.{number}")
    np.savez(f"{path}.npz", **params)
    pathlib.Path(f"{path}.json.part").write_text(json.dumps(found))
    pathlib.Path(f"{path}.json.part").rename(f"{path}.json")


if __name__ == "__main__":
  main(*sys.argv[1:])
