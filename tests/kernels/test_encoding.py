"""The compiled encoding kernels against plain Python, on whatever values Hypothesis finds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from terarec.kernels.encoding_types import RefusedValueError
from terarec.kernels.ref import encoding as ref

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
    try:
        return find(values).tolist()
    except RefusedValueError as refused:
        return f"row {refused.row}"


@given(st.lists(ANYTHING, max_size=8))
@settings(max_examples=200, deadline=None)
def test_lists_of_anything_are_read_as_numbers_or_refused_as_in_plain_python(values):
    numbers = [found_list(module.numbers_of_list, values) for module in (cpu, ref)]
    if isinstance(numbers[0], str):
        assert numbers[0] == numbers[1]
    else:
        np.testing.assert_array_equal(*numbers)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.integers(-100, 20_000))
def test_logs_of_integers_equal_those_of_numpy(values, shift):
    for array in (np.array(values, dtype=np.int32), np.array(values, dtype=np.float64)):
        np.testing.assert_array_equal(cpu.log_shift(array, shift), ref.log_shift(array, shift))


@given(st.lists(st.floats(allow_infinity=False, width=32), max_size=50), st.floats(-1e6, 1e6))
def test_logs_of_numbers_equal_those_of_numpy(values, shift):
    array = np.array(values, dtype=np.float64)
    logs = cpu.log_shift(array, shift)
    # NumPy's and the C library's logarithm may differ in the last bit before they are rounded to float32.
    np.testing.assert_allclose(logs, ref.log_shift(array, shift), rtol=1.2e-7, atol=0)
    assert (logs >= 0).all()
