# SPDX-License-Identifier: Apache-2.0
"""`DataReaderParams` as readers of records."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from terarec.batch import Batch
from terarec.data import RankShare
from terarec.data.batch_stream import BatchStream
from terarec.data.feed import StreamOptions
from terarec.data.records import NormSource, ParquetSource, RawAsyncSource, RawSource
from terarec.data.records.reader import RecordDecoder, record_feed
from terarec.data.records.sources import RecordSource
from terarec.hugectr.data import file_url
from terarec.hugectr.enums import Check_t, DataReaderType_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.objects import AsyncParam, DataReaderParams, Input, Solver, SolverConfig
from terarec.hugectr.release import release_number
from terarec.spec import RecordLayout, SparseInput
from terarec.spec.dataset import RecordKind

OpenSource = Callable[[str], RecordSource]

KIND_OF_READER: Mapping[DataReaderType_t, RecordKind] = {
    DataReaderType_t.Norm: "norm",
    DataReaderType_t.Parquet: "parquet",
    DataReaderType_t.Raw: "raw",
    DataReaderType_t.RawAsync: "raw_async",
}
"""Formats of HugeCTR as ``records.json`` names them."""


class DataReader(BatchStream):
    """One of the two readers of a model, which `Model.get_data_reader_train` and ``..._eval`` return.

    It continues where it stopped: only `set_source` starts over. It has no batch before.

    Args:
        open_source: Function that opens the data of a name.
        name: Name of the first data.
        batch_size: Samples in a batch.
        repeat: Whether the data starts over at its end.
        drop_last: Whether a short last batch is left out.
        threads: Threads that read.
        shuffle_seed: Seed of the order of the groups of records; None keeps that of the files.
        share: The rank whose samples are read alone; None for whole batches.
    """

    def __init__(
        self,
        open_source: OpenSource,
        name: str,
        *,
        batch_size: int,
        repeat: bool,
        drop_last: bool,
        threads: int,
        shuffle_seed: int | None = None,
        share: RankShare | None = None,
    ) -> None:
        self.name = name
        self._open = open_source
        self._decoder = RecordDecoder()
        self._batches: Iterator[Batch] | None = None
        self._is_started = self._is_eof = False
        options = StreamOptions(
            batch_size=batch_size,
            shuffle=shuffle_seed is not None,
            seed=shuffle_seed or 0,
            drop_last=drop_last,
            repeat=repeat,
            # Scripts ask for the workers of a server with many GPUs; more threads than cores only cost memory.
            threads=min(threads, os.cpu_count() or 1),
            prefetch=0,
        )
        super().__init__(None, options)
        self.take_share(share)

    def set_source(self, file_name: str = "") -> None:
        """Read `file_name` from its start, or the current data if no name is given.

        Raises:
            FileCannotOpenError: No such data.
            BrokenFileError: Data that does not hold what it should.
            WrongInputError: Data that repeats, of which every batch is left out.
        """
        with as_hugectr_errors("set_source"):
            source = self._open(file_name or self.name)
            rows = sum(source.group_rows)
            if self.repeat and self._options.drop_last and rows < self.batch_size:
                raise WrongInputError(
                    "set_source",
                    f"{file_name or self.name} holds {rows:,} samples, fewer than a batch of {self.batch_size:,}, and "
                    "drop_incomplete_batch=True leaves them out, expected smaller ones, or drop_incomplete_batch=False",
                )
            # HugeCTR's reader keeps the order inside a block, too.
            self.replace_feed(record_feed(source, self._decoder, shuffles_rows=False))
        self.name = file_name or self.name
        self._is_started, self._is_eof = True, False

    def set_file_list_source(self, file_list: str = "") -> None:
        """Call `set_source`, under its name in release 2.3."""
        self.set_source(file_list)

    def open_source(self) -> RecordSource:
        """Open the data once more, independently of the current iteration.

        Raises:
            FileCannotOpenError: No such data.
            BrokenFileError: Data that does not hold what it should.
        """
        with as_hugectr_errors("open_source"):
            return self._open(self.name)

    def is_started(self) -> bool:
        """Return whether there is data to read."""
        return self._is_started

    def is_eof(self) -> bool:
        """Return whether the end of the data was reached."""
        return self._is_eof

    def next_batch(self) -> Batch | None:
        """Return the next batch; None from the end of the data on, until `set_source` starts over.

        Raises:
            BrokenFileError: A file is damaged. The next call starts over.
        """
        # At the end it stays: HugeCTR's loops call once more and see the same answer.
        if not self._is_started or self._is_eof:
            return None
        if self._batches is None:
            self._batches = super().__iter__()
        with as_hugectr_errors("read"):
            try:
                batch = next(self._batches, None)
            # A generator that raised has ended; the next call has to begin with a new one.
            except BaseException:
                self._batches = None
                raise
        self._is_eof = batch is None
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the remaining batches, infinitely if the data repeats."""
        while (batch := self.next_batch()) is not None:
            yield batch

    @property
    def has_no_batch(self) -> bool:
        """Whether the data is too little for a batch."""
        return super().__len__() == 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch, at least 1."""
        return max(1, super().__len__())  # HugeCTR trains epochs without a batch, too

    @override
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        self._is_eof = False

    @override
    def close(self) -> None:
        # Every new position ends it, so that the next batch begins another one.
        super().close()
        self._batches = None


def params_of_input(inputs: Input) -> DataReaderParams:
    """Return the `DataReaderParams` among the parameters of an `Input` of release 3.0.

    Raises:
        WrongInputError: An `Input` of another release.
    """
    values, known = inputs.values(), DataReaderParams.names()
    # Only the form of release 3.0 has the location of the data in the `Input`.
    if "data_reader_type" not in values:
        raise WrongInputError("add", "got an Input without data_reader_type, expected DataReaderParams in Model(...)")
    return DataReaderParams(**{name: value for name, value in values.items() if name in known})


def record_layout(solver: Solver, reader: DataReaderParams, inputs: Input, *, adds_offsets: bool) -> RecordLayout:
    """Return the layout of a sample in the files.

    Args:
        solver: The `CreateSolver` object.
        reader: The `DataReaderParams`.
        inputs: The `Input`.
        adds_offsets: Whether the sizes of the slots before are added to keys, where the format needs that.
    """
    sizes = tuple(reader.slot_size_array) if adds_offsets else ()
    slots = sum(int(part.slot_num) for part in inputs.data_reader_sparse_param_array)
    if len(sizes) not in (0, slots):
        raise WrongInputError(
            "slot_size_array", f"got {len(sizes)} sizes for {slots} slots, expected one for each slot, or none"
        )
    return RecordLayout(
        label_dim=sum(inputs.label_dims),
        dense_dim=inputs.dense_dim,
        inputs=tuple(
            SparseInput(
                name=slots.top_name, nnz_per_slot=tuple(slots.nnz_per_slot), is_fixed_length=slots.is_fixed_length
            )
            for slots in inputs.data_reader_sparse_param_array
        ),
        key_bytes=8 if solver.i64_input_key else 4,
        slot_sizes=sizes,
    )


def async_layout_of(params: AsyncParam, release: tuple[int, int], *, is_one_hot: bool) -> tuple[bool, bool]:
    """Return whether RawAsync files are multi-hot, and whether their dense values are floats.

    Args:
        params: Options of the reader; unset ones are those of the release.
        release: Release whose defaults to take.
        is_one_hot: Whether the model has embeddings of one key a slot, which only the reader of one key serves.
    """
    # 23.04 made multi-hot files of floats its default; unset options follow the release of the script.
    is_new = release >= (23, 4)
    multi_hot = is_new and not is_one_hot if params.multi_hot_reader is None else params.multi_hot_reader
    is_float = is_new and multi_hot if params.is_dense_float is None else params.is_dense_float
    return multi_hot, is_float


def shuffle_seed(solver: Solver, reader: DataReaderParams) -> int | None:
    """Return the seed of the order of training data, or None for the order of the files."""
    if reader.data_reader_type is not DataReaderType_t.RawAsync or not reader.async_param.shuffle:
        return None
    return solver.seed or secrets.randbits(62) + 1


def drops_short_batches(solver: Solver, reader: DataReaderParams) -> tuple[bool, bool]:
    """Return whether short last batches are left out in training, and whether in evaluation, by the release."""
    # These repeat as one stream, which has no last batch.
    if solver.repeat_dataset and reader.data_reader_type in (DataReaderType_t.Norm, DataReaderType_t.Parquet):
        return False, False
    release = release_number(solver.compat_release)
    # `Model` of 2.3 and 3.0 trains on them, `Session` of 3.0, whose solver has a class of its own, does not.
    if release < (3, 1) and not (isinstance(solver, SolverConfig) and release == (3, 0)):
        return False, False
    # 3.8 made the flag of its own out of `is_dlrm`.
    drops = solver.drop_incomplete_batch and not (solver.is_dlrm and release >= (3, 3))
    return drops, drops and (3, 1) <= release < (4, 3)


def check_sample_counts(reader: DataReaderParams) -> None:
    """Check that files which do not hold the number of their samples come with it."""
    if reader.data_reader_type in (DataReaderType_t.Raw, DataReaderType_t.RawAsync):
        for field, count in (("num_samples", reader.num_samples), ("eval_num_samples", reader.eval_num_samples)):
            if not count:
                kind = reader.data_reader_type.name
                problem = f"got 0, expected the number of samples, which a {kind} file does not hold"
                raise WrongInputError(f"DataReaderParams: {field}", problem, field=field)


def source_opener(
    reader: DataReaderParams, layout: RecordLayout, *, num_samples: int, async_layout: tuple[bool, bool]
) -> OpenSource:
    """Return a function that opens data in the format of `reader`, with `async_layout_of` for that of RawAsync."""
    kind, url = reader.data_reader_type, partial(file_url, reader.data_source_params)
    if kind is DataReaderType_t.Norm:
        return lambda name: NormSource(url(name), layout, checksum=reader.check_type is Check_t.Sum)
    if kind is DataReaderType_t.Parquet:
        return lambda name: ParquetSource(url(name), layout)
    if kind is DataReaderType_t.Raw:
        is_float = reader.float_label_dense
        return lambda name: RawSource(url(name), layout, num_samples=num_samples, float_label_dense=is_float)
    multi_hot, is_float = async_layout
    return lambda name: RawAsyncSource(
        url(name), layout, num_samples=num_samples, is_dense_float=is_float, multi_hot=multi_hot
    )


def started(reader: DataReader, call: str) -> DataReader:
    """Return a reader that was started.

    Raises:
        IllegalCallError: It was not; names the `call` that needs it.
    """
    if not reader.is_started():
        raise IllegalCallError(call, "the data reader was not started, expected start_data_reading() before")
    return reader


def sources_by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of either form of `Model.set_source` by name, ``source`` and ``keyset`` as lists."""
    # HugeCTR overloads the method: with three arguments the second is the keyset.
    names = ("source", "keyset", "eval_source") if len(args) + len(kwargs) == 3 else ("source", "eval_source")
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(values) != set(names):
        raise WrongInputError(
            "set_source", f"got {', '.join(values)}, expected source and eval_source, or source, keyset and eval_source"
        )
    return {
        name: [value] if name != "eval_source" and isinstance(value, str) else value for name, value in values.items()
    }
