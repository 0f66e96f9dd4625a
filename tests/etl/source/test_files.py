# SPDX-License-Identifier: Apache-2.0
"""The files that paths name, and their order."""

from __future__ import annotations

import random
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl.source.files import find_files, name_order, numbered_order
from tests.errors import at

DAYS = [f"day_{number}.tsv" for number in range(12)]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Twelve files of a row."""
    (tmp_path / "raw").mkdir()
    for name in random.Random(0).sample(DAYS, 12):
        (tmp_path / "raw" / name).write_text("1\n")
    return tmp_path / "raw"


@pytest.mark.parametrize("pattern", ["", "day_*", "*.tsv"])
def test_directories_and_patterns_are_in_the_order_of_numbers(raw: Path, pattern: str) -> None:
    """Finding N1: twelve days end with day 11, and not with day 9."""
    assert [Path(file.path).name for file in find_files([raw / pattern])] == DAYS


@pytest.mark.parametrize("pattern", ["", "/day_*"])
def test_urls_are_in_the_order_of_numbers(pattern: str) -> None:
    """Finding N1."""
    files = fsspec.filesystem("memory")
    for name in DAYS:
        files.pipe(f"/numbered/{name}", b"1\n")
    found = find_files([f"memory://numbered{pattern}"])
    assert [file.path.rpartition("/")[2] for file in found] == DAYS


def test_directories_are_numbered_too(raw: Path) -> None:
    """Finding N1."""
    for number in (1, 10, 9):
        (raw / f"hour={number}").mkdir()
        (raw / f"hour={number}" / "part-2.tsv").write_text("1\n")
    hours = [file.path for file in find_files([raw / "hour=*"])]
    assert [Path(path).parent.name for path in hours] == ["hour=1", "hour=9", "hour=10"]


def test_what_a_shell_lists_is_put_in_the_order_of_numbers() -> None:
    """Finding N1: `raw/day_*.tsv` reaches the program as texts in their order, of any locale."""
    days = [f"raw/{name}" for name in DAYS]
    assert numbered_order(sorted(days)) == days
    assert numbered_order(sorted(days, key=lambda path: path.replace(".", "").replace("_", ""))) == days
    folders = [f"raw/{number}/part.tsv" for number in (1, 2, 10)]
    assert numbered_order([*sorted(days), *sorted(folders)]) == [*days, *folders]


@pytest.mark.parametrize(
    "paths", [["b.csv", "a.csv"], ["new/9.csv", "old/10.csv"], ["day_10", "day_9", "day_11"], ["a b", "[c]"]]
)
def test_another_order_is_kept(paths: list[str]) -> None:
    assert numbered_order(paths) == paths


@given(st.lists(st.integers(0, 10**20), unique=True), st.sampled_from(["day_{}.tsv", "{}", "a/{}/b", "v1.{}"]))
def test_numbers_of_any_length(numbers: list[int], name: str) -> None:
    """Finding N1."""
    names = [name.format(number) for number in numbers]
    assert sorted(names, key=name_order) == [name.format(number) for number in sorted(numbers)]


def test_equal_numbers_have_one_order() -> None:
    assert sorted(["d01", "d1", "d.tsv", "d"], key=name_order) == ["d", "d.tsv", "d01", "d1"]


def test_a_file_that_is_named_twice_is_rejected(tmp_path: Path) -> None:
    """Finding Q15: its rows counted double."""
    (tmp_path / "a.csv").write_text("1\n")
    (tmp_path / "link.csv").symlink_to("a.csv")
    for paths in (["a.csv", "./a.csv"], [".", "a.csv"], ["link.csv", "a.csv"], ["*.csv"]):
        with pytest.raises(ConfigError, check=at("sources")):
            find_files([tmp_path / path for path in paths])
