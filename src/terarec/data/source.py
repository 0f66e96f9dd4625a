"""Where samples come from: random access to row groups, across the shards of a split or over arrays in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats import (
    METADATA_TYPES,
    ColumnBlock,
    Keys,
    check_rows,
    default_group_rows,
    open_shard,
    read_dataset,
    slice_rows,
)
from terarec.spec import DatasetSpec


class Source(Protocol):
    """Samples in row groups.

    Attributes:
        spec: the columns.
        group_rows: samples in each row group, in input order.
    """

    spec: DatasetSpec
    group_rows: tuple[int, ...]

    def read(self, group: int) -> ColumnBlock:
        """The rows of row group `group`; safe to call from several threads."""
        ...


class DatasetSource:
    """A split of a data set on disk.

    Args:
        directory: holds ``dataset.json``.
        split: for example "train".

    Raises:
        DataNotFoundError: no such directory, no ``dataset.json`` in it, or a shard is missing.
        ConfigError: no such split.
        FormatError: a file does not hold what ``dataset.json`` promises.
    """

    def __init__(self, directory: Path, split: str) -> None:
        self.spec = read_dataset(directory)
        entries = self.spec.shards(split)
        self._shards = [open_shard(self.spec, directory / entry.file, entry.rows) for entry in entries]
        self._first_group = list(accumulate((len(shard.group_rows) for shard in self._shards), initial=0))
        self.group_rows = tuple(rows for shard in self._shards for rows in shard.group_rows)

    def read(self, group: int) -> ColumnBlock:
        """The rows of row group `group`, counted over all shards."""
        shard = bisect_right(self._first_group, group) - 1
        return self._shards[shard].read_group(group - self._first_group[shard])


class InMemorySource:
    """Samples that a program made itself.

    Args:
        spec: the columns; its splits are not looked at.
        label: float32[n, L].
        dense: float32[n, F].
        keys: per categorical column integers[n], or (values, offsets int64[n + 1]) where hotness > 1.
        weight: numbers[n] >= 0, where `spec` has a weight column.
        metadata: name -> n values (an Arrow or NumPy array, or a list) for each metadata column of `spec`.

    Raises:
        FormatError: a wrong shape, a key outside its column's rows, or a weight that is negative or not finite.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        label: NDArray[Any],
        dense: NDArray[Any],
        keys: Sequence[Keys],
        *,
        weight: NDArray[Any] | None = None,
        metadata: Mapping[str, pa.Array | NDArray[Any] | Sequence[object]] | None = None,
    ) -> None:
        where = f"data set {spec.name!r} in memory"
        arrays = _metadata(spec, metadata or {}, where)
        num_rows = check_rows(spec, label, dense, keys, where, weight=weight, metadata=arrays)
        self.spec = spec
        self._step = default_group_rows(spec)
        self._block = ColumnBlock(
            label=label.astype(np.float32, copy=False),
            dense=dense.astype(np.float32, copy=False),
            keys=tuple(keys),
            weight=None if weight is None else weight.astype(np.float32, copy=False),
            metadata=arrays,
        )
        self.group_rows = tuple(min(self._step, num_rows - start) for start in range(0, num_rows, self._step))

    def read(self, group: int) -> ColumnBlock:
        """The rows of row group `group`, as views."""
        start = group * self._step
        return slice_rows(self._block, start, start + self.group_rows[group])


def _metadata(spec: DatasetSpec, given: Mapping[str, Any], where: str) -> tuple[pa.Array, ...]:
    names = [column.name for column in spec.metadata]
    if set(given) != set(names):
        raise FormatError(f"{where}: got the metadata {sorted(given)}, expected {sorted(names)}")
    arrays = []
    for column in spec.metadata:
        values = given[column.name]
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            arrays.append(array.cast(METADATA_TYPES[column.type]))
        except (pa.ArrowException, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise FormatError(f"{where}, column {column.name!r}: {reason}, expected {column.type} values") from None
    return tuple(arrays)
