"""DataReaderParams and AsyncParam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import Alignment_t, Check_t, DataReaderType_t
from terarec.hugectr.tables.data_source import DataSourceParams
from terarec.hugectr.tables.kinds import TEXT, TRUTH, instance, listed, member, one_or_list, optional, whole
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Status, Table

_IO = "it only tunes how an asynchronous reader asks a disk for the same bytes"

# HugeCTR has no defaults for these two, but its documentation leaves them out.
_THREADS = tuple(
    Parameter(name=name, kind=whole(1), default=default, meaning=meaning, status=Status.IGNORED, why=_IO)
    for name, default, meaning in (
        ("num_threads", 16, "threads that read"),
        ("num_batches_per_thread", 4, "batches ahead of each"),
    )
)
_REQUESTS = Parameter(
    name="max_num_requests_per_thread",
    kind=whole(0),
    default=0,
    since="4.1",
    meaning="requests in flight",
    status=Status.IGNORED,
    why=_IO,
    aliases=("max_nr_request",),
)
_BLOCK = Parameter(
    name="io_block_size",
    kind=whole(0),
    until="4.0",
    meaning="bytes of a request",
    status=Status.IGNORED,
    why=_IO,
)
_DEPTH = (
    Parameter(name="io_depth", kind=whole(0), default=0, meaning="requests at a time", status=Status.IGNORED, why=_IO),
    Parameter(
        name="io_alignment", kind=whole(0), default=0, meaning="bytes of alignment", status=Status.IGNORED, why=_IO
    ),
    Parameter(
        name="shuffle",
        kind=TRUTH,
        default=False,
        meaning="training takes the file in blocks of 16,384 records, in another order each time it starts over",
    ),
    Parameter(
        name="aligned_type",
        kind=member(Alignment_t),
        default=Alignment_t.Non,
        meaning="padding of keys on a GPU",
        status=Status.IGNORED,
        why=_IO,
    ),
)
_FORM = (
    Parameter(
        name="multi_hot_reader",
        kind=optional(TRUTH),
        default=None,
        since="23.02",
        meaning="True: every slot has its number of keys and dense values are floats or not by is_dense_float; False: "
        "one key a slot, dense values as integers (the layout of Raw); None: True from compat_release 23.04 on, but "
        "not with OneHot or Hybrid embeddings",
    ),
    Parameter(
        name="is_dense_float",
        kind=optional(TRUTH),
        default=None,
        since="23.02",
        meaning="dense values are float32 in the file, else uint32 that are read as log(x + 1); None: floats with "
        "multi_hot_reader from compat_release 23.04 on",
    ),
)

ASYNC_PARAM = Table(
    name="AsyncParam",
    meaning="how RawAsync reads",
    rows=(*_THREADS, _REQUESTS, *_DEPTH, *_FORM),
)


# Up to 4.0 RawAsync files had Raw's layout: one key a slot, integers that are read as log(x + 1).
_FORM_BEFORE = (
    replace(_REQUESTS, is_positional=False),
    *(replace(row, kind=TRUTH, default=False, is_positional=False) for row in _FORM),
)
LEAST_BLOCK = 512
"""Bytes of a disk's sector, of which a block is a multiple; what is below in its place is a number of requests."""


def _has_block_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # The third place was the block's size up to 4.0; since 23.02 there are nine places, two of which tell the layout.
    has_nine = len(args) > 7 or {"multi_hot_reader", "is_dense_float"} & set(kwargs)
    is_block = len(args) > 2 and isinstance(args[2], int) and args[2] >= LEAST_BLOCK
    return (is_block and not has_nine) or _BLOCK.name in kwargs


ASYNC_PARAM_3_1 = Table(
    name="AsyncParam",
    meaning="how RawAsync reads (3.1 to 4.0)",
    rows=(*_THREADS, _BLOCK, *_DEPTH, *_FORM_BEFORE),
    fits=_has_block_size,
)


class AsyncParam(Record, forms=(ASYNC_PARAM, ASYNC_PARAM_3_1)):
    """How RawAsync reads."""

    def layout(self, release: tuple[int, int], *, is_one_hot: bool) -> tuple[bool, bool]:
        """Whether slots have their numbers of keys, and whether dense values are floats, where the call left it open.

        Args:
            release: whose defaults to take.
            is_one_hot: the model has embeddings of one key a slot, which no reader but that of one key serves.
        """
        is_new = release >= (23, 4)
        multi_hot = is_new and not is_one_hot if self.multi_hot_reader is None else self.multi_hot_reader
        is_float = is_new and multi_hot if self.is_dense_float is None else self.is_dense_float
        return multi_hot, is_float


_NUM_SAMPLES = tuple(
    Parameter(name=name, kind=whole(0), default=0, meaning=f"samples of the {what} file; Raw and RawAsync need it")
    for name, what in (("num_samples", "training"), ("eval_num_samples", "evaluation"))
)

READ_BY_ALL = (
    Parameter(
        name="cache_eval_data",
        kind=whole(0),
        default=0,
        meaning="evaluation batches kept on the GPU",
        status=Status.IGNORED,
        why="it only keeps batches from being read twice",
    ),
    *_NUM_SAMPLES,
    Parameter(
        name="float_label_dense",
        kind=TRUTH,
        default=False,
        meaning="Raw holds labels and dense values as float32, else integers that are read as log(x + 1)",
    ),
)
NUM_WORKERS = Parameter(name="num_workers", kind=whole(1), default=12, meaning="threads that read")
SLOT_SIZES = Parameter(
    name="slot_size_array",
    kind=listed(whole(0)),
    default=[],
    meaning="number of keys of every slot; Parquet and Raw add the sizes before a slot to its keys",
)


def samples_are_counted(values: Mapping[str, Any]) -> str | None:
    """The rule that files without a header come with their number of samples."""
    kind = values["data_reader_type"]
    for name in ("num_samples", "eval_num_samples"):
        if kind in (DataReaderType_t.Raw, DataReaderType_t.RawAsync) and not values[name]:
            return f"{name}: got 0, expected the number of samples, which a {kind.name} file does not tell"
    return None


def _keyset_for_each_source(values: Mapping[str, Any]) -> str | None:
    sources, keysets = values["source"], values["keyset"]
    if keysets and len(keysets) != len(sources):
        return f"keyset: got {len(keysets)} files, expected one for each of the {len(sources)} sources"
    return None


DATA_READER_PARAMS = Table(
    name="DataReaderParams",
    meaning="where the data lies and how it is read",
    rows=(
        Parameter(name="data_reader_type", kind=member(DataReaderType_t), meaning="format of the files"),
        Parameter(
            name="source", kind=one_or_list(TEXT), meaning="training data: a file list (Norm, Parquet) or a file"
        ),
        Parameter(
            name="keyset",
            kind=one_or_list(TEXT),
            default=[],
            until="23.12",
            meaning="files with the keys of each source, for the training cache",
        ),
        Parameter(name="eval_source", kind=TEXT, meaning="evaluation data"),
        Parameter(
            name="check_type", kind=member(Check_t), default=Check_t.Non, meaning="whether Norm records have checksums"
        ),
        *READ_BY_ALL,
        Parameter(
            name="read_file_sequentially",
            kind=TRUTH,
            default=False,
            since="3.9",
            meaning="files in the order of the list",
            status=Status.IGNORED,
            why="samples always come in the order of the files, whatever the number of threads",
        ),
        NUM_WORKERS,
        SLOT_SIZES,
        Parameter(
            name="data_source_params",
            kind=instance(DataSourceParams),
            default=DataSourceParams(),
            since="3.6",
            meaning="file system of the data",
        ),
        Parameter(
            name="async_param",
            kind=instance(AsyncParam),
            default=AsyncParam(16, 4, 512000, 4, 512, False, Alignment_t.Non),
            since="3.1",
            meaning="how RawAsync reads",
        ),
    ),
    rules=(samples_are_counted, _keyset_for_each_source),
)


class DataReaderParams(Record, forms=(DATA_READER_PARAMS,)):
    """Where the data lies and how it is read; ``source`` and ``keyset`` are always lists."""
