"""Run the notebooks whole and keep what they print: about a minute each on 2 idle cores."""

from pathlib import Path

import nbclient
import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def main() -> None:
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(file, 4)
        nbclient.NotebookClient(notebook, timeout=600).execute()
        keep_what_can_be_shown(notebook)
        nbformat.write(notebook, file)


def keep_what_can_be_shown(notebook: nbformat.NotebookNode) -> None:
    """Without the state of progress bars, which a page cannot draw, and the times of a run."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
            ]


if __name__ == "__main__":
    main()
