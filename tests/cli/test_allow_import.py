# SPDX-License-Identifier: Apache-2.0
"""A run, a data set or a workflow of another author runs nothing of theirs, whatever command reads it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from terarec.errors import ConfigError
from terarec.serve import InferenceSession
from tests.cli.conftest import figures, rejected
from tests.errors import at
from tests.params import in_every_run


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, a data set and a run of the ready workflow of Avazu, which calls a function."""
    root = tmp_path_factory.mktemp("avazu")
    figures("generate", "avazu", "--rows", 300, "--out", root / "raw")
    figures("prepare", "avazu", root / "raw" / "train.csv", "--out", root / "data")
    figures("train", "--model", "wide_deep", "--data", root / "data", "--out", root / "run", "--width", 4)
    return root


def changed(shop: Path, to: Path, **functions: str) -> Path:
    """A copy whose workflows name these functions."""
    for name in ("data", "run"):
        shutil.copytree(shop / name, to / name)
    for path in to.rglob("workflow.json"):
        content = json.loads(path.read_text())
        (step,) = (step for step in content["workflow"]["steps"] if step["kind"] == "lambda_op")
        step.update(functions)
        path.write_text(json.dumps(content))
    return to


def readers(place: Path, log: Path) -> dict[str, list[Any]]:
    out = place / "out"
    return {
        "prepare a file": ["prepare", place / "data" / "workflow" / "workflow.json", log, "--out", out],
        "prepare a directory": ["prepare", place / "data" / "workflow", log, "--out", out],
        "prepare a data set": ["prepare", place / "data", log, "--out", out],
        "prepare a run": ["prepare", place / "run", log, "--out", out],
        "predict": ["predict", place / "run", log, "--out", place / "scores.csv"],
        "serve": ["serve", place / "run", "--port", 0],
        "drift": ["drift", place / "data", place / "data", "--out", place / "page.html"],
        "drift raw": ["drift", place / "data", log, "--out", place / "page.html"],
        "inspect": ["inspect", place / "data"],
        "inspect a column": ["inspect", place / "data", "--column", "C1"],
        "inspect a table": ["inspect", place / "run", "--table", "C1"],
    }


NAMES = list(readers(Path(), Path()))


FORMS = [(name, field) for field in ("function", "record_function") for name in NAMES]


@pytest.mark.parametrize(("name", "field"), in_every_run([*FORMS[: len(NAMES)], ("serve", "record_function")], FORMS))
def test_a_shell_command_in_a_workflow_is_not_run(shop: Path, tmp_path: Path, name: str, field: str) -> None:
    """Nothing is written either."""
    place = changed(shop, tmp_path, **{field: "subprocess:getoutput"})
    log = tmp_path / "log.csv"
    lines = (shop / "raw" / "train.csv").read_text().splitlines()[:20]
    log.write_text("\n".join(lines) + "\n")
    before = sorted(tmp_path.rglob("*"))
    reported = rejected(*readers(place, log)[name], problem="--allow-import subprocess")
    assert reported["where"].endswith(f"workflow.json: steps[0] LambdaOp: {field} 'subprocess:getoutput'")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_served_record_does_not_reach_the_function(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding's own way: `InferenceSession.open(run).predict(...)`."""
    place = changed(shop, tmp_path / "changed", record_function="os:system")
    ran: list[object] = []
    monkeypatch.setattr("os.system", ran.append)
    with pytest.raises(
        ConfigError,
        check=at(f"{place}/run/dataset/workflow/workflow.json: steps[0] LambdaOp: record_function 'os:system'"),
    ):
        InferenceSession.open(place / "run")
    assert ran == []


@pytest.mark.slow
@pytest.mark.usefixtures("reports")
def test_the_package_that_is_allowed(shop: Path, tmp_path: Path) -> None:
    functions = {
        "function": "tests.cli.hours:hour_and_weekday",
        "record_function": "tests.cli.hours:hour_and_weekday_of_record",
    }
    place = changed(shop, tmp_path, **functions)
    log = shop / "raw" / "train.csv"
    reported = figures("predict", place / "run", log, "--out", tmp_path / "a.csv", "--allow-import", "tests.cli")
    assert reported["rows"] == 300
    figures("predict", shop / "run", log, "--out", tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    typed = ["predict", place / "run", log, "--out", tmp_path / "c.csv", "--allow-import", "test"]
    rejected(*typed, problem="--allow-import tests")
    for name in NAMES:
        if name not in ("serve", "drift"):
            figures(*readers(place, log)[name], "--allow-import", "tests")
            for left in (place / "out", place / "page.html", place / "page.json", place / "scores.csv"):
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    session = InferenceSession.open(place / "run", allow_import=("tests",))
    assert [column.name for column in session.inputs][:1] == ["hour"]
