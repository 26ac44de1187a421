"""`kauldron.ktyping` needs `np.float128`, which not every platform has.

It is missing on Windows and on macOS arm64; elsewhere, removing it shows what
happens there.
"""

import subprocess
import sys

CODE = "import numpy; vars(numpy).pop('float128', 0); import kauldron.ktyping"


def test_float128():
  process = subprocess.run([sys.executable, "-c", CODE],
                           capture_output=True, text=True, check=False)
  assert process.returncode != 0, (
      "mended upstream: remove the patch in the cell Setup")
  last_line = process.stderr.splitlines()[-1]
  assert "no attribute 'float128'" in last_line, process.stderr
