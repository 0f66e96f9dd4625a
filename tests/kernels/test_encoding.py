# SPDX-License-Identifier: Apache-2.0
"""The compiled encoding kernels against plain Python, on whatever values Hypothesis finds."""

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from terarec.kernels.ref import encoding as ref
from tests.kernels.anything import ANYTHING, found_list
from tests.params import examples


@given(st.lists(ANYTHING | st.sampled_from([2**63 - 1, 2**63, -(2**63)]), max_size=8), st.booleans())
@settings(max_examples=examples(300))
def test_lists_of_anything_are_read_as_numbers_or_rejected_as_in_plain_python(values, whole):
    numbers = [found_list(partial(module.numbers_of_list, whole=whole), values) for module in (cpu, ref)]
    halves = [values[: len(values) // 2], values[len(values) // 2 :]]
    in_halves = found_list(partial(cpu.numbers_of_lists, whole=whole), halves)
    np.testing.assert_array_equal(in_halves, numbers[0])
    if isinstance(numbers[0], str):
        assert numbers[0] == numbers[1]
    else:
        np.testing.assert_array_equal(*numbers)
