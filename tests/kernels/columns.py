# SPDX-License-Identifier: Apache-2.0
"""Columns in the layouts that the encoding tables take."""

import numpy as np
from hypothesis import strategies as st


def text_of(values):
    """Strings as (bytes, offsets)."""
    data = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int64)
    return np.frombuffer(b"".join(data), dtype=np.uint8), offsets


def validity_of(flags):
    """The validity bitmap of values that are missing where a flag is set; None where none is, as in Arrow."""
    return np.packbits(~np.array(flags, dtype=np.bool_), bitorder="little") if any(flags) else None


SMALL_TEXTS = st.one_of(st.sampled_from(["", "a", "b", "ab"]), st.text(max_size=40))
INT64S = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
