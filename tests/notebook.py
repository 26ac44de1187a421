"""Makes kauldron_tour.ipynb, with its outputs: `make notebook`.

Prose becomes rendered cells, and the cells that are machinery are folded. The
notebook is executed by a kernel of this interpreter. Exit status 1 if a
section failed; the notebook is written all the same.
"""

import os
import pathlib
import sys
import tempfile

from ipykernel import kernelspec
from jupyter_client import kernelspec as kernelspecs
from jupyter_client import manager
import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
ASKS = "print(*(name for name in RESULTS if RESULTS[name]['status'] == 'FAIL'))"


def read_tour(path):
  """Returns the tour as a notebook; its first cell is the first prose."""
  notebook = jupytext.read(path)
  kinds = [cell.cell_type for cell in notebook.cells]
  del notebook.cells[:kinds.index("markdown")]  # The header for `uv run`.
  notebook.metadata["kernelspec"] = {
      "name": "python3", "display_name": "Python 3", "language": "python"}
  return notebook


def execute(notebook, folder):
  """Executes a notebook in place, in a kernel that writes below a folder."""
  for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR",
               "IPYTHONDIR", "MPLCONFIGDIR"):
    os.environ[name] = f"{folder}/{name.lower()}"  # HOME may be read-only.
  # A kernel of this very interpreter, whatever else is installed.
  kernelspec.write_kernel_spec(f"{folder}/kernels/python3")
  kernel = manager.AsyncKernelManager(
      kernel_name="python3",
      kernel_spec_manager=kernelspecs.KernelSpecManager(
          kernel_dirs=[f"{folder}/kernels"]))
  nbclient.NotebookClient(
      notebook, km=kernel, timeout=600, allow_errors=True,
      resources={"metadata": {"path": folder}}).execute()


def problems(notebook):
  """Returns a sentence for each cell of an executed notebook that failed."""
  return [f"a cell failed: {output.ename}: {output.evalue}"
          for cell in notebook.cells if cell.cell_type == "code"
          for output in cell.outputs if output.output_type == "error"]


def main(source=ROOT / "kauldron_tour.py"):
  """Writes the notebook beside its source; returns the exit status."""
  notebook = read_tour(source)
  notebook.cells.append(nbformat.v4.new_code_cell(ASKS))
  with tempfile.TemporaryDirectory(prefix="notebook_") as folder:
    execute(notebook, folder)
  found = problems(notebook)
  failed = "".join(output.get("text", "") for output in
                   notebook.cells.pop().outputs).split()
  if failed:
    found.append(f"these sections failed: {' '.join(failed)}")
  path = source.with_suffix(".ipynb")
  nbformat.write(notebook, path)
  print(f"notebook: {path.name} is written.")
  for problem in found:
    print(f"notebook: {problem}", file=sys.stderr)
  return int(bool(found))


if __name__ == "__main__":
  sys.exit(main())
