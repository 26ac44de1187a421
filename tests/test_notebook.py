"""The tour in a notebook: opened as cells, pasted into one, and by `%run`."""

import pathlib
import re

import kauldron_tour
import nbformat
import notebook as make_notebook
import pytest

SCRIPT = pathlib.Path(kauldron_tour.__file__)
LIGHT = "config_tree", "paths"

# Makes Kauldron seem to be missing until pip, which is not run, was called.
NO_KAULDRON = """
import importlib.util, subprocess
find_spec = importlib.util.find_spec
real_run = subprocess.run

def find(name, *args):
  return None if name == "kauldron" else find_spec(name, *args)

def run(command, check):
  assert check
  importlib.util.find_spec = find_spec
  subprocess.run = real_run
  print("ran", *command[1:5])

importlib.util.find_spec = find
subprocess.run = run
"""


def few_sections(names):
  """Returns the tour's source without the cells of all other sections."""
  cells = re.split(r"^(?=# %%)", SCRIPT.read_text(), flags=re.MULTILINE)
  plumbing, command_line = cells[2], cells[-2:]
  assert "How a section runs" in plumbing
  kept = []
  for cell in cells:
    defined = re.findall(r'^@section\(.*\)\ndef (\w+)', cell, re.MULTILINE)
    if set(defined) <= set(names):
      kept.append(cell)
    if defined == [names[-1]]:
      break
  return "".join(kept + command_line)


def run_cells(folder, *sources):
  """Returns the outputs of each cell of a notebook that is run in a folder."""
  cells = [nbformat.v4.new_code_cell(source) for source in sources]
  notebook = nbformat.v4.new_notebook(cells=cells)
  make_notebook.execute(notebook, str(folder))
  return notebook


def text_of(cell):
  """Returns what a cell printed."""
  return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_opens_on_prose_and_folds_machinery():
  cells = make_notebook.read_tour(SCRIPT).cells
  assert cells[0].cell_type == "markdown"
  assert cells[0].source.startswith("# A tour of Kauldron")
  hidden = [cell.source.partition("\n")[0] for cell in cells
            if cell.metadata.get("jupyter", {}).get("source_hidden")]
  assert len(hidden) == 4  # How a section runs, two of imports, options.
  sections = [cell for cell in cells if "@section(" in cell.source
              and cell.cell_type == "code"]
  assert len(sections) >= len(kauldron_tour.SECTIONS)
  prose = [cell for cell in cells if cell.cell_type == "markdown"]
  assert len(prose) >= len(kauldron_tour.SECTIONS)


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_make_notebook_ends_with_1_if_a_section_failed(
    tmp_path, monkeypatch, capsys, broken):
  source = few_sections(LIGHT)
  if broken:
    assert source.count("cfg[1].learning_rate = 0.4") == 1
    source = source.replace("cfg[1].learning_rate = 0.4", "pass")
  path = tmp_path / "tour.py"
  path.write_text(source)
  monkeypatch.setenv("HOME", "/nonexistent")
  assert make_notebook.main(path) == int(broken)
  stderr = capsys.readouterr().err
  assert ("these sections failed: config_tree" in stderr) == broken
  written = nbformat.read(tmp_path / "tour.ipynb", 4)
  assert any("PASS paths" in text_of(cell) for cell in written.cells
             if cell.cell_type == "code")


def test_pasted_into_one_cell(tmp_path):
  """It installs Kauldron, runs, shows pictures; sections can be called."""
  notebook = run_cells(
      tmp_path, NO_KAULDRON, SCRIPT.read_text(), "paths()",
      "RESULTS['paths']['status']",
      f"%run {SCRIPT} --only {' '.join(LIGHT)}")
  _, pasted, called, result, ran = notebook.cells
  assert make_notebook.problems(notebook) == []
  printed = text_of(pasted)
  assert "ran -m pip install --quiet" in printed
  count = len(kauldron_tour.SECTIONS)
  assert f"{count} PASS, 0 SKIP, 0 FAIL of {count} sections" in printed
  assert sum("image/png" in output.get("data", {})
             for output in pasted.outputs) == 4
  assert not [output for output in pasted.outputs
              if output.get("name") == "stderr"]
  assert "heads[1].logits" in text_of(called)
  assert result.outputs[0]["data"]["text/plain"] == "'PASS'"
  assert "2 PASS, 0 SKIP, 0 FAIL of 2 sections" in text_of(ran)
