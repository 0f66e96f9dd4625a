"""One way to write files of records, whatever their format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from terarec.formats.block import Keys
from terarec.formats.hugectr.field_types import raw_async_types, raw_types
from terarec.formats.hugectr.fixed_record_writer import FixedRecordWriter
from terarec.formats.hugectr.norm_writer import NormWriter
from terarec.formats.parquet import ParquetShardWriter
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RecordLayout, RecordsSpec


class RecordWriter(Protocol):
    """Writes one file of samples, which appears when it is closed."""

    def write(self, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys]) -> None:
        """Append samples: ``label[n, L]``, ``dense[n, F]``, and the keys of each slot."""
        ...

    def close(self) -> object:
        """Finish the file."""
        ...

    def abort(self) -> None:
        """Give the file up."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def create_writer(path: Path, spec: RecordsSpec) -> RecordWriter:
    """A writer of one file of `spec`'s kind, layout and names. Keys go into the file as they are.

    Raises:
        ConfigError: a layout that the format cannot have.
    """
    layout, is_float = spec.layout, spec.float_label_dense
    if spec.kind == "norm":
        return NormWriter(path, layout, checksum=spec.checksum)
    if spec.kind == "parquet":
        return ParquetShardWriter(path, _columns(spec))
    if spec.kind == "raw":
        return FixedRecordWriter(path, layout, raw_types(layout, float_label_dense=is_float))
    types = raw_async_types(layout, is_dense_float=is_float, multi_hot=True)
    return FixedRecordWriter(path, layout, types)


def final_keys(keys: Sequence[Keys], layout: RecordLayout, *, sign: int = 1) -> tuple[Keys, ...]:
    """Keys that start at 0 in each slot, with the slots' offsets added; with `sign` -1 the way back."""
    moved: list[Keys] = []
    for column, offset in zip(keys, layout.key_offsets, strict=True):
        values, offsets = column if isinstance(column, tuple) else (column, None)
        shifted = values.astype(np.int64) + sign * offset
        moved.append(shifted if offsets is None else (shifted, offsets))
    return tuple(moved)


def _columns(spec: RecordsSpec) -> DatasetSpec:
    """The columns of a Parquet file; any int64 keys for 8-byte keys, which makes them int64 in the file."""
    layout = spec.layout
    sizes = layout.slot_sizes[: layout.num_slots] if layout.key_bytes == 4 else (None,) * layout.num_slots
    return DatasetSpec(
        name="records",
        storage="parquet",
        labels=tuple(LabelColumn(name=name) for name in spec.label_names),
        dense=tuple(DenseColumn(name=name) for name in spec.dense_names),
        categorical=tuple(
            CategoricalColumn(name=name, rows=size, hotness=most)
            for name, size, most in zip(spec.key_names, sizes, layout.most_keys, strict=True)
        ),
    )
