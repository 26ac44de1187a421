"""The tour in a real IPython kernel."""

import json
import pathlib

import kauldron_tour
import nbclient
import nbformat

SOURCE = pathlib.Path(kauldron_tour.__file__).read_text()


def _run(*cells, cwd):
  """Executes the cells in a new kernel; returns the text of each and errors."""
  notebook = nbformat.v4.new_notebook(
      cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
  client = nbclient.NotebookClient(
      notebook, timeout=600, allow_errors=True,
      resources={"metadata": {"path": str(cwd)}})
  client.execute()
  texts, errors = [], []
  for cell in notebook.cells:
    outputs = cell.outputs
    texts.append("".join(out.get("text", "") for out in outputs))
    errors += [out for out in outputs
               if out.output_type == "error" or out.get("name") == "stderr"]
  return texts, errors


def test_pasted_whole_and_pasted_again(tmp_path, whole_tour):
  facts = "print(json.dumps({k: v['facts'] for k, v in RESULTS.items()}))"
  called = "print(list(RESULTS) == SECTIONS, key_paths())"
  texts, errors = _run(SOURCE, facts, called, SOURCE, called, cwd=tmp_path)
  count = len(kauldron_tour.SECTIONS)
  assert errors == []
  assert list(tmp_path.iterdir()) == []
  for pasted, called in ((texts[0], texts[2]), (texts[3], texts[4])):
    assert f"{count - 1} PASS, 1 SKIP, 0 FAIL of {count} sections" in pasted
    assert "SKIP config_file: the tour was pasted" in pasted
    assert "True {'paths'" in called
  for name, pasted in json.loads(texts[1]).items():
    if name != "config_file":
      as_script = whole_tour[1]["sections"][name]["facts"]
      assert kauldron_tour.differences(as_script, pasted)[0] == {}
