# SPDX-License-Identifier: Apache-2.0
"""Lists of any Python values, as callers hand them to the encoding kernels."""

import numpy as np
from hypothesis import strategies as st

from terarec.kernels.cpu.encoding import InvalidValueError

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 5),
    st.integers(-5, 5).map(np.int16),
    st.floats(),
    st.text("0123456789abcdefABCDEFgé\ud800", max_size=10),
    st.sampled_from(["", "7", "a", "0000000a", "A"]),
    st.binary(max_size=3),
)


def found_list(find, values):
    """Return the result of `find` for `values`, or the row that it rejects."""
    try:
        return find(values).tolist()
    except InvalidValueError as rejected:
        return f"row {rejected.row}"
