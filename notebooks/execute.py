"""Run notebooks from top to bottom and keep what they show: `python notebooks/execute.py FILE...`, or `make notebooks`.

The tests run them by the same function. Kernels are reached by files, not by network ports. Figures are kept as numbers
(plotly's mime type), not as a page with 5 MB of script each, and no times are kept, so running again changes nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

SECONDS = 600  # a cell may take
KERNEL_ENVIRONMENT = {
    "PLOTLY_RENDERER": "plotly_mimetype",
    "OMP_NUM_THREADS": "1",  # sums over threads round unlike
    # tqdm would like to draw bars of widgets; there are no bars here
    "PYTHONWARNINGS": "ignore:IProgress not found",
}


def execute(notebook: NotebookNode, folder: Path) -> list[str]:
    """Run a notebook in place, all of it, whatever fails.

    Args:
        folder: the working directory of its cells.
    Returns:
        What went wrong: each cell's exception and each word on standard error. Empty when all is well.
    """
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        allow_errors=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    with tempfile.TemporaryDirectory() as place:
        manager = client.create_kernel_manager()
        manager.transport, manager.connection_file = "ipc", f"{place}/kernel.json"
        client.execute(env=os.environ | KERNEL_ENVIRONMENT)
    notebook.metadata.get("language_info", {}).pop("version", None)
    return troubles(notebook)


def troubles(notebook: NotebookNode) -> list[str]:
    """Exceptions and words on standard error among the outputs; code cells that did not run."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if cell.execution_count is None:
                found.append(f"cell {cell.id} did not run")
            for output in cell.outputs:
                if output.output_type == "error":
                    found.append(f"cell {cell.id}: {output.ename}: {output.evalue}")
                if output.output_type == "stream" and output.name == "stderr":
                    found.append(f"cell {cell.id}, standard error: {output.text}")
    return found


def main(files: list[str]) -> int:
    wrong = []
    for file in map(Path, files):
        notebook = nbformat.read(file, as_version=4)
        here = execute(notebook, file.parent)
        wrong += [f"{file}, {trouble}" for trouble in here]
        if not here:  # what failed is not kept
            nbformat.write(notebook, file)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
