# SPDX-License-Identifier: Apache-2.0
"""docs/your-own-data.md keeps its promises: its Python runs, and the figures and errors that it shows are those."""

import gzip
import re
from contextlib import chdir
from pathlib import Path

import pytest

from terarec.errors import TerarecError
from terarec.etl import prepare
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your-own-data.md").read_text()
HEADER = re.search(r"^\(echo (\S+)$", PAGE, re.MULTILINE)[1]


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    path = tmp_path_factory.mktemp("people") / "people.csv"
    rows = gzip.decompress((ROOT / "examples/data/adult/adult.data.gz").read_bytes()).decode()
    path.write_text(f"{HEADER}\n{rows}")
    return path


def test_the_file_begins_as_shown(people):
    assert "\n".join(people.read_text().splitlines()[:3]) in PAGE


def test_the_python_runs_and_prints_the_output_in_its_comments(people, capsys):
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "csv_workflow" in code)
    expected = re.findall(r"print\(.*\)\s+# (.+)", block)
    with chdir(people.parent):
        exec(compile(block, "your-own-data.md", "exec"), {})
    rows, auc = capsys.readouterr().out.splitlines()
    assert rows == expected[0]
    assert float(auc) == pytest.approx(float(expected[1]), abs=0.002)  # the last digits depend on the processor


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (None, {"dense": ("sex",)}),
        (None, {"positives": ()}),
        (None, {"positives": (">50k",)}),
        (None, {"label": "incom"}),
        (None, {"categorical": ("age",)}),
        ((20, "39, State-gov"), {}),
        ((7, ", ".join("?" for _ in HEADER.split(","))), {}),
    ],
)
def test_errors_read_as_on_the_page(people, tmp_path, change, options):
    lines = people.read_text().splitlines()[:40]
    if change:
        lines[change[0]] = change[1]
    (tmp_path / "people.csv").write_text("\n".join(lines))
    chosen = {"label": "income", "positives": (">50K",), "dense": ("age",)} | options

    def prepare_people():
        prepare(Workflow.of(csv_workflow(CsvOptions(**chosen))), ["people.csv"], "people")

    with chdir(tmp_path), pytest.raises(TerarecError) as raised:
        prepare_people()
    shown = [message.removesuffix("...") for message in re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)]
    assert any(str(raised.value).startswith(message) for message in shown), str(raised.value)
