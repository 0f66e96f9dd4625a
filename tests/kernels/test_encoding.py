# SPDX-License-Identifier: Apache-2.0
"""The compiled encoding kernels against plain Python, on whatever values Hypothesis finds."""

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from terarec.kernels.cpu.encoding import InvalidValueError
from tests.kernels import plain_encoding as ref
from tests.kernels.anything import ANYTHING, found_list
from tests.kernels.columns import text_of, validity_of
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


@given(st.lists(st.text("0123456789aBcdefFg", max_size=9), max_size=20), st.data())
def test_hexadecimal_texts_are_read_or_rejected_as_in_plain_python(texts, data):
    valid = validity_of(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))))

    def found(module):
        try:
            numbers, missing = module.read_hex32(*text_of(texts), valid)
        except InvalidValueError as error:
            return error.row
        return numbers.tolist(), missing.tolist()

    assert found(cpu) == found(ref)


def test_hexadecimal_texts_equal_those_of_python():
    numbers, missing = cpu.read_hex32(*text_of(["0A", "", "ffffffff"]))
    assert (numbers.tolist(), missing.tolist()) == ([10, 0, 2**32 - 1], [False, True, False])


@given(st.lists(st.text(max_size=6), max_size=8), st.data())
@settings(max_examples=examples(200))
def test_texts_behind_their_lengths_are_cut_or_rejected_as_in_plain_python(texts, data):
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    raw = bytearray(b"".join(len(text).to_bytes(4, "little") + text for text in encoded))
    for _ in range(data.draw(st.integers(0, 2)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    content = np.frombuffer(bytes(raw) + data.draw(st.sampled_from([b"", b"", b"x"])), dtype=np.uint8)
    count = data.draw(st.sampled_from([len(texts), len(texts), 0, len(texts) + 1]))

    def found(module):
        try:
            text, offsets = module.cut_texts(content, count)
        except InvalidValueError as error:
            return error.row
        return text.tobytes(), offsets.tolist()

    assert found(cpu) == found(ref)
