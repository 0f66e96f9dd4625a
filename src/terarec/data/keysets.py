# SPDX-License-Identifier: Apache-2.0
"""Keysets of the parts of a split while it is read part by part."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import KeysetError
from terarec.formats.block import ColumnBlock, bags_of
from terarec.formats.parts import PartSpec, read_part_keys

_HELD = 2  # the part that is read, and the one before or after it


class PartKeysets:
    """The distinct keys of each part of a split. Those of the two parts used last stay in memory.

    Any thread may call the methods.
    """

    def __init__(self, directory: Path, split: str, parts: Sequence[PartSpec]) -> None:
        self._directory = directory
        self._split = split
        self._parts = tuple(parts)
        self._recent: dict[int, Mapping[str, NDArray[np.int64]]] = {}
        self._lock = threading.Lock()

    def keys(self, part: int) -> Mapping[str, NDArray[np.int64]]:
        """Return the distinct keys of the part of that number: column -> int64[n], ascending.

        Raises:
            DataNotFoundError: The file is missing.
            FormatError: The file is damaged.
        """
        # Held while the file is read: further threads wait for the same part instead of reading it, too.
        with self._lock:
            keys = self._recent.pop(part, None)
            if keys is None:
                while len(self._recent) >= _HELD:
                    del self._recent[next(iter(self._recent))]
                keys = read_part_keys(self._directory, self._split, self._parts[part])
            self._recent[part] = keys  # the last one used is the last
            return keys

    def check(self, part: int, names: Sequence[str], block: ColumnBlock, first_row: int) -> None:
        """Raise unless the keyset of a part holds the keys of some of its samples.

        Raises:
            KeysetError: It lacks a key.
            DataNotFoundError: The file is missing.
            FormatError: The file is damaged.
        """
        keyset = self.keys(part)
        for name, column in zip(names, block.keys, strict=True):
            values, offsets = bags_of(column)
            # Distinct first: a group has far fewer of them than keys, and the search needs them sorted.
            distinct = np.unique(values)
            absent = distinct[~_is_in(distinct, keyset.get(name, np.empty(0, np.int64)))]
            if absent.size:
                # The sample is looked for after an error only: most of the time one sorted search has answered.
                first = int(np.isin(values, absent).argmax())
                row = first_row + int(np.searchsorted(offsets, first, side="right")) - 1
                key = int(values[first])
                file = self._directory / self._split / str(self._parts[part].keyset)
                raise KeysetError(
                    file,
                    f"lacks key {key} of column {name!r}, which sample {row} of split {self._split!r} has, "
                    f"expected all keys of part {part}",
                    part=part,
                    column=name,
                    key=key,
                    row=row,
                )


def _is_in(values: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of ``values [n]`` are among ``keys int64[m]``; both ascend."""
    if not keys.size:
        return np.zeros(values.shape, np.bool_)
    places = np.searchsorted(keys, values)
    # The minimum is for values above all keys, whose place is past the end.
    is_member: NDArray[np.bool_] = keys[np.minimum(places, keys.size - 1)] == values
    return is_member
