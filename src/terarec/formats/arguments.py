"""Checks of what a caller hands to a shard writer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from terarec.errors import FormatError
from terarec.formats.block import Keys, check_keys
from terarec.formats.sample_columns import check_sample_columns
from terarec.spec import DatasetSpec


def check_rows(
    spec: DatasetSpec,
    label: object,
    dense: object,
    keys: Sequence[Keys],
    where: str,
    *,
    weight: object = None,
    metadata: Sequence[pa.Array] = (),
) -> int:
    """Number of rows n in ``label[n, L]``, ``dense[n, F]`` and `keys`, one entry per categorical column.

    `weight` and `metadata` are as in `ColumnBlock`.

    Raises:
        FormatError: a wrong shape, number of columns, kind of column, key or weight; the message starts with `where`.
    """
    if not isinstance(label, np.ndarray) or label.ndim != 2:
        raise FormatError(f"{where}: got label {_shape(label)}, expected an array [n, {len(spec.labels)}]")
    num_rows = int(label.shape[0])
    for name, array, columns in (("label", label, spec.labels), ("dense", dense, spec.dense)):
        if not isinstance(array, np.ndarray) or array.shape != (num_rows, len(columns)):
            raise FormatError(f"{where}: got {name} {_shape(array)}, expected [{num_rows}, {len(columns)}]")
    if len(keys) != len(spec.categorical):
        raise FormatError(f"{where}: got keys of {len(keys)} columns, expected {len(spec.categorical)}")
    for column, column_keys in zip(spec.categorical, keys, strict=True):
        listed = isinstance(column_keys, tuple)
        if listed != (column.hotness > 1):
            expected = "(values, offsets)" if column.hotness > 1 else "one key per row"
            raise FormatError(f"{where}, column {column.name!r}: hotness is {column.hotness}, expected {expected}")
        _check_column_shape(column_keys, num_rows, f"{where}, column {column.name!r}")
        check_keys(column, column_keys, where)
    check_sample_columns(spec, num_rows, weight, metadata, where)
    return num_rows


def _check_column_shape(keys: Keys, num_rows: int, where: str) -> None:
    values, offsets = keys if isinstance(keys, tuple) else (keys, None)
    if not np.issubdtype(values.dtype, np.integer) or values.ndim != 1:
        raise FormatError(f"{where}: got {values.dtype}{_shape(values)} keys, expected integers[n]")
    if offsets is None:
        if values.shape != (num_rows,):
            raise FormatError(f"{where}: got {len(values)} keys for {num_rows} rows")
    elif offsets.shape != (num_rows + 1,) or offsets[0] != 0 or offsets[-1] != len(values):
        raise FormatError(f"{where}: got offsets {_shape(offsets)}, expected [{num_rows + 1}] from 0 to {len(values)}")


def _shape(array: object) -> str:
    return str(list(array.shape)) if isinstance(array, np.ndarray) else type(array).__name__
