# SPDX-License-Identifier: Apache-2.0
"""A shell's ``raw/*`` includes ``generated.json``, which the generator writes next to its logs."""

from pathlib import Path

from terarec.errors import DataNotFoundError
from terarec.etl.source.files import find_files
from tests.cli.conftest import figures, rejected


def test_a_glob_of_logs_passes_over_the_side_file(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    figures("generate", "criteo", "--rows", 200, "--out", raw)
    assert {path.name for path in raw.iterdir()} == {"day_0.tsv", "generated.json"}
    reported = figures("prepare", "criteo", *sorted(raw.iterdir()), "--out", tmp_path / "data")
    assert reported["rows"] == 200
    assert reported["best_auc"] is not None
    assert [Path(file.path).name for file in find_files([str(raw / "*")])] == ["day_0.tsv"]
    typed = ["prepare", "criteo", raw / "generated.json", "--out", tmp_path / "none"]
    rejected(*typed, error=DataNotFoundError, where=raw / "generated.json")


def test_a_log_that_is_called_so_is_read(tmp_path: Path) -> None:
    """The name alone does not make it one."""
    for content in ('{"user": 1}\n{"user": 2}\n', '{"user": 1, "best_auc": 0.5}\n', "1\t2\n"):
        log = tmp_path / "generated.json"
        log.write_text(content)
        assert [file.path for file in find_files([log])] == [str(log)]


def test_every_workflow_takes_such_a_glob(tmp_path: Path) -> None:
    """The side file comes as a source of its own, as the shell lists it."""
    for preset, rows in (("avazu", 200), ("rees46", 300)):
        raw = tmp_path / preset
        figures("generate", preset, "--rows", rows, "--out", raw)
        assert (raw / "generated.json").exists()
        figures("workflow", preset, "--out", tmp_path / f"{preset}.json")
        workflow, out = tmp_path / f"{preset}.json", tmp_path / f"{preset}-data"
        assert figures("prepare", workflow, *sorted(raw.iterdir()), "--out", out)["rows"] > 0
