# SPDX-License-Identifier: Apache-2.0
"""``terarec drift`` and what it rejects."""

import json
from pathlib import Path

import pytest

from terarec.errors import DataNotFoundError
from tests.cli.conftest import Workshop, figures, rejected
from tests.cli.test_docs import unnamed
from tests.cli.test_train import prepare

pytestmark = pytest.mark.usefixtures("reports")


@pytest.mark.parametrize("columns", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_page_and_its_figures(columns: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data = request.getfixturevalue("workshop").data if columns == 40 else prepare(tmp_path)
    out = tmp_path / "drift.html"
    reported = figures("drift", data, data, "--out", out, "--current-split", "valid")
    assert (reported["page"], reported["figures"]) == (str(out), str(tmp_path / "drift.json"))
    report = json.loads((tmp_path / "drift.json").read_text())
    assert len(report["columns"]) == columns
    assert reported["reference_rows"] == report["reference"]["splits"]["train"] == report["reference"]["rows"]
    assert reported["current_rows"] == report["current"]["splits"]["valid"]
    assert reported["stability_index"] == max(column["stability_index"] for column in report["columns"])
    assert out.read_text().startswith("<!doctype html>")
    assert unnamed(reported, "drift") == set()


def test_what_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "drift.html")
    typed = ["drift", workshop.data, workshop.data, "--out", tmp_path / "drift.pdf"]
    rejected(*typed, where="--out", problem=f"got {tmp_path / 'drift.pdf'}")
    typed = ["drift", workshop.data, workshop.data, *out, "--reference-split", "late"]
    rejected(*typed, where="data set 'criteo'", problem="no split 'late'")
    rejected("drift", workshop.data, tmp_path / "absent", *out, error=DataNotFoundError, where=tmp_path / "absent")
    rejected("drift", workshop.data, tmp_path / "absent", *out, "--current-split", "train", where="--current-split")
    assert not list(tmp_path.iterdir())
