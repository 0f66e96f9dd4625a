"""Raw categories -> ids. Ids and missing values are described in docs/encoders.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.dense_encoding import read_numbers
from terarec.etl.raw_columns import RawColumn
from terarec.etl.vocabulary import Vocabulary, text_and_offsets
from terarec.formats import Keys
from terarec.kernels.cpu.ids import Int64Ids, TextIds
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import MISSING_ID, MISSING_KEY, BucketizeEncoder, CategoricalColumn

CategoricalEncoding: TypeAlias = Callable[[RawColumn], Keys]
"""Encodes the raw values of one column: int64[n], or (keys, offsets) for a column of lists."""

ScalarEncoding: TypeAlias = Callable[[RawColumn], NDArray[np.int64]]

_ACCEPTED = {
    "hex32": "up to 8 hexadecimal digits as text, or nothing where it is missing",
    "string": "text, or nothing where it is missing",
    "int64": "a 64-bit integer, or nothing where it is missing",
}


def categorical_encoding(column: CategoricalColumn, vocabulary: Vocabulary | None) -> CategoricalEncoding:
    """The function that encodes `column`; without an encoder it takes the raw values as ids.

    Args:
        column: with its encoder.
        vocabulary: what its `VocabularyEncoder` names, if it has one.

    Raises:
        FormatError: the vocabulary is missing, or has another number of rows than the column.
    """
    scalar = _scalar_encoding(column, vocabulary)
    if column.hotness == 1:
        return scalar

    def encode_lists(raw: RawColumn) -> Keys:
        flat, offsets = raw.flatten(column.hotness)
        return scalar(flat), offsets

    return encode_lists


def _scalar_encoding(column: CategoricalColumn, vocabulary: Vocabulary | None) -> ScalarEncoding:
    encoder = column.encoder
    if column.rows is None:
        return _take_keys
    if encoder is None:
        rows = column.rows
        return lambda raw: _take_ids(raw, rows)
    if isinstance(encoder, BucketizeEncoder):
        boundaries = np.asarray(encoder.boundaries, dtype=np.float64)
        return lambda raw: _bucketize(raw, boundaries)
    found = None if vocabulary is None else vocabulary.rows
    if vocabulary is None or found != column.rows:
        raise FormatError(
            f"column {column.name!r}: its vocabulary has {found} ids, expected {column.rows} (dataset.json)"
        )
    return _vocabulary_encoding(vocabulary)


def _vocabulary_encoding(vocabulary: Vocabulary) -> ScalarEncoding:
    ids, accepted = vocabulary.ids, _ACCEPTED[vocabulary.value_type]

    def encode(raw: RawColumn) -> NDArray[np.int64]:
        values = raw.values
        try:
            if isinstance(values, list):
                return ids.find_list(values)
            if isinstance(ids, Int64Ids):
                return ids.find_all(*_integers(raw))
            if not isinstance(values, pa.Array) or not _is_text(values.type):
                raise raw.mistyped(accepted)
            filled = pc.fill_null(values, "").cast(pa.large_string())
            find = ids.find_all if isinstance(ids, TextIds) else ids.find_text
            return find(*text_and_offsets(filled))
        except RefusedValueError as error:
            raise raw.refused(error.row, accepted) from None

    return encode


def _integers(raw: RawColumn) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The integers int64[n] of a NumPy or Arrow column, and which of them are missing, bool[n].

    Raises:
        ConfigError: another type.
        RefusedValueError: an integer beyond int64.
    """
    values: Any = raw.values
    missing = np.zeros(len(values), dtype=np.bool_)
    if isinstance(values, pa.Array):
        if not pa.types.is_integer(values.type):
            raise raw.mistyped(_ACCEPTED["int64"])
        if values.null_count:
            missing = values.is_null().to_numpy(zero_copy_only=False)
            values = values.fill_null(0)
        values = values.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iu":
        raise raw.mistyped(_ACCEPTED["int64"])
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise RefusedValueError(int(np.argmax(values > np.iinfo(np.int64).max)))
    return np.ascontiguousarray(values, dtype=np.int64), missing


def _take_keys(raw: RawColumn) -> NDArray[np.int64]:
    """Raw integers as they are."""
    values = raw.values
    try:
        if isinstance(values, list):
            return np.fromiter(map(_key, values, range(len(values))), dtype=np.int64, count=len(values))
        integers, missing = _integers(raw)
    except RefusedValueError as error:
        raise raw.refused(error.row, _ACCEPTED["int64"]) from None
    return np.where(missing, MISSING_KEY, integers)


def _key(value: Any, row: int) -> int:
    if value is None:
        return MISSING_KEY
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not -(2**63) <= value < 2**63:
        raise RefusedValueError(row)
    return int(value)


def _bucketize(raw: RawColumn, boundaries: NDArray[np.float64]) -> NDArray[np.int64]:
    numbers = read_numbers(raw)
    buckets = np.searchsorted(boundaries, numbers, side="right").astype(np.int64, copy=False) + 1
    buckets[np.isnan(numbers)] = MISSING_ID
    return buckets


def _take_ids(raw: RawColumn, rows: int) -> NDArray[np.int64]:
    accepted = f"an id, 0 <= id < {rows}"
    numbers = read_numbers(raw)
    wrong = ~((numbers >= 0) & (numbers < rows) & (numbers == np.floor(numbers)))
    if wrong.any():
        raise raw.refused(int(np.argmax(wrong)), accepted)
    return numbers.astype(np.int64)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
