"""Functions of operators on the values of a column: reject one, read one that a field spells, hash them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import REFUSED_SHOWN, Block, Column, Kind, RowFaultError, text_buffers
from terarec.kernels.cpu.encoding import xxh64_int64, xxh64_text
from terarec.spec.quoting import quoted

_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
HEX_DIGITS = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)
"""Form of a hex32."""


def rejected(block: Block, name: str, wrong: NDArray[np.bool_], accepted: str) -> RowFaultError:
    """Return the error that the `wrong` values, bool[m], of the m of the column `name` are not what is `accepted`.

    At least one of them is.
    """
    column = block.columns[name]
    items = rows = np.flatnonzero(wrong)
    if column.offsets is not None:
        rows, first = np.unique(np.searchsorted(column.offsets, items, side="right") - 1, return_index=True)
        items = items[first]
    got = [f"got {_shown(column, position)}" for position in items[:REFUSED_SHOWN].tolist()]
    return RowFaultError(name, block.rows[rows], got, accepted)


def _shown(column: Column, position: int) -> str:
    value = None if column.missing is not None and column.missing[position] else column.values[position]
    return quoted(value.as_py() if isinstance(value, pa.Scalar) else getattr(value, "item", lambda: value)())


def accepted_list(max_length: int) -> str:
    """Describe the accepted length of a list."""
    return f"at most {max_length} items"


def value_of(kind: Kind, value: float | str) -> Any:
    """Convert a value that a field spells to that of a column of `kind`.

    Raises:
        ConfigError: A column of this kind cannot hold it.
    """
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "number" and not isinstance(value, str):
        return float(value)
    if kind in ("integer", "id"):
        whole = int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else value
        if not isinstance(whole, str) and whole == int(whole) and -(2**63) <= whole < 2**63:
            return int(whole)
    if kind == "hex32" and isinstance(value, str) and HEX_DIGITS.fullmatch(value):
        return int(value, 16)
    spelled = {"text": "a text", "number": "a number", "hex32": "up to 8 hexadecimal digits as text"}
    raise ConfigError(f"got {quoted(value)}, expected {spelled.get(kind, 'a 64-bit integer')} for a column of {kind}")


def hashes_of(column: Column, seed: int) -> NDArray[np.int64]:
    """Compute hashes int64[m] of the m values of a column that holds no numbers; described in docs/workflows.md."""
    if column.type == "text":
        text = column.values
        return xxh64_text(*text_buffers(text.fill_null("") if text.null_count else text), seed)
    return xxh64_int64(column.values.astype(np.int64, copy=False), seed)
