"""XXH64 in plain Python and NumPy: what the compiled hash must equal.

Source: Collet 2012, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = 2**64 - 1


def xxh64_int64(values: NDArray[np.int64], seed: int = 42) -> NDArray[np.int64]:
    """Hashes int64[n] of the eight little-endian bytes of each of ``values int64[n]``."""
    word = values.astype(np.int64).view(np.uint64)
    hashes = np.full(len(word), (seed + _P5 + 8) & _MASK, dtype=np.uint64)
    lane = _rotated(word * np.uint64(_P2), 31) * np.uint64(_P1)
    hashes = _rotated(hashes ^ lane, 27) * np.uint64(_P1) + np.uint64(_P4)
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(_P2)
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_P3)
    return (hashes ^ (hashes >> np.uint64(32))).view(np.int64)


def xxh64_text(text: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = 42) -> NDArray[np.int64]:
    """Hashes int64[n] of n texts: text i is ``text[offsets[i]:offsets[i + 1]]``."""
    data, ends = text.tobytes(), offsets.tolist()
    hashes = [xxh64_bytes(data[first:last], seed) for first, last in itertools.pairwise(ends)]
    return np.array(hashes, dtype=np.int64)


def xxh64_bytes(data: bytes, seed: int = 42) -> int:
    """The hash of `data` as a signed integer."""
    seed &= _MASK
    position = 0
    hashed = (seed + _P5) & _MASK
    if len(data) >= 32:
        lanes = [(seed + _P1 + _P2) & _MASK, (seed + _P2) & _MASK, seed, (seed - _P1) & _MASK]
        for position in range(0, len(data) - 31, 32):
            words = (data[position + 8 * lane : position + 8 * lane + 8] for lane in range(4))
            lanes = [_round(lane, int.from_bytes(word, "little")) for lane, word in zip(lanes, words, strict=True)]
        position += 32
        hashed = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            hashed = ((hashed ^ _round(0, lane)) * _P1 + _P4) & _MASK
    return _signed(_avalanche(_tail((hashed + len(data)) & _MASK, data[position:])))


def _tail(hashed: int, rest: bytes) -> int:
    while len(rest) >= 8:
        hashed = (_rotate(hashed ^ _round(0, int.from_bytes(rest[:8], "little")), 27) * _P1 + _P4) & _MASK
        rest = rest[8:]
    if len(rest) >= 4:
        hashed = (_rotate(hashed ^ (int.from_bytes(rest[:4], "little") * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        rest = rest[4:]
    for byte in rest:
        hashed = _rotate(hashed ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    return hashed


def _avalanche(hashed: int) -> int:
    hashed = (hashed ^ (hashed >> 33)) * _P2 & _MASK
    hashed = (hashed ^ (hashed >> 29)) * _P3 & _MASK
    return hashed ^ (hashed >> 32)


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (64 - bits))) & _MASK


def _rotated(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
