"""XXH64: published values, and arrays against single values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.kernels.ref.xxh64 import xxh64_bytes, xxh64_int64, xxh64_text


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        # Of the reference implementation.
        (b"", 0, 0xEF46DB3751D8E999),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
        # Of Spark: xxhash64(1L).
        ((1).to_bytes(8, "little"), 42, -7001672635703045582 % 2**64),
    ],
)
def test_published_values(data: bytes, seed: int, expected: int) -> None:
    assert xxh64_bytes(data, seed) % 2**64 == expected


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 2**64 - 1))
def test_integers_are_hashed_by_their_bytes(values: list[int], seed: int) -> None:
    expected = [xxh64_bytes(value.to_bytes(8, "little", signed=True), seed) for value in values]
    assert xxh64_int64(np.array(values, dtype=np.int64), seed).tolist() == expected


@given(st.lists(st.binary(max_size=70)))
def test_texts_are_hashed_by_their_bytes(values: list[bytes]) -> None:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int64)
    hashes = xxh64_text(np.frombuffer(b"".join(values), dtype=np.uint8), offsets)
    assert hashes.tolist() == [xxh64_bytes(value) for value in values]
