# SPDX-License-Identifier: Apache-2.0
"""Hashes, ids and counts of values, and columns of numbers, in plain Python, which the compiled kernels equal."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.kernels.cpu.encoding import HASH_SEED, InvalidValueError


def split_texts(text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    """Return texts i, ``text[offsets[i]:offsets[i + 1]]``."""
    whole = text.tobytes()
    return [whole[begin:end].decode() for begin, end in itertools.pairwise(offsets.tolist())]


_MASK = 2**64 - 1
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def xxh64(content: bytes, seed: int = HASH_SEED) -> int:
    """Return the hash of `content`, read as a signed 64-bit integer.

    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
    """
    hashed, rest = _stripes(content, seed) if len(content) >= 32 else (seed + _PRIMES[4], content)
    hashed = (hashed + len(content)) & _MASK
    while len(rest) >= 8:
        hashed ^= _round(0, int.from_bytes(rest[:8], "little"))
        hashed = (_rotate(hashed, 27) * _PRIMES[0] + _PRIMES[3]) & _MASK
        rest = rest[8:]
    if len(rest) >= 4:
        hashed ^= int.from_bytes(rest[:4], "little") * _PRIMES[0] & _MASK
        hashed = (_rotate(hashed, 23) * _PRIMES[1] + _PRIMES[2]) & _MASK
        rest = rest[4:]
    for byte in rest:
        hashed ^= byte * _PRIMES[4] & _MASK
        hashed = _rotate(hashed, 11) * _PRIMES[0] & _MASK
    hashed = (hashed ^ hashed >> 33) * _PRIMES[1] & _MASK
    hashed = (hashed ^ hashed >> 29) * _PRIMES[2] & _MASK
    hashed ^= hashed >> 32
    # Signed, as Spark's ``xxhash64`` and NumPy's int64 show it.
    return hashed - 2**64 if hashed >= 2**63 else hashed


def hash_value(value: int | str, seed: int = HASH_SEED) -> int:
    """Return the hash of a text's UTF-8 bytes or of an integer's eight little-endian bytes."""
    return xxh64(value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True), seed)


def xxh64_int64(values: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Return the hashes int64[n] of the eight little-endian bytes of each of ``values int64[n]``."""
    return np.array([hash_value(value, seed) for value in values.tolist()], dtype=np.int64)


def xxh64_text(text: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Return the hashes int64[n] of n texts: text i is ``text[offsets[i]:offsets[i + 1]]``."""
    return np.array([hash_value(value, seed) for value in split_texts(text, offsets)], dtype=np.int64)


def xxh64_list(values: list[Any], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Return the hashes int64[n] of Python texts and integers; that of None is 0."""
    hashes = np.zeros(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        if value is None:
            continue
        # Python counts True as an integer, a column does not.
        if isinstance(value, bool) or not isinstance(value, str | int | np.integer):
            raise InvalidValueError(row)
        try:
            hashes[row] = hash_value(value if isinstance(value, str) else int(value), seed)
        except (UnicodeEncodeError, OverflowError):
            raise InvalidValueError(row) from None
    return hashes


def _stripes(content: bytes, seed: int) -> tuple[int, bytes]:
    """Return the hash of the whole 32 bytes of `content`, and the bytes behind them."""
    # Not reduced modulo 2^64 here: `_round` masks, and Python integers do not overflow.
    lanes = [seed + _PRIMES[0] + _PRIMES[1], seed + _PRIMES[1], seed, seed - _PRIMES[0]]
    while len(content) >= 32:
        words = (int.from_bytes(content[at : at + 8], "little") for at in range(0, 32, 8))
        lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
        content = content[32:]
    hashed = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
    for lane in lanes:
        hashed = ((hashed ^ _round(0, lane)) * _PRIMES[0] + _PRIMES[3]) & _MASK
    return hashed, content


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _PRIMES[1]) & _MASK, 31) * _PRIMES[0] & _MASK


def _rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK


_LAST_COUNT = 2**32 - 1


def _is_valid(valid: NDArray[np.uint8] | None, row: int) -> bool:
    """Return the bit of a row in Arrow's validity bitmap; None has no bits that are 0."""
    return valid is None or bool(valid[row // 8] >> row % 8 & 1)


class _Counts:
    """Counts of any hashable values."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()

    def _add(self, values: Iterable[Any], valid: NDArray[np.uint8] | None, times: NDArray[np.int64] | None) -> None:
        for row, value in enumerate(values):
            if _is_valid(valid, row):
                self._counts[value] += 1 if times is None else int(times[row])

    def _by_count(self, min_count: int) -> list[tuple[Any, int]]:
        kept = [(value, count) for value, count in self._counts.items() if count >= min_count]
        return sorted(kept, key=lambda item: (-item[1], item[0]))

    def _by_value(self) -> list[tuple[Any, int]]:
        all_counts = sorted(self._counts.items())
        self._counts.clear()
        return all_counts

    def __len__(self) -> int:
        """Return the number of distinct values."""
        return len(self._counts)


class _IntegerCounts(_Counts):
    """Counts of integers of one type."""

    dtype: type[np.integer[Any]]
    last_count: int

    def add(
        self, values: NDArray[Any], valid: NDArray[np.uint8] | None = None, times: NDArray[np.int64] | None = None
    ) -> None:
        """Count ``values[n]`` that are `valid`; value i ``times[i]`` times if given."""
        self._add(values.tolist(), valid, times)

    def at_least(self, min_count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return values that occurred `min_count` times and their counts, by decreasing count, then by value."""
        return self._arrays(self._by_count(min_count))

    def drain(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return all values, rising, and their counts; the table is empty afterwards."""
        return self._arrays(self._by_value())

    def _arrays(self, items: list[tuple[Any, int]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        # The compiled table stops at its largest count instead of wrapping to 0.
        counts = [min(count, self.last_count) for _, count in items]
        return np.array([value for value, _ in items], dtype=self.dtype), np.array(counts, dtype=np.int64)


class Hex32Counts(_IntegerCounts):
    """Counts of 32-bit values; they stop at 2^32 - 1."""

    dtype = np.uint32
    last_count = _LAST_COUNT


class Int64Counts(_IntegerCounts):
    """Counts of 64-bit integers."""

    dtype = np.int64
    last_count = 2**63 - 1


class TextCounts(_Counts):
    """Counts of texts. Text i of n is ``text[offsets[i]:offsets[i + 1]]``."""

    def add(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        valid: NDArray[np.uint8] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count n texts that are `valid` and not empty; text i ``times[i]`` times if given."""
        self._add((value.encode() for value in split_texts(text, offsets)), valid, times)
        # An empty text is a missing value, as in delimited text.
        self._counts.pop(b"", None)

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return texts that occurred `min_count` times and their counts, by decreasing count, then by bytes."""
        return self._arrays(self._by_count(min_count))

    def drain(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return all texts by rising bytes, and their counts; the table is empty afterwards."""
        return self._arrays(self._by_value())

    @staticmethod
    def _arrays(items: list[tuple[bytes, int]]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        text = np.frombuffer(b"".join(value for value, _ in items), dtype=np.uint8)
        offsets = np.cumsum([0, *(len(value) for value, _ in items)], dtype=np.int64)
        return text, offsets, np.array([count for _, count in items], dtype=np.int64)


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
        # Ids of listed values follow those of the buckets, so a longer list does not change the ids of unknown values.
        self._ids = {value: position + first_id for position, value in enumerate(values.tolist())}
        if len(self._ids) != len(values):
            raise ValueError("a value occurs twice")

    def _read(self, value: Any) -> Any:
        """Return the key of `value` in the dict, None if it is missing; raise ValueError for another type."""
        raise NotImplementedError

    def _id_of(self, key: int | str | None) -> int:
        if key is None:
            return _MISSING_ID
        if key in self._ids:
            return self._ids[key]
        # Python's remainder of a negative hash is not negative, as the format requires.
        return _FIRST_BUCKET_ID + hash_value(key) % self._hash_buckets

    def _masked(self, values: list[Any], valid: NDArray[np.uint8] | None, out: Any) -> NDArray[Any]:
        ids = np.empty(len(values), dtype=np.int64) if out is None else out
        for row, value in enumerate(values):
            ids[row] = self._id_of(value if _is_valid(valid, row) else None)
        return ids

    def find_list(self, values: list[Any]) -> NDArray[np.int64]:
        """Return the ids int64[n] of Python values; raises `InvalidValueError` for one that cannot be read."""
        ids = np.empty(len(values), dtype=np.int64)
        for row, value in enumerate(values):
            try:
                ids[row] = self._id_of(self._read(value))
            except ValueError:
                raise InvalidValueError(row) from None
        return ids


class _IntegerIds(_Ids):
    """Ids of integers."""

    def find_all(
        self, values: NDArray[Any], valid: NDArray[np.uint8] | None = None, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Return the ids of ``values[n]``, missing unless `valid`: int64[n], or into ``out`` if given."""
        return self._masked(values.tolist(), valid, out)


class Hex32Ids(_IntegerIds):
    """Ids of 32-bit values; the hash is that of the value as int64."""

    @override
    def _read(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value == ""):
            return None
        if not isinstance(value, str) or not _HEX_TEXT.fullmatch(value):
            raise ValueError
        return int(value, 16)


class Int64Ids(_IntegerIds):
    """Ids of 64-bit integers."""

    @override
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
        valid: NDArray[np.uint8] | None = None,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Return ids of n texts, missing where empty or not `valid`: int64[n], or into ``out`` if given."""
        return self._masked([value or None for value in split_texts(text, offsets)], valid, out)

    @override
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
        """Return the ids of all columns, one after another; raise `InvalidValueError` for an invalid value."""
        # `np.concatenate` needs one array at least, and with it the type where there is no column.
        ids = [np.empty(0, dtype=np.int64)]
        for table, values in zip(self._tables, columns, strict=True):
            try:
                ids.append(table.find_list(values))
            except InvalidValueError as error:
                raise InvalidValueError(sum(map(len, ids)) + error.row) from None
        return np.concatenate(ids)


def numbers_of_list(values: list[Any], *, whole: bool = False) -> NDArray[np.float64]:
    """Return float64[n] from a list of numbers, or of `whole` ones; None and ``""`` are missing, which is NaN."""
    return numbers_of_lists([values], whole=whole)


def numbers_of_lists(columns: list[list[Any]], *, whole: bool = False) -> NDArray[np.float64]:
    """Return the numbers of several lists as `numbers_of_list` does, one list after another."""
    values = [value for column in columns for value in column]
    numbers = np.empty(len(values), dtype=np.float64)
    for row, value in enumerate(values):
        try:
            numbers[row] = _whole(value) if whole else _number(value)
        except (OverflowError, ValueError):
            raise InvalidValueError(row) from None
    return numbers


def _number(value: Any) -> float:
    if value is None or (isinstance(value, str) and value == ""):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or math.isinf(value):
        raise ValueError
    return float(value)


def _whole(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError
    return float(value)


def read_hex32(
    text: NDArray[np.uint8], offsets: NDArray[np.int64], valid: NDArray[np.uint8] | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return the numbers uint32[n] of n hexadecimal texts, and which are missing, bool[n]."""
    values = [value if _is_valid(valid, row) else "" for row, value in enumerate(split_texts(text, offsets))]
    for row, value in enumerate(values):
        if value and not _HEX_TEXT.fullmatch(value):
            raise InvalidValueError(row)
    numbers = np.array([int(value or "0", 16) for value in values], dtype=np.uint32)
    return numbers, np.array([value == "" for value in values], dtype=np.bool_)


def cut_texts(raw: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes and offsets of `count` texts, each behind its length in 4 bytes."""
    content, at = raw.tobytes(), 0
    if len(content) < 4 * count:
        raise InvalidValueError(len(content) // 4)
    texts: list[bytes] = []
    for row in range(count):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        if end + 4 * (count - row - 1) > len(content):
            raise InvalidValueError(row)
        texts.append(content[at + 4 : end])
        try:
            texts[-1].decode()
        except UnicodeDecodeError:
            raise InvalidValueError(row) from None
        at = end
    if at != len(content):
        raise InvalidValueError(count)
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return np.frombuffer(b"".join(texts), dtype=np.uint8), offsets


def stack_columns(columns: Sequence[NDArray[Any]], out: NDArray[np.float32]) -> None:
    """Write the F ``columns`` of n numbers side by side into ``out float32[n, F]``."""
    for target, column in zip(out.T, columns, strict=True):
        target[:] = column


def concatenate_keys(arrays: Sequence[NDArray[Any]], offsets: Sequence[int], out: NDArray[np.int64]) -> None:
    """Write int32[n] or int64[n] arrays one after another into ``out int64[sum of n]``, each plus its offset."""
    moved = [array.astype(np.int64) + np.int64(offset) for array, offset in zip(arrays, offsets, strict=True)]
    np.concatenate([np.empty(0, dtype=np.int64), *moved], out=out)


def nulls_hold(numbers: NDArray[Any], valid: NDArray[np.uint8], fill: float) -> bool:
    """Return whether the numbers[n] whose bits in the bitmap `valid` are 0 are all `fill`; NaN is NaN."""
    nulls = numbers[np.unpackbits(valid, count=len(numbers), bitorder="little") == 0]
    return bool((np.isnan(nulls) if np.isnan(fill) else nulls == fill).all())
