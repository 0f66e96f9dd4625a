"""Checks of what a caller hands to a writer of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import Keys, bags_of
from terarec.formats.hugectr.key_types import check_key_range
from terarec.spec import RecordLayout


def check_records(
    layout: RecordLayout, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys], where: str
) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
    """The bags (values, offsets int64[n + 1]) of each slot, once ``label[n, L]``, ``dense[n, F]`` and `keys` are right.

    Raises:
        FormatError: a wrong shape, number of slots or of keys in a bag, or a key that the layout's key type cannot
            hold; the message starts with `where`.
    """
    num_rows = len(label)
    for name, array, width in (("label", label, layout.label_dim), ("dense", dense, layout.dense_dim)):
        if array.shape != (num_rows, width):
            raise FormatError(f"{where}: got {name} {list(array.shape)}, expected [{num_rows}, {width}]")
    if len(keys) != layout.num_slots:
        raise FormatError(f"{where}: got keys of {len(keys)} slots, expected {layout.num_slots}")
    bags = []
    for name, slot_keys, most in zip(layout.slot_names, keys, layout.most_keys, strict=True):
        values, offsets = bags_of(slot_keys)
        if len(offsets) != num_rows + 1 or offsets[0] != 0 or offsets[-1] != len(values):
            raise FormatError(
                f"{where}, slot {name!r}: got {len(offsets) - 1} bags of {len(values)} keys for {num_rows} rows"
            )
        check_bag_lengths(np.diff(offsets), most, f"{where}, slot {name!r}")
        check_key_range(values, layout.key_bytes, f"{where}, slot {name!r}")
        bags.append((values, offsets))
    return bags


def check_bag_lengths(lengths: NDArray[Any], most: int, where: str) -> None:
    """Raise `FormatError`, which starts with `where`, if a bag does not hold 0 to `most` keys."""
    wrong = (lengths < 0) | (lengths > most)
    if wrong.any():
        record = int(np.argmax(wrong))
        raise FormatError(f"{where}: record {record} holds {int(lengths[record])} keys, expected 0 to {most}")
