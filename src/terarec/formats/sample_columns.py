"""Columns of a data set that no model reads: sample weights, and metadata as Arrow arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.spec import DatasetSpec, MetadataColumn

METADATA_TYPES: Mapping[str, pa.DataType] = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.large_string()}
"""Type of a metadata column -> the Arrow type of its values in memory."""


def check_weights(name: str, weight: NDArray[np.floating], where: str) -> None:
    """Raise `FormatError` unless the weights ``weight[n]`` of column `name` are finite float32 numbers >= 0.

    Args:
        name: of the column.
        weight: the weights.
        where: start of the message, for example ``"train/part-00000.parquet: row group 3"``.
    """
    with np.errstate(over="ignore"):
        stored = weight.astype(np.float32, copy=False)
    good = (weight >= 0) & (stored < np.inf)
    if not good.all():
        row = int(np.argmin(good))
        raise FormatError(
            f"{where}, column {name!r}: row {row} has the weight {weight[row]}, expected a finite float32 number >= 0"
        )


def check_sample_columns(
    spec: DatasetSpec, num_rows: int, weight: object, metadata: Sequence[pa.Array], where: str
) -> None:
    """Raise `FormatError` unless `weight` and `metadata` are the columns of `spec` for `num_rows` rows.

    Args:
        spec: the data set.
        num_rows: number of rows n.
        weight: floats[n], or None where the data set has no weights.
        metadata: an array of n values for each metadata column.
        where: start of the message.
    """
    if spec.weight is None or weight is None:
        if spec.weight is not None:
            raise FormatError(f"{where}, column {spec.weight!r}: got no weights, expected {num_rows}")
        if weight is not None:
            raise FormatError(f"{where}: got weights, expected none for a data set without a weight column")
    else:
        if not isinstance(weight, np.ndarray) or weight.shape != (num_rows,) or weight.dtype.kind not in "fiu":
            got = f"{weight.dtype}{list(weight.shape)}" if isinstance(weight, np.ndarray) else type(weight).__name__
            raise FormatError(f"{where}, column {spec.weight!r}: got weights {got}, expected numbers[{num_rows}]")
        check_weights(spec.weight, weight, where)
    if len(metadata) != len(spec.metadata):
        raise FormatError(f"{where}: got {len(metadata)} metadata columns, expected {len(spec.metadata)}")
    for column, array in zip(spec.metadata, metadata, strict=True):
        if len(array) != num_rows or array.type != METADATA_TYPES[column.type]:
            expected = f"{num_rows} values of {METADATA_TYPES[column.type]}"
            raise FormatError(
                f"{where}, column {column.name!r}: got {len(array)} values of {array.type}, expected {expected}"
            )


def metadata_array(values: pa.Array | pa.ChunkedArray, column: MetadataColumn, where: str) -> pa.Array:
    """The values of a metadata column in one array of its type in memory.

    Raises:
        FormatError: text that is not UTF-8, or values of another type; the message starts with `where`.
    """
    try:
        array = values.cast(METADATA_TYPES[column.type])
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()  # which copies even one chunk
        if column.type == "string":
            array.validate(full=True)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{where}, column {column.name!r}: {reason}, expected {column.type} values") from None
    return array
