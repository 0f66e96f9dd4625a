# SPDX-License-Identifier: Apache-2.0
"""Deltas: their bytes, their chain, and what is rejected."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.formats.container import read_tensors, write_tensors
from terarec.formats.delta import DeltaLink, StateId, TableChanges, read_changes, write_changes
from terarec.spec import from_data, to_data
from tests.errors import at

CHANGES = TableChanges(
    table="item",
    table_rows=9,
    removed=np.array([-3, 7], dtype=np.int64),
    keys=np.array([5, 2**40], dtype=np.int64),
    rows={
        "weights": np.array([[1.0, 2.0], [3.0, -0.5]], dtype=np.float32),
        "state.sum": np.array([0.25, 4.0], dtype=np.float32),
        "use.count": np.array([1, 6], dtype=np.int64),
    },
)


def test_golden_bytes(tmp_path: Path) -> None:
    write_changes(tmp_path / "changes", CHANGES)
    header = {
        "__metadata__": {"table": "item", "table_rows": "9"},
        "removed": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "keys": {"dtype": "I64", "shape": [2], "data_offsets": [16, 32]},
        "weights": {"dtype": "F32", "shape": [2, 2], "data_offsets": [32, 48]},
        "state.sum": {"dtype": "F32", "shape": [2], "data_offsets": [48, 56]},
        "use.count": {"dtype": "I64", "shape": [2], "data_offsets": [56, 72]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (
        "fdffffffffffffff" "0700000000000000" "0500000000000000" "0000000000010000"
        "0000803f" "00000040" "00004040" "000000bf" "0000803e" "00008040" "0100000000000000" "0600000000000000"
    )  # fmt: skip
    assert (tmp_path / "changes").read_bytes() == len(text).to_bytes(8, "little") + text + bytes.fromhex(data)


def test_a_piece_comes_back(tmp_path: Path) -> None:
    sha256 = write_changes(tmp_path / "changes", CHANGES)
    found = read_changes(tmp_path / "changes", sha256=sha256)
    assert (found.table, found.table_rows) == ("item", 9)
    assert found.removed.tolist() == [-3, 7]
    assert found.keys.tolist() == [5, 2**40]
    assert found.rows.keys() == CHANGES.rows.keys()
    assert all((values == CHANGES.rows[name]).all() for name, values in found.rows.items())
    with pytest.raises(FormatError, check=at(f"{tmp_path}/changes")):
        read_changes(tmp_path / "changes", sha256="0" * 64)


@pytest.mark.parametrize(
    ("wrong", "metadata", "problem"),
    [
        ({"removed": None}, {}, "tensor 'removed': got nothing"),
        ({"keys": np.zeros(2, dtype=np.int32)}, {}, "tensor 'keys': got int32[2]"),
        ({"keys": np.zeros(3, dtype=np.int64)}, {}, "tensor 'weights': got [2, 2]"),
        ({}, {"table_rows": "many"}, "table_rows"),
        ({}, {"table_rows": "9" * 5000}, "table_rows"),
        ({}, {"first_row": "0"}, "first_row"),
    ],
)
def test_an_invalid_piece_is_rejected(tmp_path: Path, wrong, metadata, problem: str) -> None:
    write_changes(tmp_path / "changes", CHANGES)
    arrays, described = read_tensors(tmp_path / "changes")
    arrays = {name: array for name, array in {**arrays, **wrong}.items() if array is not None}
    write_tensors(tmp_path / "wrong", arrays, {**described, **metadata})
    with pytest.raises(FormatError, check=at(f"{tmp_path}/wrong", problem)):
        read_changes(tmp_path / "wrong")


def state(step: int) -> StateId:
    return StateId(step=step, id=f"{step:064x}")


def test_a_chain_has_neither_gaps_nor_repeats() -> None:
    first = DeltaLink.after(state(10), None)
    second = DeltaLink.after(state(12), first)
    third = DeltaLink.after(state(15), second)
    assert third == DeltaLink(base=state(10), previous=state(15), sequence=3)
    assert from_data(DeltaLink, json.loads(json.dumps(to_data(third)))) == third
    first.check_follows(12, state(10), None)
    third.check_follows(19, state(15), second)
    wrong = [
        (third, 19, state(12), first),  # the second is missing
        (second, 15, state(15), second),  # twice
        (second, 15, state(12), None),  # follows a base of that step
        (third, 19, replace(state(15), id="f" * 64), second),  # another training's
        (third, 15, state(15), second),  # no step in between
        (first, 12, state(9), None),
    ]
    for link, step, previous, led in wrong:
        with pytest.raises(FormatError, check=at(f"delta of step {step}")):
            link.check_follows(step, previous, led)


def test_links_that_make_no_sense() -> None:
    with pytest.raises(ConfigError):
        DeltaLink(base=state(1), previous=state(2), sequence=1)
    with pytest.raises(ConfigError):
        DeltaLink(base=state(1), previous=state(1), sequence=0)
    with pytest.raises(ConfigError):
        StateId(step=1, id="abc")
