"""Raw files -> what a model takes, block by block: nothing is learnt or split, and labels need not be there."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, to_arrow
from terarec.etl.engine.grouped import GroupedRows, partition_count, run_grouped
from terarec.etl.engine.passes import Passes, ReadRows
from terarec.etl.engine.progress import OnProgress, ProgressMeter
from terarec.etl.engine.splits import assign
from terarec.etl.engine.steps import Steps
from terarec.etl.engine.unlabelled import scoring_plan, scoring_source
from terarec.etl.in_order import available_threads
from terarec.etl.ops.lists import ITEM_BITS, MAX_ITEMS
from terarec.etl.source import BadInputReport, open_source
from terarec.etl.workflow import EncodedRecords, Workflow
from terarec.etl.workflow.data_set import dense_values, keys_of
from terarec.formats import Keys
from terarec.kernels import memory
from terarec.spec import OneSplit, PrepareOptions

_MEMORY_BYTES = 4 << 30
"""What grouped steps may take where it is not known how much is free."""
_IN_MEMORY = 3
"""Rows take about so many times the bytes of their text, as in `terarec.etl.engine.run`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBlock:
    """n rows of the files, in order.

    Attributes:
        rows: int64[n], positions among all rows of all files, from 0.
        items: int64[n], positions in the list that a step cut into rows; None where no step does.
        records: the rows as a model takes them.
        kept: raw columns that were asked for, n values each.
    """

    rows: NDArray[np.int64]
    items: NDArray[np.int64] | None
    records: EncodedRecords
    kept: dict[str, pa.Array]

    def slice(self, begin: int, end: int) -> EncodedBlock:
        """Rows ``begin <= i < end``."""
        records = self.records
        return EncodedBlock(
            rows=self.rows[begin:end],
            items=None if self.items is None else self.items[begin:end],
            records=EncodedRecords(
                dense=records.dense[begin:end],
                keys=tuple(_sliced(keys, begin, end) for keys in records.keys),
            ),
            kept={name: values[begin:end] for name, values in self.kept.items()},
        )


def _sliced(keys: Keys, begin: int, end: int) -> Keys:
    if not isinstance(keys, tuple):
        return keys[begin:end]
    values, offsets = keys
    return values[offsets[begin] : offsets[end]], offsets[begin : end + 1] - offsets[begin]


class EncodedFiles:
    """Rows of raw files as a fitted workflow encodes records that are served.

    Every row is encoded, as every record is that is served: `KeepRows` leaves rows out only where a later step looks at
    other rows, whose values it decides. Steps that look at other rows see those of the files.

    Args:
        workflow: a fitted one.
        sources: files, directories, patterns or URLs, in order. The columns that labels alone are made of may be there,
            empty or absent.
        keep: raw columns to hand on beside the rows.
        options: threads, memory and what to do with bad input; the rest does not matter.
        progress: called after every block.

    Attributes:
        keep: as above.
        explodes: whether a step cuts lists into rows.

    Raises:
        ConfigError: the workflow is not fitted; a column that is not there, or a file that lacks one.
        DataNotFoundError: a source does not exist.
        FormatError: an empty or a damaged file.
    """

    def __init__(
        self,
        workflow: Workflow,
        sources: Sequence[str | Path],
        *,
        keep: Sequence[str] = (),
        options: PrepareOptions | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        chosen = options or PrepareOptions()
        dataset = workflow.dataset_spec()
        self.keep = tuple(keep)
        self._dense = [column.name for column in dataset.dense]
        self._keys = [column.name for column in dataset.categorical]
        wanted = scoring_plan(workflow.plan, (*self._dense, *self._keys))
        spec = scoring_source(wanted, workflow.plan, sources, self.keep)
        self._plan, self._work = wanted.plan, wanted.work
        self.explodes = wanted.explodes
        self._source = open_source(spec, sources, chosen.bad_input, chosen.threads)
        item_bits = ITEM_BITS if self.explodes else 0
        meter = ProgressMeter(progress)
        passes = 2 if self._work.grouped else 1
        meter.total_bytes = passes * self._source.num_bytes
        self._passes = Passes(self._source, chosen.threads or available_threads(), meter, item_bits)
        self._steps = Steps(self._plan, dict(workflow.states), assign(OneSplit(split="test"), None))
        free = chosen.memory_bytes or (memory.available_bytes() or _MEMORY_BYTES) // 2
        self._partitions = partition_count(_IN_MEMORY * self._source.text_bytes, free)

    @property
    def bad_input(self) -> BadInputReport:
        """What could not be read, in the blocks so far."""
        return self._source.bad_input

    def blocks(self) -> Generator[EncodedBlock]:
        """All rows in order; a few blocks are held at a time.

        Raises:
            FormatError: a damaged file, or bad input under the policy "raise", with file and line.
            StorageError, OSError: grouped steps need the disk, and it is full.
        """
        if not self._work.grouped:
            yield from self._encoded(None)
            return
        with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
            self._passes.meter.begin("group")
            run_grouped(self._passes, self._steps, Path(directory), self._partitions)
            yield from self._encoded(GroupedRows(Path(directory), self._work.grouped, self._partitions))

    def _encoded(self, beside: GroupedRows | None) -> Generator[EncodedBlock]:
        self._passes.meter.begin("score")
        with closing(self._passes.map(self._encode, beside=beside)) as blocks:
            for block in blocks:
                if block is not None:
                    yield block

    def _encode(self, rows: ReadRows) -> EncodedBlock | None:
        entered = self._steps.enter(self._work, rows)
        return rows.refusals.leave_out(partial(self._made, rows), entered)[0]

    def _made(self, rows: ReadRows, entered: Block) -> EncodedBlock | None:
        if not entered.num_rows:
            return None
        done = self._steps.run(self._work, entered, rows.joined)
        dense = np.ascontiguousarray(dense_values(self._dense, done))
        numbers = done.rows // MAX_ITEMS if self.explodes else done.rows
        raw = rows.block.only(self.keep).take(np.searchsorted(rows.block.rows, numbers))
        return EncodedBlock(
            rows=numbers,
            items=done.rows % MAX_ITEMS if self.explodes else None,
            records=EncodedRecords(dense=dense, keys=keys_of(self._plan, done, self._keys)),
            kept={name: _kept(raw.columns[name]) for name in self.keep},
        )


def _kept(column: Column) -> pa.Array:
    """The values of a raw column, those of hexadecimal digits with all eight of them."""
    values = to_arrow(column)
    if column.type != "hex32" or column.is_list:
        return values
    digits = [None if number is None else f"{number:08x}" for number in values.to_pylist()]
    return pa.array(digits, type=pa.large_string())
