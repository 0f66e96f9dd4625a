# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks of examples/ and its folders in a kernel, as their readers do.

``python -m tests.examples.notebooks [NAME ...]`` runs them and keeps their outputs in them, their plots beside them.
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DIRECTORY = Path(__file__).parents[2] / "examples" / "hugectr"
NOTEBOOKS = [*sorted(DIRECTORY.parent.glob("*.ipynb")), *sorted(DIRECTORY.parent.glob("*/*.ipynb"))]


def executed(path: Path, directory: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in a new folder of `directory`; raises if a cell does."""
    others = shutil.ignore_patterns("output", "hugectr", "tensorflow", "data")
    folder = shutil.copytree(path.parent, directory / "examples", ignore=others)
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=300, resources=where, record_timing=False, coalesce_streams=True, kernel_name="python3"
    )
    # The kernel's history goes into the directory, too: nothing is left in the home of who runs it.
    client.execute(env={**os.environ, "IPYTHONDIR": str(directory / "ipython")})
    return notebook


def plots(notebook: nbformat.NotebookNode) -> list[bytes]:
    """The plots that its cells show, as PNG."""
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def store(path: Path) -> None:
    """Run a notebook; keep its outputs in it and its last plot beside it, both for who reads without running."""
    with tempfile.TemporaryDirectory() as directory:
        notebook = executed(path, Path(directory))
    # The release of Python that ran it is of no interest and would change with every run.
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    path.with_suffix(".png").write_bytes(plots(notebook)[-1])


if __name__ == "__main__":
    for notebook_path in [path for path in NOTEBOOKS if not sys.argv[1:] or path.stem in sys.argv[1:]]:
        store(notebook_path)
