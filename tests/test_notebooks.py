"""The notebooks run to their ends, here with few tokens."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from support.called import as_called

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
FIRST, *OTHERS = NOTEBOOKS
RUN = [FIRST, *(pytest.param(file, marks=pytest.mark.long) for file in OTHERS)]
SMALL = {"TOKENS": "300", "NEW": "4", "CONTEXT": "128", "WINDOWS": "2", "OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.reads(as_called(file.read_text("utf-8")), 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    printed = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "text" in out]
    assert printed


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_what_a_notebook_shows_is_of_one_whole_run(file: Path) -> None:
    cells = [cell for cell in nbformat.read(file, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert not any(out.output_type == "error" for cell in cells for out in cell.outputs)
    assert any(cell.outputs for cell in cells)
