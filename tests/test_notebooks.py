"""The notebooks run to their ends, here with few tokens."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SMALL = {"TOKENS": "300", "NEW": "4", "CONTEXT": "128", "WINDOWS": "2", "OMP_NUM_THREADS": "1"}


@pytest.mark.smollm2
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(file, 4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "text" in out]
    assert printed
