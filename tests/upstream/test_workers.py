"""PyGrain's workers need absl's flags, and form batches of their own examples.

With two workers the examples of a batch are every second one. Both belong to
Kauldron: it batches before it hands over to the workers.
"""

import subprocess
import sys

CODE = """
import sys

from absl import flags
from kauldron import kd

if __name__ == "__main__":
  if "parsed" in sys.argv:
    flags.FLAGS.mark_as_parsed()
  ds = kd.data.py.DataSource(
      data_source=[{"x": i} for i in range(8)], shuffle=False, batch_size=4,
      num_epochs=1, num_workers=2, seed=0)
  print(next(iter(ds))["x"].tolist(), flush=True)
"""


def first_batch(tmp_path, *arguments):
  path = tmp_path / "workers.py"
  path.write_text(CODE)
  return subprocess.run([sys.executable, path, *arguments], check=False,
                        capture_output=True, text=True)


def test_workers_need_flags(tmp_path):
  process = first_batch(tmp_path)
  assert not process.stdout, (
      "mended upstream: remove the caveat in section data_pipeline")
  assert "UnparsedFlagAccessError" in process.stderr, process.stderr


def test_batches_of_workers(tmp_path):
  process = first_batch(tmp_path, "parsed")
  assert process.stdout != "[0, 1, 2, 3]\n", (
      "mended upstream: remove the caveat in section data_pipeline")
  assert process.stdout == "[0, 2, 4, 6]\n", process.stderr
