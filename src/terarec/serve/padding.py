# SPDX-License-Identifier: Apache-2.0
"""Columns of lists as tensors [B, n] and back: the one rule of clients, servers and exports.

Tensors are rectangular, so shorter lists are padded. A missing value inside a list is an item all the same. Padding is
what lies behind a list's length, which a tensor ``<column>.lengths`` int64[B] states. Where no such tensor is sent, the
missing values at the end of a row are its padding.

Arrays of NumPy have no missing value but NaN. A tensor ``<column>.missing`` BOOL, of the shape of the column, states
which of its elements are null. It alone does: NaN, an empty text and -2^63, which sessions take for missing, are items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.workflow.raw_values import RawValues, as_list
from terarec.spec.checks import quoted
from terarec.spec.dataset import MISSING_KEY

LENGTHS = ".lengths"
"""Behind the name of a column of lists: the tensor with the lengths of its lists."""

MISSING = ".missing"
"""Behind the name of a column: the tensor that says which elements are missing, for clients whose arrays cannot."""


class PaddedLists(NamedTuple):
    """Lists of B records as a tensor [B, n].

    Attributes:
        values: B * n items in row-major order; None for a missing one, and behind the end of a list.
        width: Length n of the longest list.
        lengths: Length of each list; None where they follow from the missing values at the ends of the rows.
    """

    values: list[Any]
    width: int
    lengths: list[int] | None


def pad(lists: Sequence[Sequence[Any]]) -> PaddedLists:
    """Return lists as a tensor, with their lengths where one ends with a missing item."""
    lengths = [len(items) for items in lists]
    width = max(lengths, default=0)
    values = [value for items in lists for value in (*items, *[None] * (width - len(items)))]
    # Also of those that stand for null where it cannot be sent, as to an exported model in Triton.
    is_needed = any(items and items[-1] in (None, "", MISSING_KEY) for items in lists)
    return PaddedLists(values, width, lengths if is_needed else None)


def unpad(
    values: list[Any], shape: tuple[int, int], lengths: RawValues | None, *, where: str, lengths_where: str
) -> list[list[Any]]:
    """Return the lists of a tensor [B, n].

    Args:
        values: As in `PaddedLists`. NaN is an item that is missing, and no padding.
        shape: Number B of records, and n.
        lengths: As in `PaddedLists`.
        where: Place of the values, for errors.
        lengths_where: Place of the lengths, for errors.

    Raises:
        ConfigError: Other lengths than one from 0 to n for each record, or a value behind the end of its list.
    """
    num_records, width = shape
    rows = [values[row * width : (row + 1) * width] for row in range(num_records)]
    if lengths is None:
        for row in rows:
            while row and row[-1] is None:
                row.pop()
        return rows
    if len(lengths) != num_records:
        raise ConfigError(lengths_where, f"got {len(lengths)} lengths, expected one for each of {num_records} records")
    for record, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length is None or not 0 <= length <= width:
            got = quoted(length, is_json=True)
            raise ConfigError(f"{lengths_where}[{record}]", f"got {got}, expected a length from 0 to {width}")
        for place in range(length, width):
            if row[place] is not None:
                got = quoted(row[place], is_json=True)
                raise ConfigError(
                    f"{where}[{record * width + place}]",
                    f"got {got} behind the end of a list of {length} items, expected nothing there",
                )
        del row[length:]
    return rows


def with_missing(values: RawValues, is_missing: Sequence[Any] | npt.NDArray[np.bool_]) -> list[Any]:
    """Return values with None where `is_missing` is true; null is false. NaN stays: it would else end a list."""
    return [None if missing else value for value, missing in zip(as_list(values), is_missing, strict=True)]


def plain_values(values: RawValues) -> list[Any]:
    """Return a column of values, or of lists of them, in any form that a session takes, as Python lists.

    A missing value is None: null, or NaN.
    """
    return [_plain(value) for value in _listed(values)]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | np.ndarray | pa.Array | pa.ListScalar):
        return [_plain(item) for item in _listed(value)]
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, pa.Scalar):
        value = value.as_py()
    return None if value != value else value  # NaN alone differs from itself


def _listed(values: Any) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.to_pylist()
    if isinstance(values, pa.ListScalar):
        return values.as_py() or ()
    return values.tolist() if isinstance(values, np.ndarray) else values
