"""The elements of a tensor: which Python values fit which of the protocol's datatypes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError
from terarec.spec.quoting import quoted

Elements: TypeAlias = Sequence[Any]
"""Elements in row-major order; None stands for a missing value.

JSON numbers are not rounded to the width that a floating datatype names: a raw value that is an integer beyond 2^24
must reach the workflow whole, as it did when the data set was prepared.
"""

INTEGER_BITS: Mapping[str, tuple[bool, int]] = {
    f"{'' if signed else 'U'}INT{bits}": (signed, bits) for signed in (True, False) for bits in (64, 32, 16, 8)
}
"""Integer datatype -> whether it is signed, and its width."""

DATATYPES = ("BOOL", *INTEGER_BITS, "FP16", "FP32", "FP64", "BYTES")


def check_elements(values: Elements, datatype: str, where: str) -> Elements:
    """`values`, which must fit `datatype`.

    Raises:
        ConfigError: a value of another type or out of range, as ``<where>[<index>]``.
    """
    if not _fit(values, datatype):
        index = next(index for index, value in enumerate(values) if not _fit((value,), datatype))
        raise ConfigError(
            f"{where}[{index}]: got {quoted(values[index], is_json=True)}, expected {_accepted(datatype)}"
        )
    return values


def float32_elements(values: npt.NDArray[np.float32]) -> list[float]:
    """`values` as the shortest decimals that read back as the same float32, which halves the JSON."""
    shortest: list[float] = values.reshape(-1).astype(str).astype(np.float64).tolist()
    return shortest


def _fit(values: Elements, datatype: str) -> bool:
    types = set(map(type, values)) - {type(None)}
    known = [value for value in values if value is not None]
    if datatype == "BYTES":
        return types <= {str} and _is_unicode("".join(known))
    if datatype == "BOOL":
        return types <= {bool}
    if datatype.startswith("FP"):
        return types <= {int, float} and _are_finite(known)
    signed, bits = INTEGER_BITS[datatype]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return types <= {int} and (not known or (min(known) >= low and max(known) <= high))


def _is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _are_finite(numbers: Sequence[float]) -> bool:
    try:
        return all(map(math.isfinite, numbers))
    except OverflowError:  # an integer beyond float64
        return False


def _accepted(datatype: str) -> str:
    if datatype in INTEGER_BITS:
        return f"an integer that fits {datatype}, or null"
    names = {"BYTES": "a string of valid Unicode", "BOOL": "true or false"}
    return f"{names.get(datatype, 'a finite number')} or null for {datatype}"
