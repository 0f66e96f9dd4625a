# SPDX-License-Identifier: Apache-2.0
"""The files that paths name, and their order."""

from __future__ import annotations

import os
import random
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, DataNotFoundError
from terarec.etl.source.files import find_files, name_order, numbered_order
from terarec.io.removal import MARKER
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
    (tmp_path / "link.csv").unlink()
    (tmp_path / "logs" / "day_1").mkdir(parents=True)
    (tmp_path / "logs" / "day_1" / "b.csv").write_text("1\n")
    for target in ("..", "../logs/..", "../other"):  # the first two have no end
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "again").unlink(missing_ok=True)
        (tmp_path / "other" / "again").symlink_to("../logs/day_1")
        (tmp_path / "logs" / "above").symlink_to(target)
        with pytest.raises(ConfigError, check=at("sources", f"{tmp_path}/logs/above/")):
            find_files([tmp_path / "logs"])
        (tmp_path / "logs" / "above").unlink()


def test_a_link_beside_its_target_is_a_second_name(raw: Path) -> None:
    """`latest -> day_12` was refused, or counted its rows double."""
    (raw / "hours" / "hour_2").mkdir(parents=True)
    (raw / "hours" / "hour_2" / "a.tsv").write_text("1\n")
    (raw / "a_latest").symlink_to("hours/hour_2")
    (raw / "all").symlink_to(".")
    assert [Path(file.path) for file in find_files([raw])] == [
        *(raw / name for name in DAYS),
        raw / "hours/hour_2/a.tsv",
    ]
    (raw / "hours").rename(raw / ".hours")
    (raw / "a_latest").unlink()
    (raw / "a_latest").symlink_to(".hours/hour_2")
    assert Path(find_files([raw])[0].path) == raw / "a_latest/a.tsv"
    (raw / "b_latest").symlink_to("a_latest")
    with pytest.raises(ConfigError, check=at("sources", f"name {raw}/b_latest twice, also as {raw}/a_latest")):
        find_files([raw])


def test_directories_behind_links_are_read(raw: Path) -> None:
    """Their rows were missing without a word, while a pattern gave them."""
    (raw.parent / "other").mkdir()
    (raw.parent / "other" / "a.tsv").write_text("1\n")
    (raw / "linked").symlink_to("../other")
    (raw / ".hidden").symlink_to(".")
    assert [Path(file.path) for file in find_files([raw])] == [*(raw / name for name in DAYS), raw / "linked/a.tsv"]


@pytest.mark.parametrize("named", ["", "*", "gone.tsv"])
def test_links_to_nothing_are_rejected(raw: Path, named: str) -> None:
    """A day whose link has lost its file was left out without a word."""
    (raw / "gone.tsv").symlink_to("nothing")
    with pytest.raises(DataNotFoundError, check=at(raw / "gone.tsv")):
        find_files([raw / named])


def test_a_pipe_in_a_directory_is_rejected(raw: Path) -> None:
    os.mkfifo(raw / "pipe")
    with pytest.raises(ConfigError, check=at(raw / "pipe")):
        find_files([raw])


@pytest.mark.parametrize("name", ["out.partial", "out.partial-12-0123abcd"])
@pytest.mark.parametrize("pattern", ["", "*", "*/*/*.parquet"])
def test_what_terarec_is_writing_is_no_source(raw: Path, name: str, pattern: str) -> None:
    """An output inside the directory of its sources ended hours of work: the sources had changed."""
    for folder in (raw / name / "train", raw / "day" / "2"):
        folder.mkdir(parents=True)
        (folder / "part-00000.parquet").write_text("1\n")
    expected = [*([] if "/" in pattern else [raw / day for day in DAYS]), raw / "day" / "2" / "part-00000.parquet"]
    for root in (str(raw), f"file://{raw}"):
        found = [Path(file.path.removeprefix("file://")) for file in find_files([f"{root}/{pattern}"])]
        assert sorted(found) == sorted(expected)
    assert len(find_files([raw / name])) == 1  # asked for by its name
    for asked in ("*.partial", "*.partial-*"):
        if (raw / name).match(asked):
            assert len(find_files([raw / asked])) == 1
    (raw / name / MARKER).touch()
    assert len(find_files([raw / name, raw / DAYS[0]])) == 1  # a shell's raw/*, after a kill
    with pytest.raises(DataNotFoundError, check=at(raw / name)):
        find_files([raw / name])
