# SPDX-License-Identifier: Apache-2.0
"""Messages of updated rows: HugeCTR's bytes, written down by `struct`."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import FormatError
from terarec.hugectr.update_messages import UpdatedRows, decode_message, encode_messages
from tests.errors import at

GOLDEN = b"HCTR" + struct.pack("<I", 8) + struct.pack("<q2f", 7, 1.5, -2.0) + struct.pack("<q2f", -1, 0.25, 4.0)


def test_golden_bytes() -> None:
    keys, vectors = decode_message(GOLDEN, 2)
    assert keys.tolist() == [7, -1]
    assert vectors.tolist() == [[1.5, -2.0], [0.25, 4.0]]
    written = dict(encode_messages(UpdatedRows(keys, vectors)))
    # The groups of HugeCTR's partitioner: the mixer rrxmrrxmsx_0 of the key, modulo 8.
    assert written == {mixed(key) % 8: GOLDEN[:8] + GOLDEN[8 + 16 * i : 24 + 16 * i] for i, key in enumerate((7, -1))}


def mixed(key: int) -> int:
    def rotated(value: int, bits: int) -> int:
        return (value >> bits | value << (64 - bits)) % 2**64

    value = key % 2**64
    value ^= rotated(value, 25) ^ rotated(value, 50)
    value = value * 0xA24BAED4963EE407 % 2**64
    value ^= rotated(value, 24) ^ rotated(value, 49)
    value = value * 0x9FB21C651E98DF25 % 2**64
    return value ^ value >> 28


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=50), width=st.integers(1, 5))
def test_what_is_written_is_read(keys: list[int], width: int) -> None:
    vectors = np.random.default_rng(0).standard_normal((len(keys), width)).astype(np.float32)
    read: dict[int, list[float]] = {}
    for group, content in encode_messages(UpdatedRows(np.array(keys, np.int64), vectors)):
        rows = decode_message(content, width)
        assert {mixed(key) % 8 for key in rows.keys.tolist()} == {group}
        read |= dict(zip(rows.keys.tolist(), rows.vectors.tolist(), strict=True))
    assert read == dict(zip(keys, vectors.tolist(), strict=True))


def test_messages_have_at_most_256_kib() -> None:
    keys = np.arange(20_000)
    rows = UpdatedRows(keys, np.ones((len(keys), 64), np.float32))
    messages = [content for _, content in encode_messages(rows)]
    assert max(map(len, messages)) <= 256 * 1024
    assert sorted(key for one in messages for key in decode_message(one, 64).keys.tolist()) == keys.tolist()


def test_the_message_of_a_trainer_that_tests_its_connection_has_no_rows() -> None:
    assert decode_message(b"HCTR" + struct.pack("<I", 8), 3).vectors.shape == (0, 3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "begins with b''"),
        (b"HCTR\x08\0\0", "begins with"),
        (b"RTCH" + GOLDEN[4:], "begins with"),
        (GOLDEN[:4] + struct.pack("<I", 12) + GOLDEN[8:], "vectors of 12 bytes, expected 8"),
        (GOLDEN[:-1], "31 bytes of rows, expected a multiple of 16"),
    ],
)
def test_other_messages_are_rejected(content: bytes, problem: str) -> None:
    with pytest.raises(FormatError, check=at("message", problem)):
        decode_message(content, 2)
