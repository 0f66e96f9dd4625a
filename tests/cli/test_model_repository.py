# SPDX-License-Identifier: Apache-2.0
"""``terarec promote``, ``rollback`` and ``models``."""

import contextlib
import re
import shutil
import signal
from pathlib import Path

import pytest

from terarec.errors import FormatError
from tests.cli.conftest import Workshop, figures, rejected, terarec
from tests.cli.test_docs import unnamed
from tests.processes import Python

SHOP = ("--model", "shop")


@pytest.fixture(scope="module")
def two_versions(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository") / "models"
    for _ in range(2):
        figures("promote", workshop.run, "--repository", path, *SHOP)
    return path


@pytest.fixture
def models(two_versions: Path, tmp_path: Path) -> Path:
    """A repository with two versions."""
    return Path(shutil.copytree(two_versions, tmp_path / "models"))


def test_versions_are_promoted_and_taken_back(workshop: Workshop, models: Path) -> None:
    split = figures(
        "promote", workshop.run, "--repository", models, *SHOP, "--share", 0.25, "--by", "C1", "--checkpoint", "last"
    )
    assert (split["version"], split["answers"], split["split_version"], split["split_share"]) == (3, 2, 3, 0.25)
    over = figures("promote", "--version", 3, "--repository", models, *SHOP)
    assert (over["answers"], over["split_version"]) == (3, None)
    back = figures("rollback", "--repository", models, *SHOP)
    assert back["answers"] == 2
    assert figures("rollback", "--repository", models, *SHOP, "--to", 1)["answers"] == 1
    shown = figures("models", "--repository", models)
    (shop,) = shown["models"]
    assert [version["version"] for version in shop["versions"]] == [1, 2, 3]
    assert [event["action"] for event in shop["history"]] == [
        *("promote", "promote", "split", "promote", "rollback", "rollback")
    ]
    version = shop["versions"][0]
    assert version["role"].startswith("answers since")
    assert version["metrics"]["auc"] == pytest.approx(workshop.trained["auc"])
    for reported, command in ((split, "promote"), (back, "rollback"), ({**shown, **shop, **version}, "models")):
        others = {"split_version", "split_share", "split_by", "shadow_version", "since", "version"}
        assert unnamed(reported, command) - (others if command != "promote" else set()) == set()


def test_the_list_is_readable(models: Path, tmp_path: Path) -> None:
    ended = terarec("models", "--repository", models)
    assert ended.code == 0
    for word in ("shop", "answers since", "auc", "criteo"):
        assert word in ended.out
    (tmp_path / "none").mkdir()
    assert "holds no versions" in terarec("models", "--repository", tmp_path / "none").out


def test_what_cannot_be_done_is_one_line(workshop: Workshop, models: Path, tmp_path: Path) -> None:
    at = ("--repository", models, *SHOP)
    rejected("promote", *at, where="RUN", problem="missing")
    rejected("promote", workshop.run, "--version", 1, *at, where="--version")
    rejected("promote", "--version", 1, "--keep", 1, *at, where="--keep")
    rejected("promote", "--version", 9, *at, where="--version", problem="has no version 9")
    rejected("promote", "--version", 1, "--share", 0.1, *at, where="--by")
    rejected("promote", "--version", 1, "--shadow", 2, *at, where="--shadow", problem="got 2.0")
    rejected("promote", workshop.run, "--repository", models, "--model", "a/b", where="--model", problem="'a/b'")
    rejected("rollback", "--repository", models, "--model", "other", where="--model", problem="'other'")
    rejected("rollback", *at, "--to", 7, problem="has no version 7, expected one of 1, 2")
    figures("rollback", *at)
    rejected("rollback", *at, problem="no earlier version")


def test_a_damaged_file_hides_nothing_but_its_own_content(models: Path) -> None:
    sound = figures("models", "--repository", models)["models"][0]
    damaged = [models / file for file in ("hats/1/version.json", "lamps/pointer.json", "lamps/model.json")]
    for name in ("hats", "lamps"):
        shutil.copytree(models / "shop", models / name)
    for file in damaged:
        file.write_text("[]")
    (models / "hats" / "2" / "run.json").unlink()
    (models / "hats" / "2" / "run.json").symlink_to("run.json")  # in a circle: nobody can read it
    ended = terarec("models", "--repository", models, "--json")
    assert ended.code == 1
    lines = [line for line in ended.err.splitlines() if line.startswith("terarec: error: ")]
    hats, lamps, shop = ended.figures["models"]
    assert shop == sound
    assert lines == [f"terarec: error: {problem}" for model in (hats, lamps) for problem in model["problems"]]
    assert all(str(file) in line for file, line in zip(damaged, lines, strict=True)), lines
    assert hats["answers"] == 2
    assert [(version["version"], version["kind"] is None) for version in hats["versions"]] == [(1, True), (2, False)]
    assert (lamps["answers"], [version["step"] for version in lamps["versions"]]) == (
        None,
        [version["step"] for version in shop["versions"]],
    )
    assert figures("models", "--repository", models, *SHOP)["models"] == [sound]
    assert figures("rollback", "--repository", models, "--model", "hats")["answers"] == 1
    rejected("rollback", "--repository", models, "--model", "lamps", error=FormatError, where=f"{damaged[1]}: $.format")


def test_a_server_takes_a_run_or_a_repository(workshop: Workshop, models: Path, tmp_path: Path) -> None:
    rejected("serve", where="RUN", problem="missing, expected a RUN, or --model-repository")
    rejected("serve", workshop.run, "--model-repository", models, where="--model-repository")
    rejected("serve", workshop.run, "--keep-versions", 2, where="--keep-versions", problem="without --model-repository")
    rejected("serve", "--model-repository", models, "--name", "shop", where="--name")
    rejected("serve", "--model-repository", models, "--checkpoint", 3, where="--checkpoint")
    followed = tmp_path / "tables.json"
    followed.write_text('{"follow_seconds": 2.0}')
    rejected("serve", "--model-repository", models, "--tables", followed, where="--tables", problem="--follow-runs")
    rejected("serve", workshop.run, "--tables", followed, "--checkpoint", "best", where="--checkpoint")
    rejected("serve", "--model-repository", models, "--model-control", "pol", where="--model-control")
    rejected("serve", "--model-repository", models, "--load-model", "shop", where="--load-model", problem="'explicit'")
    at = ("--model-repository", models, "--port", 0)
    rejected("serve", *at, "--model-control", "explicit", "--load-model", "books", problem="holds no 'books'")
    ended = terarec("serve", "--model-repository", tmp_path / "none")
    assert (ended.code, "expected a model repository" in ended.err) == (1, True)


def test_a_server_says_which_version_answers(models: Path) -> None:
    program = "from terarec.cli import main; main()"
    with contextlib.closing(Python(program, "serve", "--model-repository", models, "--port", 0)) as server:
        assert server.read_line().startswith("Serving ")
        server.send_signal(signal.SIGTERM)
        ended = server.wait()
    assert ended.returncode == 0
    assert re.search(r"^\d{4}-\d\d-\d\d \S+ model 'shop': version 2 answers$", ended.stderr, re.MULTILINE)
