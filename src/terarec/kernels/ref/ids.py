"""The id tables in plain Python: what the compiled ones must equal, value for value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import RefusedValueError
from terarec.kernels.ref.hashes import hash_value
from terarec.kernels.ref.texts import split_texts

_HEX_TEXT = re.compile(r"[0-9a-fA-F]{1,8}")
_INT64 = np.iinfo(np.int64)
_MISSING_ID, _FIRST_BUCKET_ID = 0, 1


class _Ids:
    """Ids of any hashable values in a dict."""

    def __init__(self, values: NDArray[Any], hash_buckets: int = 1) -> None:
        if not 1 <= hash_buckets < 2**31:
            raise ValueError("hash_buckets must be in [1, 2^31)")
        first_id = _FIRST_BUCKET_ID + hash_buckets
        self._hash_buckets = hash_buckets
        self._ids = {value: position + first_id for position, value in enumerate(values.tolist())}
        if len(self._ids) != len(values):
            raise ValueError("a value occurs twice")

    def _read(self, value: Any) -> Any:
        """What the dict holds for `value`, None if it is missing; raises ValueError for another type."""
        raise NotImplementedError

    def _id_of(self, key: int | str | None) -> int:
        if key is None:
            return _MISSING_ID
        if key in self._ids:
            return self._ids[key]
        return _FIRST_BUCKET_ID + hash_value(key) % self._hash_buckets

    def _masked(self, values: list[Any], missing: NDArray[np.bool_] | None, out: Any) -> NDArray[Any]:
        ids = np.empty(len(values), dtype=np.int64) if out is None else out
        for row, value in enumerate(values):
            ids[row] = self._id_of(None if missing is not None and missing[row] else value)
        return ids

    def find_list(self, values: list[Any]) -> NDArray[np.int64]:
        """Ids int64[n] of Python values; raises `RefusedValueError` for one that cannot be read."""
        ids = np.empty(len(values), dtype=np.int64)
        for row, value in enumerate(values):
            try:
                ids[row] = self._id_of(self._read(value))
            except ValueError:
                raise RefusedValueError(row) from None
        return ids


class _IntegerIds(_Ids):
    """Ids of integers."""

    def find_all(
        self, values: NDArray[Any], missing: NDArray[np.bool_] | None = None, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Ids of ``values[n]``, some of them ``missing bool[n]``: int64[n], or into ``out`` if given."""
        return self._masked(values.tolist(), missing, out)


class Hex32Ids(_IntegerIds):
    """Ids of 32-bit values; the hash is that of the value as int64."""

    def _read(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value == ""):
            return None
        if not isinstance(value, str) or not _HEX_TEXT.fullmatch(value):
            raise ValueError
        return int(value, 16)


class Int64Ids(_IntegerIds):
    """Ids of 64-bit integers."""

    def _read(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError
        if not _INT64.min <= int(value) <= _INT64.max:
            raise ValueError
        return int(value)


class TextIds(_Ids):
    """Ids of texts."""

    def __init__(self, text: NDArray[np.uint8], offsets: NDArray[np.int64], hash_buckets: int = 1) -> None:
        super().__init__(np.array(split_texts(text, offsets), dtype=object), hash_buckets)

    def find_all(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        missing: NDArray[np.bool_] | None = None,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Ids of n texts, empty ones and ``missing bool[n]`` being missing: int64[n], or into ``out`` if given."""
        return self._masked([value or None for value in split_texts(text, offsets)], missing, out)

    def _read(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value == ""):
            return None
        if not isinstance(value, str):
            raise ValueError
        value.encode()  # a lone surrogate has no UTF-8: UnicodeEncodeError is a ValueError
        return value


class TablesOfColumns:
    """The tables of several columns."""

    def __init__(self, tables: Sequence[Hex32Ids | Int64Ids | TextIds]) -> None:
        self._tables = tuple(tables)

    def find_lists(self, columns: list[list[Any]]) -> NDArray[np.int64]:
        """Ids of the values of all columns, one column after another; raises `RefusedValueError` with their place."""
        ids = [np.empty(0, dtype=np.int64)]
        for table, values in zip(self._tables, columns, strict=True):
            try:
                ids.append(table.find_list(values))
            except RefusedValueError as error:
                raise RefusedValueError(sum(map(len, ids)) + error.row) from None
        return np.concatenate(ids)
