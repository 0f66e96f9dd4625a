"""XXH64 in plain Python, of bytes of any length; the compiled one must equal it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import HASH_SEED, RefusedValueError
from terarec.kernels.ref.texts import split_texts

_MASK = 2**64 - 1
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def xxh64(content: bytes, seed: int = HASH_SEED) -> int:
    """The hash of `content`, read as a signed 64-bit integer.

    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
    """
    hashed, rest = _stripes(content, seed) if len(content) >= 32 else (seed + _PRIMES[4], content)
    hashed = (hashed + len(content)) & _MASK
    while len(rest) >= 8:
        hashed ^= _round(0, int.from_bytes(rest[:8], "little"))
        hashed = (_rotate(hashed, 27) * _PRIMES[0] + _PRIMES[3]) & _MASK
        rest = rest[8:]
    if len(rest) >= 4:
        hashed ^= int.from_bytes(rest[:4], "little") * _PRIMES[0] & _MASK
        hashed = (_rotate(hashed, 23) * _PRIMES[1] + _PRIMES[2]) & _MASK
        rest = rest[4:]
    for byte in rest:
        hashed ^= byte * _PRIMES[4] & _MASK
        hashed = _rotate(hashed, 11) * _PRIMES[0] & _MASK
    hashed = (hashed ^ hashed >> 33) * _PRIMES[1] & _MASK
    hashed = (hashed ^ hashed >> 29) * _PRIMES[2] & _MASK
    hashed ^= hashed >> 32
    return hashed - 2**64 if hashed >= 2**63 else hashed


def hash_value(value: int | str, seed: int = HASH_SEED) -> int:
    """The hash of a text's UTF-8 bytes or of an integer's eight little-endian bytes."""
    return xxh64(value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True), seed)


def xxh64_int64(values: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Hashes int64[n] of the eight little-endian bytes of each of ``values int64[n]``."""
    return np.array([hash_value(value, seed) for value in values.tolist()], dtype=np.int64)


def xxh64_text(text: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Hashes int64[n] of n texts: text i is ``text[offsets[i]:offsets[i + 1]]``."""
    return np.array([hash_value(value, seed) for value in split_texts(text, offsets)], dtype=np.int64)


def xxh64_list(values: list[Any], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Hashes int64[n] of Python texts and integers; that of None is 0."""
    hashes = np.zeros(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | np.integer):
            raise RefusedValueError(row)
        try:
            hashes[row] = hash_value(value if isinstance(value, str) else int(value), seed)
        except (UnicodeEncodeError, OverflowError):
            raise RefusedValueError(row) from None
    return hashes


def _stripes(content: bytes, seed: int) -> tuple[int, bytes]:
    """The hash of the whole 32 bytes of `content`, and the bytes behind them."""
    lanes = [seed + _PRIMES[0] + _PRIMES[1], seed + _PRIMES[1], seed, seed - _PRIMES[0]]
    while len(content) >= 32:
        words = (int.from_bytes(content[at : at + 8], "little") for at in range(0, 32, 8))
        lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
        content = content[32:]
    hashed = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
    for lane in lanes:
        hashed = ((hashed ^ _round(0, lane)) * _PRIMES[0] + _PRIMES[3]) & _MASK
    return hashed, content


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _PRIMES[1]) & _MASK, 31) * _PRIMES[0] & _MASK


def _rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK
