# SPDX-License-Identifier: Apache-2.0
"""Raw files -> model inputs, block by block, for scoring: nothing is fitted or split, and labels may be absent."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.closer import stream
from terarec.etl.columns import Rows, is_list, kind_of
from terarec.etl.engine.grouped import EarlierOptions, GroupedRows, partition_count, run_grouped
from terarec.etl.engine.local import BYTES_PER_TEXT_BYTE
from terarec.etl.engine.passes import Passes, Pipeline, ReadRows
from terarec.etl.engine.phases import OnProgress, ProgressMeter
from terarec.etl.engine.served import are_served, read_served
from terarec.etl.engine.split import assign
from terarec.etl.ops.sequences import ITEM_BITS, MAX_ITEMS
from terarec.etl.source.blocks import BadInputReport, SourceFile
from terarec.etl.source.delimited import first_record, split_header
from terarec.etl.source.files import find_files
from terarec.etl.source.hive import files_spec
from terarec.etl.source.source import Sources, check_sources, open_files, open_source, read_as
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.earlier_rows import open_earlier_rows
from terarec.etl.workflow.plan import Pass, Plan, RowValidation, columns_needed
from terarec.etl.workflow.serving import EncodedRecords
from terarec.etl.workflow.transform import dense_values, keys_of
from terarec.formats.block import slice_keys
from terarec.kernels import memory
from terarec.parallel import available_threads
from terarec.spec import OneSplit, PrepareOptions, SourceColumn, SourceSpec
from terarec.spec.checks import FieldError

_MEMORY_BYTES = 4 << 30
"""Memory of grouped steps where it is not known how much is free."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBlock:
    """n rows of the files, in order.

    Attributes:
        rows: int64[n], positions among all rows of all files, from 0.
        items: int64[n], positions in the list that a step cut into rows; None where no step does.
        records: Model inputs of the rows.
        kept: Requested raw columns, n values each.
    """

    rows: NDArray[np.int64]
    items: NDArray[np.int64] | None
    records: EncodedRecords
    kept: dict[str, pa.Array]

    def slice(self, begin: int, end: int) -> EncodedBlock:
        """Return rows ``begin <= i < end``."""
        records = self.records
        return EncodedBlock(
            rows=self.rows[begin:end],
            items=None if self.items is None else self.items[begin:end],
            records=EncodedRecords(
                dense=records.dense[begin:end],
                keys=tuple(slice_keys(keys, begin, end) for keys in records.keys),
            ),
            kept={name: values[begin:end] for name, values in self.kept.items()},
        )


class _Served(NamedTuple):
    """Files of served records, and the workflow that encodes them."""

    workflow: Workflow
    files: Sequence[SourceFile]
    meter: ProgressMeter


class EncodedFiles:
    """Rows of raw files as a fitted workflow encodes records that are served.

    Every row is encoded, as every record is that is served: `KeepRows` leaves rows out only where a later step looks at
    other rows, whose values it decides. Steps that read other rows see those of the files, and those of earlier files
    that `options` name or the workflow keeps. Parquet files with the columns of served records have what these steps
    made: no other row is looked at then, and every value has to be one that the workflow takes.

    Args:
        workflow: A fitted workflow.
        sources: Files, directories, patterns or URLs, in order, or a table in memory. Columns that only labels are made
            of may be empty or absent.
        keep: Raw columns to return with the rows.
        options: Threads, memory, earlier rows and the policy for bad input; the rest does not matter.
        progress: Callback, called after every block.

    Attributes:
        explodes: Whether a step cuts lists into rows.

    Raises:
        ConfigError: The workflow is not fitted; a column that is not there, or a file that lacks one.
        DataNotFoundError: A source does not exist.
        FormatError: An empty or a damaged file.
    """

    def __init__(
        self,
        workflow: Workflow,
        sources: Sources,
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
        checked = check_sources(sources)
        self._plan, self._work = wanted.plan, wanted.work
        self._served: _Served | None = None
        self.explodes = wanted.explodes
        if isinstance(checked, pa.Table):
            spec = scoring_source(wanted, workflow.plan, None, self.keep)
            self._source = open_source(spec, checked, chosen.bad_input, chosen.threads)
        else:
            # Listed once: a bucket may have many files, and others while it is listed again.
            files = find_files(checked)
            if self._work.grouped and are_served(workflow, files):
                self._read_as_served(workflow, files, progress)
                return
            spec = scoring_source(wanted, workflow.plan, files, self.keep)
            self._source = open_files(spec, files, chosen.bad_input, chosen.threads)
        item_bits = ITEM_BITS if self.explodes else 0
        meter = ProgressMeter(progress)
        # Grouped steps see all rows before the first one is encoded.
        passes = 2 if self._work.grouped else 1
        meter.total_bytes = passes * self._source.num_bytes
        self._passes = Passes(self._source, chosen.threads or available_threads(), meter, item_bits)
        # Not "train": operators such as TargetEncoding give training rows other values than those that are scored.
        self._pipeline = Pipeline(self._plan, dict(workflow.states), assign(OneSplit(split="test"), None))
        earlier = open_earlier_rows(self._plan, workflow.earlier_rows, chosen.earlier_rows)
        self._earlier = EarlierOptions(rows=earlier, late_rows=chosen.late_rows)
        free = chosen.memory_bytes or (memory.available_bytes() or _MEMORY_BYTES) // 2
        num_bytes = self._source.text_bytes + (0 if earlier is None else earlier.num_bytes)
        self._partitions = partition_count(BYTES_PER_TEXT_BYTE * num_bytes, free)

    def _read_as_served(self, workflow: Workflow, files: Sequence[SourceFile], progress: OnProgress | None) -> None:
        for name in self.keep:
            if name not in workflow.record_columns:
                expected = ", ".join(workflow.record_columns)
                raise FieldError("", "keep", f"got {name!r}, expected columns of the workflow's records: {expected}")
        self._served = _Served(workflow, files, ProgressMeter(progress))
        self._served.meter.total_bytes = sum(file.bytes for file in files)
        self.explodes = False  # a record is one item of a list

    @property
    def bad_input(self) -> BadInputReport:
        """Bad input in the blocks so far."""
        return BadInputReport() if self._served is not None else self._source.bad_input

    @stream
    def blocks(self) -> Generator[EncodedBlock]:
        """Yield all rows in order; a few blocks are in memory at a time.

        Raises:
            FormatError: A damaged file, or bad input under the policy "raise", with file and line.
            StorageError, OSError: Grouped steps need the disk, and it is full.
        """
        if self._served is not None:
            yield from self._served_blocks(self._served)
            return
        if not self._work.grouped:
            yield from self._encoded(None)
            return
        with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
            self._passes.meter.begin("group")
            run_grouped(self._passes, self._pipeline, Path(directory), self._partitions, self._earlier)
            yield from self._encoded(GroupedRows(Path(directory), self._work.grouped, self._partitions))

    @stream
    def _served_blocks(self, served: _Served) -> Generator[EncodedBlock]:
        served.meter.begin("score")
        first = 0
        for file in served.files:
            with closing(read_served(served.workflow, file)) as blocks:
                for table, records in blocks:
                    kept = {name: table.column(name).combine_chunks() for name in self.keep}
                    rows = np.arange(first, first + table.num_rows, dtype=np.int64)
                    yield EncodedBlock(rows=rows, items=None, records=records, kept=kept)
                    first += table.num_rows
                    served.meter.add(table.num_rows, 0)
            served.meter.add(0, file.bytes)

    @stream
    def _encoded(self, joined: GroupedRows | None) -> Generator[EncodedBlock]:
        self._passes.meter.begin("score")
        with closing(self._passes.map(self._encode, joined=joined)) as blocks:
            for block in blocks:
                # A block whose rows are all bad input, or left out, has nothing to score.
                if block is not None:
                    yield block

    def _encode(self, read: ReadRows) -> EncodedBlock | None:
        rows = self._pipeline.preprocess(self._work, read)
        return read.invalid.filter(partial(self._encode_rows, read), rows)[0]

    def _encode_rows(self, read: ReadRows, rows: Rows) -> EncodedBlock | None:
        if not rows.num_rows:
            return None
        done = self._pipeline.run(self._work, rows, read.joined)[0]
        # Row after row, as served records: models round by the layout.
        dense = np.ascontiguousarray(dense_values(self._dense, done))
        ids = done.ids // MAX_ITEMS if self.explodes else done.ids
        # The ids of a block rise, so a search finds the raw row of each, also of items.
        raw = read.rows.select(self.keep).take(np.searchsorted(read.rows.ids, ids))
        return EncodedBlock(
            rows=ids,
            items=done.ids % MAX_ITEMS if self.explodes else None,
            records=EncodedRecords(dense=dense, keys=keys_of(done, self._keys)),
            kept={name: _kept(array) for name, array in raw.columns.items()},
        )


def _kept(values: pa.Array) -> pa.Array:
    """Return the values of a raw column, those of hexadecimal digits with all eight of them."""
    if kind_of(values) != "hex32" or is_list(values):
        return values
    digits = [None if number is None else f"{number:08x}" for number in values.to_pylist()]
    return pa.array(digits, type=pa.large_string())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoringPlan:
    """Steps for rows that are only to be scored.

    Attributes:
        plan: Plan of the workflow, without anything about labels and splits.
        work: Pass that makes model inputs.
        explodes: Whether a step cuts lists into rows.
    """

    plan: Plan
    work: Pass
    explodes: bool


def scoring_plan(plan: Plan, results: Sequence[str]) -> ScoringPlan:
    """Return the steps that the columns `results` depend on, for rows that no model is trained on.

    Fitted steps transform rows as they do records that are served, so columns that they read in training alone are not
    needed. Grouped steps see the other rows that are scored.
    """
    operators = [operator.for_scoring() for operator in plan.operators]
    steps: list[int] = []

    def reads(step: int, outputs: set[str]) -> Iterable[str] | None:
        operator = operators[step]
        # As at serving every row stays, unless a grouped step follows, which must see the rows that it saw in training.
        if operator.filters and not any(plan.operators[later].stage == "grouped" for later in steps):
            return None
        # Steps whose outputs nobody wants are left out, but row steps decide which rows there are.
        if operator.stage != "rows" and not outputs:
            return None
        steps.append(step)
        operators[step] = operator.restricted_to(outputs)
        return operators[step].reads if operator.stage in ("grouped", "rows") else operators[step].serving_reads

    needed = columns_needed(operators, results, reads)
    rows = len(plan.row_steps)
    grouped = tuple(step for step in plan.grouped_steps if step in steps)
    # Without grouped steps, whose rows are all there before one is encoded, rows are rejected as they are encoded.
    validated = tuple(step for step in plan.validation.steps if grouped and step in steps)
    row_steps = tuple(step for step in reversed(steps) if step < rows)
    # Grouped steps must see the rows that are encoded: those that the same row steps keep and take.
    validation = RowValidation(
        row_steps=row_steps,
        reads=frozenset(
            columns_needed(
                operators, (), lambda step, _: operators[step].reads if step in validated else None, first=rows
            )
        ),
        steps=validated,
    )
    unlabelled = dataclasses.replace(
        plan,
        spec=dataclasses.replace(plan.spec, split=None),
        operators=tuple(operators),
        grouped_steps=grouped,
        # Not labels and weights, which rows without a known outcome do not have.
        validation=validation,
    )
    work = Pass(
        reads=tuple(column.name for column in plan.spec.source.columns if column.name in needed),
        row_steps=row_steps,
        grouped=grouped,
        steps=tuple(step for step in reversed(steps) if step >= rows),
    )
    explodes = any(operators[step].explodes for step in steps)
    return ScoringPlan(plan=unlabelled, work=work, explodes=explodes)


def scoring_source(
    wanted: ScoringPlan, plan: Plan, files: Sequence[SourceFile] | None, keep: Sequence[str]
) -> SourceSpec:
    """Return how to read files of which only some columns matter.

    A table in memory, without `files`, has the columns by name.

    Raises:
        ConfigError: A column of `keep` that the source cannot give.
        FormatError: The first file is damaged.
    """
    source = plan.spec.source
    if files is None:
        # A table in memory names and types its columns, as a file of Parquet does.
        source = dataclasses.replace(source, format="parquet", encoding="utf-8")
    else:
        source = read_as(source, files)
    has_names = source.format != "delimited" or source.header
    typed = {column.name: column for column in source.columns}
    for name in keep:
        if name not in typed and not (source.format == "delimited" and source.header):
            raise FieldError("", "keep", f"got {name!r}, expected columns of the workflow's source: {', '.join(typed)}")
    if has_names or files is None:
        names = dict.fromkeys((*wanted.work.reads, *keep))
        columns = [_read_as(typed.get(name), name, name in wanted.work.reads, source) for name in names]
        return dataclasses.replace(source, columns=tuple(columns))
    absent = _absent(wanted, plan, files, keep)
    there = [column for column in source.columns if column.name not in absent]
    columns = [_read_as(column, column.name, column.name in wanted.work.reads, source) for column in there]
    return dataclasses.replace(source, columns=tuple(columns))


def _read_as(column: SourceColumn | None, name: str, is_needed: bool, source: SourceSpec) -> SourceColumn:
    """Return how to read a column; one of delimited text that no step reads may hold anything."""
    if column is None or (source.format == "delimited" and not is_needed):
        return SourceColumn(name=name, type="text")
    return column


def _absent(wanted: ScoringPlan, plan: Plan, files: Sequence[SourceFile], keep: Sequence[str]) -> frozenset[str]:
    """Return the columns of the labels, or these and those of the weight and metadata, that a file lacks.

    Lines of files without a header do not name their fields: the number of fields in the first one decides. The first
    file is enough, since all files of a source have the same fields.
    """
    source = plan.spec.source
    needed = {*wanted.work.reads, *keep}
    with_labels = scoring_plan(plan, [label.source for label in plan.spec.labels]).work.reads
    labels = frozenset(with_labels) - needed
    weight = () if plan.spec.weight is None else scoring_plan(plan, [plan.spec.weight]).work.reads
    unread = labels | (frozenset((*weight, *plan.spec.metadata)) - needed)
    line = first_record(files[0], source)
    fields = len(split_header(files[0].path, line, source)) if line else 0
    # Columns in the names of directories are no fields.
    own = {column.name for column in files_spec(source, files).columns}
    # Labels alone first: most files to score lack just these.
    return next((names for names in (labels, unread) if fields == len(own - names)), frozenset())
