# SPDX-License-Identifier: Apache-2.0
"""``terarec workflow``: a ready workflow as a file, which is the same workflow when read."""

from pathlib import Path

import pytest

from terarec.etl.ready import PRESETS
from terarec.etl.workflow import Workflow
from tests.cli.conftest import figures, rejected

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def test_a_ready_workflow_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "amazon.json"
    reported = figures("workflow", "amazon", "--out", path, "--min-count", 7, "--layout", "2023")
    spec = PRESETS["amazon"](min_count=7, layout="2023")
    assert Workflow.from_json(path).spec == spec
    assert (reported["name"], reported["steps"], reported["tables"]) == ("amazon", len(spec.steps), ["meta"])
    assert tuple(reported["categorical"]) == spec.categorical
    section = PAGE.split("## terarec workflow")[1].split("\n## ")[0]
    assert {name for name in reported if f"`{name}`" not in section} == set()


@pytest.mark.parametrize(
    ("arguments", "where", "problem"),
    [
        (["netflix"], "NAME", "got 'netflix'"),
        (["avazu", "--layout", "1m"], "--layout", "got '1m' for avazu"),
        (["movielens", "--layout", "2m"], "movielens: layout", "got '2m'"),
    ],
)
def test_what_is_not_there_is_rejected(tmp_path: Path, arguments: list[str], where: str, problem: str) -> None:
    rejected("workflow", *arguments, "--out", tmp_path / "new.json", where=where, problem=problem)
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("mine")
    rejected(
        "workflow", "avazu", "--out", tmp_path / "mine.json", where="--out", problem=f"{tmp_path / 'mine.json'} exists"
    )
    assert (tmp_path / "mine.json").read_text() == "mine"
