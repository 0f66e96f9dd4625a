# SPDX-License-Identifier: Apache-2.0
"""Integers that tables hold as floats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.formats.integers import float_bound, integers_of_floats


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 11), (np.float32, 24), (np.float64, 53)])
@given(st.integers(-(2**60), 2**60))
def test_no_integer_becomes_another(dtype: type[np.floating], bits: int, value: int) -> None:
    """Finding N2: an integer that is accepted is the only one that the float may be."""
    with np.errstate(over="ignore"):
        held = np.array([value]).astype(dtype)
    integers, bad = integers_of_floats(held)
    assert bad[0] or integers[0] == value
    assert bad[0] == (abs(value) >= 2**bits)


def test_what_is_no_integer() -> None:
    integers, bad = integers_of_floats(np.array([1.5, np.nan, np.inf, -np.inf, -0.0, 7], np.float16))
    assert integers.tolist() == [0, 0, 0, 0, 0, 7]
    assert bad.tolist() == [True, False, True, True, False, False]


def test_longer_floats_are_bounded_as_float64() -> None:
    assert float_bound(np.dtype(np.longdouble)) == 2.0**53
