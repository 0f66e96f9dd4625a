# SPDX-License-Identifier: Apache-2.0
"""``examples/prepare_on_spark.py`` prepares the same data set on both engines, and says where two differ."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "prepare_on_spark.py"


@pytest.mark.slow  # test_engine.py compares both engines in every run
@pytest.mark.usefixtures("spark")
def test_the_data_sets_of_both_engines_are_the_same_files(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    example = runpy.run_path(str(EXAMPLE))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--out", str(tmp_path), "--rows", "900"])
    assert example["main"]() == 0
    *rates, last = capsys.readouterr().out.splitlines()
    assert [rate.split(":")[0] for rate in rates] == ["local", "spark"]
    assert last == "files that differ: none"
    names = {path.relative_to(tmp_path / "spark").as_posix() for path in example["files_below"](tmp_path / "spark")}
    assert {"dataset.json", "train/part-00000.parquet", "workflow/workflow.json"} <= names


def test_files_that_differ_and_that_one_lacks_are_named(tmp_path: Path) -> None:
    for engine, shard in (("local", "one"), ("spark", "two")):
        (tmp_path / engine / "train").mkdir(parents=True)
        for name, text in (
            ("report.json", engine),
            ("train/_file_list.txt", engine),
            ("same", "same"),
            ("part", shard),
        ):
            (tmp_path / engine / name).write_text(text)
    (tmp_path / "spark" / "dataset.json").write_text("{}")
    differences = runpy.run_path(str(EXAMPLE))["differences"]
    assert differences(tmp_path / "local", tmp_path / "spark") == ["dataset.json", "part"]


def test_an_output_that_is_not_empty_is_one_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "mine").write_text("kept")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--out", str(tmp_path), "--rows", "900"])
    assert runpy.run_path(str(EXAMPLE))["main"]() == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert (tmp_path / "local" / "mine").read_text() == "kept"
