# SPDX-License-Identifier: Apache-2.0
"""The walk-throughs of examples/ and its folders run to their last cell, which asserts what they reach."""

import importlib.util
import re
import shutil

import nbformat
import pytest

pytest.importorskip("nbclient", reason="the extra 'dev' is not installed")

from tests.examples.notebooks import DIRECTORY, NOTEBOOKS, executed, plots
from tests.processes import run_python
from tests.programs import lacks

each = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])


def test_the_code_of_one_runs(tmp_path):
    """Without a Jupyter kernel, which takes some seconds to start."""
    cells = nbformat.read(DIRECTORY / "shop_dlrm.ipynb", as_version=4).cells
    folder = shutil.copytree(DIRECTORY, tmp_path / "hugectr", ignore=shutil.ignore_patterns("output"))
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    ended = run_python(code, cwd=folder, environment={"MPLBACKEND": "agg"})
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@each
def test_it_runs_and_shows_a_plot(path, tmp_path):
    if path.parent.name == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip(lacks("tensorflow", "pip install 'terarec[tensorflow]'"))
    notebook = executed(path, tmp_path)
    assert all(len(image) > 10_000 for image in plots(notebook))
    assert plots(notebook)
    assert "assert" in notebook.cells[-1].source


@each
def test_saved_outputs_are_of_one_complete_run_and_name_no_machine(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = " ".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert not re.findall(r"(?<![\w.])/\w+/\S*", shown)
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
