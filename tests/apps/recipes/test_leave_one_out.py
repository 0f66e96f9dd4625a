# SPDX-License-Identifier: Apache-2.0
"""Sequences become three splits, of which no earlier one has an item of a later one."""

import gzip
from pathlib import Path

import pytest

from terarec.apps.recipes import find_recipe_files, load_recipe_data
from terarec.apps.recipes.data_sets import prepare_sequences
from terarec.data import open_reader, read_spec
from terarec.errors import DataNotFoundError, FormatError
from tests.errors import at

LINES = "1 4 2 7 5\n2 1 2 3\n\n3 9 8 7 6 5 4\n"


def samples(directory: Path, split: str) -> list[tuple[list[int], int, float]]:
    """Histories, items and labels."""
    (batch,) = open_reader(directory, split, batch_size=100)
    keys, ends, size = batch.sparse.keys.tolist(), batch.sparse.offsets.tolist(), batch.batch_size
    assert batch.sparse.names == ("item", "history")
    return [
        (keys[ends[size + row] : ends[size + row + 1]], keys[row], float(batch.label[row, 0])) for row in range(size)
    ]


def test_the_last_items_are_those_of_test_and_validation(tmp_path: Path) -> None:
    (tmp_path / "Small.txt").write_text(LINES)
    prepare_sequences(tmp_path / "Small.txt", tmp_path / "data")
    assert samples(tmp_path / "data", "train") == [([4], 2, 1.0), ([], 1, 1.0), ([9, 8, 7], 6, 1.0)]
    assert samples(tmp_path / "data", "valid") == [([4, 2], 7, 1.0), ([1], 2, 1.0), ([9, 8, 7, 6], 5, 1.0)]
    assert samples(tmp_path / "data", "test") == [([4, 2, 7], 5, 1.0), ([1, 2], 3, 1.0), ([9, 8, 7, 6, 5], 4, 1.0)]
    spec = read_spec(tmp_path / "data")
    assert [(column.name, column.rows, column.hotness) for column in spec.categorical] == [
        ("item", 10, 1),
        ("history", 10, 5),
    ]


@pytest.mark.parametrize("text", [LINES.replace("\n", "\r\n"), LINES.replace("\n", "\r"), "\ufeff" + LINES])
def test_line_ends_and_a_byte_order_mark(tmp_path: Path, text: str) -> None:
    (tmp_path / "Small.txt").write_bytes(text.encode())
    prepare_sequences(tmp_path / "Small.txt", tmp_path / "data")
    assert samples(tmp_path / "data", "train") == [([4], 2, 1.0), ([], 1, 1.0), ([9, 8, 7], 6, 1.0)]


def test_a_compressed_file(tmp_path: Path) -> None:
    (tmp_path / "Beauty.txt.gz").write_bytes(gzip.compress(LINES.encode()))
    (file,) = find_recipe_files(load_recipe_data("amazon_beauty"), tmp_path)
    prepare_sequences(file, tmp_path / "data")
    assert len(samples(tmp_path / "data", "test")) == 3


def test_a_damaged_compressed_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "Beauty.txt.gz"
    file.write_bytes(gzip.compress(LINES.encode())[:-9])
    with pytest.raises(FormatError, check=at(file, "cannot be read as gzip")):
        prepare_sequences(file, tmp_path / "data")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 2 3 4\n2 5 6\n", "line 2: got '2 5 6', expected a user and at least 3 items"),
        ("1 2 3 x\n", "line 1: got '1 2 3 x'"),
        ("1 2 0 4\n", "line 1: got the item 0"),
        ("1 2 3 4\n\n2 5 6 7\n1 8 9 4\n", "line 4: got the user of line 1 again"),
        ("1 2 3 99999999999999999999\n", "line 1: got '1 2 3 9999"),
        ("1 2 3 \u0664\n", "line 1: got '1 2 3 \u0664'"),
        ("1 2 3 4\x0b2 3 4 x\n", "line 1: got '1 2 3 4\\x0b2"),
        ("\n", "has no lines"),
    ],
)
def test_a_line_of_another_form_is_reported(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "Small.txt"
    file.write_text(text)
    with pytest.raises(FormatError) as error:
        prepare_sequences(file, tmp_path / "data")
    assert str(error.value).startswith(f"{file}: {problem}")
    assert [path.name for path in tmp_path.iterdir()] == ["Small.txt"]


def test_a_missing_file_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, check=at(tmp_path, "Beauty.txt")):
        find_recipe_files(load_recipe_data("amazon_beauty"), tmp_path)
