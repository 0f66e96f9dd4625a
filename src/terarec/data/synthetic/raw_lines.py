"""Lines of text from columns, by Arrow's compiled functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Column = Any
"""A NumPy or Arrow array of integers, numbers or texts, or one text for all rows."""

_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def joined(columns: Sequence[Column], separator: str, end: str = "\n") -> bytes:
    """Join the columns of each row with `separator`, and close it with `end`. Missing values are empty."""
    parts = [_texts(column) for column in columns]
    lines = pc.binary_join_element_wise(*parts, separator, null_handling="replace", null_replacement="")
    lines = pc.binary_join_element_wise(lines, "", end)
    first, last = lines.buffers()[1], len(lines)
    offsets = np.frombuffer(first, dtype=np.int32)
    text: bytes = lines.buffers()[2].slice(int(offsets[0]), int(offsets[last] - offsets[0])).to_pybytes()
    return text


def choose(words: Sequence[str], indices: NDArray[np.int64]) -> pa.Array:
    """Return the word at each of `indices`; negative ones count from the end, as in Python."""
    return pa.array(words, pa.string()).take(pa.array(indices % len(words)))


def hexadecimal(values: NDArray[np.uint32]) -> pa.Array:
    """Return eight lower-case digits for each of uint32[n]."""
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    digits = _HEX[(values[:, None] >> shifts) & np.uint32(15)]
    offsets = np.arange(len(values) + 1, dtype=np.int32) * 8
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(digits))


def lists_joined(texts: pa.Array, offsets: NDArray[np.int64], separator: str) -> pa.Array:
    """Join each list of `texts`, from ``offsets[i]`` to ``offsets[i + 1]``, with `separator`."""
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts), separator)


def clock(seconds: NDArray[np.int64], directives: str) -> pa.Array:
    """Format seconds since 1970 UTC with the `directives` of strftime."""
    return pc.strftime(pa.array(seconds).cast(pa.timestamp("s")), format=directives)


def decimals(values: NDArray[np.float64], places: int) -> pa.Array:
    """Format non-negative numbers with `places` digits after the point."""
    scale = 10**places
    scaled = np.rint(values * scale).astype(np.int64)
    behind = pc.utf8_lpad(pa.array(scaled % scale).cast(pa.string()), width=places, padding="0")
    return pc.binary_join_element_wise(pa.array(scaled // scale).cast(pa.string()), behind, ".")


def _texts(column: Column) -> Any:
    if isinstance(column, str):
        return pa.scalar(column, pa.string())
    return (column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)).cast(pa.string())
