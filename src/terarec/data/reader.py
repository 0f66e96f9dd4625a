# SPDX-License-Identifier: Apache-2.0
"""Reader of a data set: its samples in row groups, and batches with a position that can be saved after any of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.batch import Batch
from terarec.data.batch_stream import BatchStream
from terarec.data.decode import to_batch
from terarec.data.feed import Feed, StreamOptions
from terarec.data.keysets import PartKeysets
from terarec.data.sampling import RankShare
from terarec.errors import ConfigError, FormatError
from terarec.formats import read_dataset
from terarec.formats.block import METADATA_TYPES, ColumnBlock, Keys, check_rows, default_group_rows, slice_rows
from terarec.formats.frames import Frame, as_table, is_frame
from terarec.formats.parquet import cast_table, decode_table
from terarec.formats.parts import PARTS_FILE, PartSpec, read_parts
from terarec.formats.shard import open_shard
from terarec.ragged import Ragged
from terarec.spec import DatasetSpec


class BatchReader(Protocol):
    """Batches of a split, epoch by epoch or as an endless stream, from any position that was saved.

    `terarec.data.Reader` and `terarec.data.records.RecordReader` are such readers; `terarec.data.open_reader` opens the
    right one.

    Attributes:
        repeat: Whether one iteration continues without end, from each epoch to the next. Then every batch is full, and
            may hold the end of one epoch and the beginning of the next.
    """

    repeat: bool

    @property
    def share(self) -> RankShare | None:
        """The rank whose samples are read alone; None for whole batches."""
        ...

    @property
    def batch_rows(self) -> int:
        """Samples of the last batch that was yielded, those of all ranks."""
        ...

    def take_share(self, share: RankShare | None) -> None:
        """Read the samples of one rank alone, of several that share every batch; the running iteration ends.

        The ranks' samples together are the batches of one process, each sample on one rank; a rank may have none of a
        batch. Only the row groups that hold its samples are decoded. The saved position is that of whole batches, so
        that any number of ranks continues there.

        Args:
            share: The rank; None for whole batches.
        """
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the current epoch, or from it on without an end if the reader repeats.

        After `load_state_dict`, the iteration continues after the batch at which the state was saved. Otherwise it
        starts with the first batch of the current epoch, which is the next one once an epoch is exhausted.
        """
        ...

    def __len__(self) -> int:
        """Return the number of batches in an epoch, before records with a wrong checksum are left out.

        An epoch of damaged files has fewer: no batch has less than `batch_size` samples but the last.
        """
        ...

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position after the last yielded batch, and the options that it depends on, as JSON data."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the next ``iter()`` with the batch after the one at which `state` was saved.

        The numbers of threads and of prefetched batches may differ.

        Raises:
            ConfigError: The state is not a state, or one of other data or other options.
        """
        ...

    def close(self) -> None:
        """Stop the running iteration and its threads."""
        ...


class SampleSource(Protocol):
    """Samples in row groups.

    Attributes:
        spec: The columns.
        group_rows: Samples in each row group, in input order.
        parts: Consecutive groups that are read one part after the other: shuffling mixes samples of one part, and no
            batch holds samples of two. Empty for a source without parts.
        keysets: The keys of each part; None for a source without parts or without their keysets.
    """

    spec: DatasetSpec
    group_rows: tuple[int, ...]
    parts: tuple[PartSpec, ...]
    keysets: PartKeysets | None

    def read(self, group: int) -> ColumnBlock:
        """Return the rows of row group `group`; safe to call from several threads."""
        ...


class DatasetSource(SampleSource):
    """Split of a data set on disk.

    Args:
        directory: Directory with ``dataset.json``.
        split: Name of the split, for example "train".
        by_parts: Whether to read it part by part, see `SampleSource`. Where parts have keysets, all keys that are read
            must be in that of their part.

    Raises:
        DataNotFoundError: No such directory, no ``dataset.json`` in it, no parts, or a shard is missing.
        ConfigError: No such split.
        FormatError: A file does not hold what ``dataset.json`` or the description of the parts promises.
    """

    def __init__(self, directory: Path, split: str, *, by_parts: bool = False) -> None:
        self.spec = read_dataset(directory)
        entries = self.spec.shards(split)
        self._shards = [open_shard(self.spec, directory / entry.file, entry.rows) for entry in entries]
        self._first_group = list(accumulate((len(shard.group_rows) for shard in self._shards), initial=0))
        self.group_rows = tuple(rows for shard in self._shards for rows in shard.group_rows)
        self.parts = read_parts(directory, split) if by_parts else ()
        got = (sum(part.groups for part in self.parts), sum(part.rows for part in self.parts))
        expected = (len(self.group_rows), sum(self.group_rows))
        # Parts that were written for other shards would name the wrong groups.
        if by_parts and got != expected:
            raise FormatError(
                directory / split / PARTS_FILE,
                f"parts of {got[0]} row groups with {got[1]} rows, expected "
                f"{expected[0]} with {expected[1]} as in the shards",
            )
        # Where a key is missing in a keyset, the error names its row in the split.
        self._first_row = list(accumulate(self.group_rows, initial=0))
        self._part_ends = list(accumulate(part.groups for part in self.parts))
        has_keysets = by_parts and all(part.keyset is not None for part in self.parts)
        self.keysets = PartKeysets(directory, split, self.parts) if has_keysets else None

    @override
    def read(self, group: int) -> ColumnBlock:
        """Return the rows of row group `group`, counted over all shards."""
        shard = bisect_right(self._first_group, group) - 1
        block = self._shards[shard].read_group(group - self._first_group[shard])
        if self.keysets is not None:
            names = [column.name for column in self.spec.categorical]
            self.keysets.check(bisect_right(self._part_ends, group), names, block, self._first_row[group])
        return block


_TABLE = "the table"


class InMemorySource(SampleSource):
    """Samples in the memory of a program.

    Args:
        spec: The columns; its splits are ignored.
        label: float32[n, L].
        dense: float32[n, F].
        keys: Keys of each categorical column: integers[n], or n lists of them where hotness > 1.
        weight: numbers[n] >= 0, where `spec` has a weight column.
        metadata: Name -> n values (an Arrow or NumPy array, or a list) for each metadata column of `spec`.

    Raises:
        FormatError: A wrong shape, a key outside its column's rows, or a weight that is negative or not finite.
    """

    parts: tuple[PartSpec, ...] = ()
    keysets: PartKeysets | None = None

    def __init__(
        self,
        spec: DatasetSpec,
        label: NDArray[np.generic],
        dense: NDArray[np.generic],
        keys: Sequence[Keys],
        *,
        weight: NDArray[np.generic] | None = None,
        metadata: Mapping[str, pa.Array | NDArray[np.generic] | Sequence[object]] | None = None,
    ) -> None:
        where = f"data set {spec.name!r} in memory"
        arrays = _metadata(spec, metadata or {}, where)
        num_rows = check_rows(spec, label, dense, keys, where, weight=weight, metadata=arrays)
        self.spec = spec
        # The row groups that a shard of these columns would have, so that both are shuffled alike.
        self._step = default_group_rows(spec)
        self._block = ColumnBlock(
            label=label.astype(np.float32, copy=False),
            dense=dense.astype(np.float32, copy=False),
            keys=tuple(keys),
            weight=None if weight is None else weight.astype(np.float32, copy=False),
            metadata=arrays,
        )
        self.group_rows = tuple(min(self._step, num_rows - start) for start in range(0, num_rows, self._step))

    @classmethod
    def of_table(cls, spec: DatasetSpec, table: Frame) -> InMemorySource:
        """Return the samples of a table in memory: of pandas, Polars, Arrow, or another library with Arrow's interface.

        Args:
            spec: Its columns, by name, as the shards of a data set have them; other columns are not read.
            table: Numbers for labels, dense columns and the weight; integers, or lists of them, for keys.

        Raises:
            ConfigError: Data that is no table of Arrow.
            FormatError: A missing column or value, or one of another type.
        """
        rows = cast_table(as_table(table, "dataset"), spec, _TABLE)
        block = decode_table(rows, spec, _TABLE)
        metadata = {column.name: array for column, array in zip(spec.metadata, block.metadata, strict=True)}
        return cls(spec, block.label, block.dense, block.keys, weight=block.weight, metadata=metadata)

    @override
    def read(self, group: int) -> ColumnBlock:
        start = group * self._step
        return slice_rows(self._block, start, start + self.group_rows[group])


def _metadata(spec: DatasetSpec, metadata: Mapping[str, Any], where: str) -> tuple[pa.Array, ...]:
    names = [column.name for column in spec.metadata]
    if set(metadata) != set(names):
        raise FormatError(where, f"got the metadata {sorted(metadata)}, expected {sorted(names)}")
    arrays = []
    for column in spec.metadata:
        values = metadata[column.name]
        try:
            # A cast and no check of types alone: int32 for a column of int64 is not a mistake.
            array = values if isinstance(values, pa.Array) else pa.array(values)
            arrays.append(array.cast(METADATA_TYPES[column.type]))
        except (pa.ArrowException, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise FormatError(f"{where}, column {column.name!r}", f"{reason}, expected {column.type} values") from None
    return tuple(arrays)


class Reader(BatchStream):
    """Batches of a split, one epoch per ``iter()``, or an endless stream: a `BatchReader`.

    The order depends on `seed`, the epoch and `shuffle` alone, never on `threads` or `prefetch`. An epoch that was left
    early (``break``, an error) starts over at the next ``iter()``; to continue instead, load the saved state. One
    iteration at a time: a new one ends the previous one.

    Memory: about ``threads + 3`` windows of decoded rows (a row group each, four when shuffling; 10 MB a group
    for Criteo) and `prefetch` batches.

    Args:
        dataset: Directory of a prepared data set, or a `SampleSource` such as `InMemorySource`.
        split: Name of the split.
        batch_size: Samples B in a batch; may exceed a row group.
        shuffle: Whether to shuffle, in a new order every epoch; otherwise samples come in input order.
        seed: Shuffle seed.
        drop_last: Whether a last batch of fewer samples is left out.
        repeat: Whether each epoch follows the previous one without an end. Then every batch is full.
        threads: Threads that read and decompress ahead; one more puts batches together.
        prefetch: Batches ready ahead; 0 puts them together in the caller's thread.

    Raises:
        DataNotFoundError: No such directory, no ``dataset.json`` in it, or a shard is missing.
        FormatError: A file does not hold what ``dataset.json`` promises; also while iterating. Or there are no samples
            to repeat.
        ConfigError: No such split, or an argument out of range.

    Example:
        >>> reader = Reader(Path("criteo"), batch_size=8192, shuffle=True)
        >>> for batch in reader:
        ...     loss = train_step(batch)
    """

    def __init__(
        self,
        dataset: str | Path | SampleSource,
        split: str = "train",
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        repeat: bool = False,
        threads: int = 1,
        prefetch: int = 2,
    ) -> None:
        options = StreamOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            repeat=repeat,
            threads=threads,
            prefetch=prefetch,
        )
        if is_frame(dataset, "dataset"):
            raise ConfigError(
                "dataset",
                f"got a {type(dataset).__name__}, whose columns have no roles, expected a directory or "
                "terarec.data.InMemorySource.of_table(spec, table)",
            )
        source: SampleSource = DatasetSource(Path(dataset), split) if isinstance(dataset, str | Path) else dataset
        self.spec: DatasetSpec = source.spec
        self.parts, self.keysets = source.parts, source.keysets
        names = [column.name for column in self.spec.categorical]
        metadata = [column.name for column in self.spec.metadata]
        feed = Feed(
            group_rows=source.group_rows,
            read=partial(_read, source),
            # Functions without `self`: the stream must not keep this reader alive, whose end stops its threads.
            to_batch=partial(to_batch, names, metadata=metadata),
            parts=[part.groups for part in self.parts] or None,
            empty=_no_rows(self.spec),
        )
        super().__init__(feed, options)

    def __repr__(self) -> str:
        samples = f"{self.num_rows:,} samples in {len(self):,} batches of {self.batch_size:,}"
        return f"Reader({self.spec.name!r}, {samples})"

    def part_after(self, state: Mapping[str, object]) -> int:
        """Return the number of the part that holds the batch after the position `state`, of this epoch or the next."""
        rows, ends = [part.rows for part in self.parts], list(accumulate(part.rows for part in self.parts))
        least = self.batch_size if self._options.drop_last else 1
        for start in (int(state["rows_read"]), 0):  # type: ignore[call-overload]
            for number, end in enumerate(ends):
                if min(rows[number], end - start) >= least:
                    return number
        return 0


def _no_rows(spec: DatasetSpec) -> ColumnBlock:
    """Return the columns of a data set without rows."""
    nothing = np.empty(0, dtype=np.int64)
    return ColumnBlock(
        label=np.empty((0, len(spec.labels)), dtype=np.float32),
        dense=np.empty((0, len(spec.dense)), dtype=np.float32),
        keys=tuple(
            Ragged(nothing, np.zeros(1, dtype=np.int64)) if column.hotness > 1 else nothing
            for column in spec.categorical
        ),
        weight=None if spec.weight is None else np.empty(0, dtype=np.float32),
        metadata=tuple(pa.array([], METADATA_TYPES[column.type]) for column in spec.metadata),
    )


def _read(source: SampleSource, group: int) -> tuple[ColumnBlock, int]:
    """Return the rows of a group; none are ever left out."""
    return source.read(group), 0
