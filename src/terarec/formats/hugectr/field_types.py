"""How Raw and RawAsync files hold their numbers. See docs/hugectr-formats.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terarec.errors import ConfigError
from terarec.spec import RecordLayout

FLOAT, INT32, UINT32, INT64 = np.dtype("<f4"), np.dtype("<i4"), np.dtype("<u4"), np.dtype("<i8")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldTypes:
    """How a file without a header holds its numbers; made by `raw_types` or `raw_async_types`.

    Attributes:
        label: float32, or int32, of which float32 is made.
        dense: float32, or an integer x, of which float32 ln(x + 1) is made.
        keys: int32, uint32 or int64.
        keys_per_slot: of every record.
        adds_offsets: whether a reader adds to every key the sizes of the slots before.
    """

    label: np.dtype[Any]
    dense: np.dtype[Any]
    keys: np.dtype[Any]
    keys_per_slot: tuple[int, ...]
    adds_offsets: bool


def raw_types(layout: RecordLayout, *, float_label_dense: bool) -> FieldTypes:
    """The types of Raw files.

    Raises:
        ConfigError: 8-byte keys.
    """
    return _one_hot_types(layout, "Raw", is_float=float_label_dense, adds_offsets=True)


def raw_async_types(layout: RecordLayout, *, is_dense_float: bool, multi_hot: bool) -> FieldTypes:
    """The types of RawAsync files.

    Raises:
        ConfigError: a slot whose number of keys varies; and for the one-hot form what `raw_types` refuses.
    """
    if not multi_hot:
        return _one_hot_types(layout, "RawAsync without multi_hot", is_float=is_dense_float, adds_offsets=False)
    _check_fixed(layout, "RawAsync")
    return FieldTypes(
        label=INT32,
        dense=FLOAT if is_dense_float else UINT32,
        keys=UINT32 if layout.key_bytes == 4 else INT64,
        keys_per_slot=layout.most_keys,
        adds_offsets=False,
    )


def _check_fixed(layout: RecordLayout, kind: str) -> None:
    for sparse in layout.inputs:
        if not sparse.is_fixed_length and sparse.nnz_per_slot != (1,) * sparse.slot_num:
            raise ConfigError(
                f"{kind}: input {sparse.name!r} has up to {max(sparse.nnz_per_slot)} keys a slot, "
                "expected is_fixed_length: the records have one size"
            )


def _one_hot_types(layout: RecordLayout, kind: str, *, is_float: bool, adds_offsets: bool) -> FieldTypes:
    if layout.key_bytes != 4:
        raise ConfigError(f"{kind}: got {layout.key_bytes}-byte keys, expected 4-byte keys")
    number = FLOAT if is_float else INT32
    ones = (1,) * layout.num_slots
    return FieldTypes(label=number, dense=number, keys=INT32, keys_per_slot=ones, adds_offsets=adds_offsets)


def record_bytes(layout: RecordLayout, types: FieldTypes) -> int:
    """Bytes of a record."""
    return 4 * (layout.label_dim + layout.dense_dim) + types.keys.itemsize * sum(types.keys_per_slot)
