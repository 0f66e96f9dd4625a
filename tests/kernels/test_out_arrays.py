# SPDX-License-Identifier: Apache-2.0
"""Compiled functions reject an array that they cannot write their result to, instead of filling a converted copy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding, _rowfile
from terarec.memory.row_file import RowFile
from tests.kernels.columns import text_of

KEYS = np.array([3, 5, 3])
CODES = KEYS.astype(np.uint32)
TEXT = text_of(["a", "b", "a"])
HEX32_IDS = _encoding.Hex32Ids(np.array([3], dtype=np.uint32), 1)
INT64_IDS = _encoding.Int64Ids(np.array([3]), 1)
TEXT_IDS = _encoding.TextIds(*text_of(["a"]), 1)
CALLS: dict[str, tuple[Callable[[Any], object], NDArray[Any]]] = {
    "stack_columns": (lambda out: _encoding.stack_columns([KEYS], out), np.empty((3, 1), dtype=np.float32)),
    "concatenate_keys": (lambda out: _encoding.concatenate_keys([KEYS], [0], out), np.empty(3, dtype=np.int64)),
    "xxh64_int64": (lambda out: _encoding.xxh64_int64(KEYS, 1, out), np.empty(3, dtype=np.int64)),
    "xxh64_text": (lambda out: _encoding.xxh64_text(*TEXT, 1, out), np.empty(3, dtype=np.int64)),
    "xxh64_list": (lambda out: _encoding.xxh64_list([3, "a", None], 1, out), np.empty(3, dtype=np.int64)),
    "read_hex32": (
        lambda out: _encoding.read_hex32(*text_of(["5", "", "a"]), None, out, np.empty(3, dtype=np.bool_)),
        np.empty(3, dtype=np.uint32),
    ),
    "cut_texts": (
        lambda out: _encoding.cut_texts(np.frombuffer(b"\3\0\0\0abc", np.uint8), out, np.empty(2, dtype=np.int64)),
        np.empty(3, dtype=np.uint8),
    ),
    "numbers_of_lists": (lambda out: _encoding.numbers_of_lists([[3], [5, 3]], False, out), np.empty(3)),
    "Hex32Ids.find_all": (lambda out: HEX32_IDS.find_all(CODES, None, out), np.empty(3, dtype=np.int32)),
    "Int64Ids.find_all": (lambda out: INT64_IDS.find_all(KEYS, None, out), np.empty(3, dtype=np.int64)),
    "Int64Ids.find_list": (lambda out: INT64_IDS.find_list([3, 5, 3], out), np.empty(3, dtype=np.int64)),
    "TextIds.find_all": (lambda out: TEXT_IDS.find_all(*TEXT, None, out), np.empty(3, dtype=np.int32)),
    "TextIds.find_list": (lambda out: TEXT_IDS.find_list(["a", "b", "a"], out), np.empty(3, dtype=np.int64)),
    "find_columns": (
        lambda out: _encoding.find_columns([INT64_IDS], [KEYS], [None], out),
        np.empty((1, 3), dtype=np.int32),
    ),
    "find_lists": (
        lambda out: _encoding.TablesOfColumns([INT64_IDS]).find_lists([[3, 5, 3]], out),
        np.empty(3, dtype=np.int64),
    ),
    "format_rows": (
        lambda out: _encoding.format_rows(
            np.zeros(1, dtype=np.uint8), np.ones((1, 1), dtype=np.int32), np.ones((1, 1), dtype=np.int64), out
        ),
        np.empty(100, dtype=np.uint8),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_of_another_type_or_layout_is_rejected(name: str) -> None:
    call, out = CALLS[name]
    out.fill(99)
    call(out)
    assert (out != 99).any()
    with pytest.raises(TypeError):
        call(np.zeros_like(out, dtype=np.float16))
    with pytest.raises(TypeError):
        call(np.repeat(out, 2, axis=-1)[..., ::2])


def test_rows_of_a_row_file_of_another_type_are_rejected(tmp_path: Path) -> None:
    file = RowFile.create(tmp_path / "rows", 16)
    store = file._native  # whose arguments `RowFile` checks
    keys, rows, found = np.arange(3), np.full((3, 16), 7, dtype=np.uint8), np.zeros(3, dtype=bool)
    store.write(keys, rows)
    out = np.zeros_like(rows)
    _rowfile.read([store], keys, [3], out, found)
    assert found.all()
    assert (out == rows).all()
    with pytest.raises(TypeError):
        _rowfile.read([store], keys, [3], out.astype(np.int64), found)
    with pytest.raises(TypeError):
        _rowfile.read([store], keys, [3], out, found.astype(np.int8))
    scan = _rowfile.Scan(store)
    with pytest.raises(TypeError):
        scan.next(keys.astype(np.int32), out)
    with pytest.raises(TypeError):
        scan.next(keys, out.astype(np.int64))
    assert scan.next(keys, out) == 3
    file.close()
