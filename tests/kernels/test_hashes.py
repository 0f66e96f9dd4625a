# SPDX-License-Identifier: Apache-2.0
"""XXH64: published vectors, what Spark gives, and the compiled one against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from terarec.kernels.cpu.encoding import InvalidValueError
from tests.kernels import plain_encoding as ref
from tests.kernels.columns import INT64S, SMALL_TEXTS, text_of


def sanity_bytes(length):
    """The bytes that xxHash's own sanity check hashes (tests/sanity_test.c)."""
    generator, content = 2654435761, bytearray()
    for _ in range(length):
        content.append(generator >> 56)
        generator = generator * 11400714785074694797 % 2**64
    return bytes(content)


@pytest.mark.parametrize(
    ("length", "seed", "expected"),
    [
        (0, 0, 0xEF46DB3751D8E999),
        (0, 2654435761, 0xAC75FDA2929B17EF),
        (1, 0, 0xE934A84ADB052768),
        (1, 2654435761, 0x5014607643A9B4C3),
        (4, 0, 0x9136A0DCA57457EE),
        (14, 0, 0x8282DCC4994E35C8),
        (14, 2654435761, 0xC3BD6BF63DEB6DF0),
        (222, 0, 0xB641AE8CB691C174),
        (222, 2654435761, 0x20CB8AB7AE10C14A),
    ],
)
def test_published_vectors(length, seed, expected):
    content = sanity_bytes(length)
    assert ref.xxh64(content, seed) % 2**64 == expected
    found = cpu.xxh64_text(np.frombuffer(content, dtype=np.uint8), np.array([0, length]), seed)
    assert int(found[0]) % 2**64 == expected


SPARK = {
    "a": -8582455328737087284,
    "\u00fc": 7408949341365432148,
    "01234567890123456789012345678901234567890": -6624797193514025456,
    0: -5252525462095825812,
    1: -7001672635703045582,
    -1: 3858142552250413010,
    2**60: 5899988024947168365,
    0xFFFFFFFF: 6834614295000269421,
}
"""The vectors of docs/workflows.md."""


@pytest.mark.parametrize("module", [cpu, ref], ids=["cpu", "ref"])
def test_documented_vectors(module):
    assert module.xxh64_list(list(SPARK)).tolist() == list(SPARK.values())


@given(st.lists(INT64S, max_size=50), st.one_of(st.just(42), st.integers(0, 2**64 - 1)))
def test_integers_hash_as_in_plain_python(values, seed):
    array = np.array(values, dtype=np.int64)
    found = cpu.xxh64_int64(array, seed)
    np.testing.assert_array_equal(found, ref.xxh64_int64(array, seed))
    np.testing.assert_array_equal(found, cpu.xxh64_list(values, seed))


@given(st.lists(st.one_of(SMALL_TEXTS, st.text(min_size=25, max_size=90)), max_size=30), st.integers(0, 2**64 - 1))
def test_texts_hash_as_in_plain_python(values, seed):
    texts = text_of(values)
    found = cpu.xxh64_text(*texts, seed)
    np.testing.assert_array_equal(found, ref.xxh64_text(*texts, seed))
    np.testing.assert_array_equal(found, cpu.xxh64_list(values, seed))


@pytest.mark.parametrize("module", [cpu, ref], ids=["cpu", "ref"])
@pytest.mark.parametrize("value", [True, 1.5, b"a", 2**63, "\ud800"])
def test_other_values_are_rejected(module, value):
    assert module.xxh64_list([None]).tolist() == [0]
    with pytest.raises(InvalidValueError) as caught:
        module.xxh64_list(["a", np.int32(3), value])
    assert caught.value.row == 2
