"""The k-th smallest of more numbers than fit in memory, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 20
_DIGIT_BITS = 16
_KEY_BITS = 64


class OrderStatistics:
    """Numbers in a file, 8 bytes each, of which those of given ranks are found in four passes.

    Args:
        path: of the file, which goes with the block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self.count = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in ``values[n]``, none of them NaN.

        Raises:
            OSError: the disk is full.
        """
        self._file.write(values.tobytes())
        self.count += len(values)

    def at(self, rank: int) -> float:
        """The number with exactly `rank` others before it in rising order."""
        # Digit by digit from the highest: how many keys share the digits found so far and have which one next.
        found = 0
        for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
            counts = np.zeros(1 << _DIGIT_BITS, dtype=np.int64)
            for keys in self._keys():
                above = shift + _DIGIT_BITS
                if above < _KEY_BITS:
                    keys = keys[keys >> np.uint64(above) == found]
                digits = (keys >> np.uint64(shift)) & np.uint64((1 << _DIGIT_BITS) - 1)
                counts += np.bincount(digits.astype(np.int64), minlength=len(counts))
            digit = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
            rank -= int(counts[:digit].sum())
            found = found << _DIGIT_BITS | digit
        return float(_values(np.array([found], dtype=np.uint64))[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _keys(self) -> Iterator[NDArray[np.uint64]]:
        self._file.seek(0)
        while content := self._file.read(8 * _CHUNK):
            yield _ordered(np.frombuffer(content, dtype=np.float64))


def _ordered(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Unsigned integers in the order of the numbers: the sign bit is turned, and for negative ones all others, too."""
    bits = (values + 0.0).view(np.uint64)  # one zero instead of two
    sign = np.uint64(1 << 63)
    return np.where(bits & sign != 0, ~bits, bits | sign)


def _values(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    sign = np.uint64(1 << 63)
    return np.where(keys & sign != 0, keys & ~sign, ~keys).view(np.float64)
