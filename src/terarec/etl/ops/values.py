"""Functions of operators on the values of a column: errors of invalid values, values of fields, hashes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import (
    REFUSED_SHOWN,
    Kind,
    RowFaultError,
    Rows,
    array_of,
    flat,
    ids_as_integers,
    kind_of,
    list_offsets,
    numpy_values,
    text_buffers,
)
from terarec.kernels.cpu.encoding import xxh64_int64, xxh64_text
from terarec.spec.quoting import quoted

ValueType = Literal["text", "integer", "number", "hex32"]
"""Types of values that an operator makes."""
_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
HEX_DIGITS = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)
"""Form of a hex32."""


def rejected(rows: Rows, name: str, wrong: NDArray[np.bool_], accepted: str) -> RowFaultError:
    """Return the error that the `wrong` values, bool[m], of the m of the column `name` are not what is `accepted`.

    At least one of them is.
    """
    array = rows.columns[name]
    values, offsets = ids_as_integers(flat(array)), list_offsets(array)
    items = places = np.flatnonzero(wrong)
    if offsets is not None:
        places, first = np.unique(np.searchsorted(offsets, items, side="right") - 1, return_index=True)
        items = items[first]
    found = values.take(array_of(items[:REFUSED_SHOWN])).to_pylist()
    if kind_of(values) == "number":
        found = [math.nan if value is None else value for value in found]
    got = [f"got {quoted(value)}" for value in found]
    return RowFaultError(name, rows.ids[places], got, accepted)


def accepted_list(max_length: int) -> str:
    """Describe the accepted length of a list."""
    return f"at most {max_length} items"


def value_of(kind: Kind, value: float | str, where: str = "") -> Any:
    """Convert a value that a field spells to that of a column of `kind`.

    Args:
        kind: Kind of the column.
        value: Value of the field.
        where: Place for the error.

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
    raise ConfigError(
        where, f"got {quoted(value)}, expected {spelled.get(kind, 'a 64-bit integer')} for a column of {kind}"
    )


def hashes_of(array: pa.Array, seed: int) -> NDArray[np.int64]:
    """Compute hashes int64[m] of m values that are no numbers, as in docs/workflows.md; a null gets any."""
    values = flat(array)
    if kind_of(values) == "text":
        return xxh64_text(*text_buffers(values), seed)
    return xxh64_int64(numpy_values(values).astype(np.int64, copy=False), seed)


def is_among(array: pa.Array, spelled: Sequence[str]) -> NDArray[np.bool_]:
    """Return which of n values, no numbers, are among those that a field spells, bool[n]; a missing one never is."""
    wanted = pa.array([value_of(kind_of(array), value) for value in spelled], type=array.type)
    found: NDArray[np.bool_] = pc.is_in(array, value_set=wanted).to_numpy(zero_copy_only=False)
    return found
