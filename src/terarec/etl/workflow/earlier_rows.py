# SPDX-License-Identifier: Apache-2.0
"""Rows of prepared files, kept with the workflow, from which grouped steps continue in later files.

A grouped step looks at earlier rows of the same group. Its outputs for later files depend on a few last rows of each
group, which `Operator.carried_rows` names: ``earlier_rows/<step>.parquet`` in the saved workflow has the columns that
the step reads, in the order of the rows. Records that are served have the outputs of these steps, and need no file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl.columns import ARROW_TYPES, NANOSECONDS_PREFIX, ColumnType, Rows, from_arrow, ids_as_integers
from terarec.etl.workflow.plan import Plan
from terarec.formats.dataset import EARLIER_ROWS, WORKFLOW_ENTRIES
from terarec.formats.parquet import arrow_errors
from terarec.io.exchange import end_exchange
from terarec.io.files import AtomicFile
from terarec.io.opening import arrow_file, link_or_copy
from terarec.spec import to_data
from terarec.spec.checks import FieldError

GROUP_ROWS = 1 << 16
"""Rows of a row group, and of a block in memory."""
NO_ROWS = "none"
"""Choice of no earlier rows."""
_STEP = b"terarec.step"
_TOGETHER = "all files together with earlier_rows='none' (--earlier-rows none)"


class EarlierRows:
    """Earlier rows of the grouped steps of a workflow.

    Attributes:
        directory: As above.
        paths: Step -> its file.

    Raises:
        ConfigError: They are of other steps.
        DataNotFoundError: A step has no file.
        FormatError: A file is damaged.
    """

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory = directory
        self._plan = plan
        self.paths: Mapping[int, Path] = {step: earlier_file(directory, step) for step in plan.grouped_steps}
        self._files = {step: self._metadata(step, path) for step, path in self.paths.items()}

    def num_rows(self, step: int) -> int:
        """Return the number of rows of a step."""
        return int(self._files[step].num_rows)

    def num_blocks(self, step: int) -> int:
        """Return the number of blocks that `rows` yields."""
        return int(self._files[step].num_row_groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values of all steps."""
        return sum(
            table.row_group(group).total_byte_size
            for table in self._files.values()
            for group in range(table.num_row_groups)
        )

    def rows(self, step: int) -> Iterator[Rows]:
        """Yield the rows of a step, with the ids -n to -1, which put them before all rows of files."""
        yield from (self.block(step, number) for number in range(self.num_blocks(step)))

    def block(self, step: int, number: int) -> Rows:
        """Return one of the blocks of `rows`."""
        path, names, types = self.paths[step], self._plan.operators[step].reads, self._plan.types[step]
        with arrow_errors(str(path)), arrow_file(path) as source:
            table = pq.ParquetFile(source, page_checksum_verification=True).read_row_group(number)
        first = number * GROUP_ROWS - self.num_rows(step)
        columns = {name: from_arrow(table.column(name), types[name].kind) for name in names}
        nanoseconds = {name: table.column(column).to_numpy() for name, column in _nanoseconds(self._plan, step).items()}
        return Rows(columns, np.arange(first, first + table.num_rows, dtype=np.int64), nanoseconds=nanoseconds)

    def fingerprint(self) -> str:
        """Return a text that changes when a file does."""
        listed = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in self.paths.values()]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def _metadata(self, step: int, path: Path) -> pq.FileMetaData:
        name = f"steps[{step}] {type(self._plan.spec.steps[step]).__name__}"
        if not self._plan.operators[step].carries_rows:
            raise ConfigError(name, f"cannot continue from earlier files, expected to prepare {_TOGETHER}")
        if not path.is_file():
            raise DataNotFoundError(path, f"no such file, which {name} continues from; expected to prepare {_TOGETHER}")
        with arrow_errors(str(path)), arrow_file(path) as source:
            file = pq.ParquetFile(source)
            metadata, schema = file.metadata, file.schema_arrow
        expected = _schema(self._plan, step)
        if not schema.equals(expected, check_metadata=True):
            step_name = (schema.metadata or {}).get(_STEP, b"?").decode(errors="replace")
            wanted = expected.metadata[_STEP].decode()
            problem = f"holds earlier rows of the step {step_name}, expected those of {name}: {wanted}"
            if step_name == wanted:
                got, columns = (
                    ", ".join(f"{field.name!r} ({field.type})" for field in held) for held in (schema, expected)
                )
                problem = f"holds the columns {got}, expected {columns} of {name}; prepare {_TOGETHER}"
            raise ConfigError(path, problem)
        if any(metadata.row_group(group).num_rows != GROUP_ROWS for group in range(metadata.num_row_groups - 1)):
            raise FormatError(path, f"has row groups of other sizes, expected {GROUP_ROWS:,} rows in all but the last")
        return metadata


def find_earlier_rows(directory: str | Path) -> Path:
    """Return the directory of earlier rows of a data set, or of its workflow."""
    places = [Path(directory, *below, EARLIER_ROWS) for below in ((), ("workflow",))]
    for place in places:
        if not place.is_dir():
            end_exchange(place.parent, WORKFLOW_ENTRIES)
    first_place = next((place for place in places if place.is_dir()), None)
    if first_place is None:
        raise DataNotFoundError(directory, "has no earlier rows, expected a prepared data set, or its workflow")
    return first_place


def open_earlier_rows(plan: Plan, own: Path | None, choice: str | None) -> EarlierRows | None:
    """Return the earlier rows from which a preparation continues; None where it begins without any.

    Args:
        plan: Plan of the workflow.
        own: Directory of those that a fitted workflow has, or should have; None for one that has prepared nothing.
        choice: See `PrepareOptions.earlier_rows`.

    Raises:
        ConfigError: `choice` without a step that looks at other rows; a fitted workflow without earlier rows.
        DataNotFoundError, FormatError: As for `EarlierRows`.
    """
    steps = ", ".join(f"steps[{step}] {type(plan.spec.steps[step]).__name__}" for step in plan.grouped_steps)
    if choice == NO_ROWS or (choice is None and (own is None or not steps)):
        return None
    if not steps:
        problem = f"got {choice!r}, but no step looks at other rows, expected none of it"
        raise FieldError("", "earlier_rows", problem)
    if choice is not None:
        return EarlierRows(find_earlier_rows(choice), plan)
    assert own is not None
    if not own.is_dir():
        raise FieldError(
            "",
            "earlier_rows",
            f"{steps} would begin without the rows of earlier files, which {own.parent} does not have; expected the "
            f"directory of the data set that was prepared before, or to prepare {_TOGETHER}",
        )
    return EarlierRows(own, plan)


def earlier_file(directory: Path, step: int) -> Path:
    """Return the file of the earlier rows of a step."""
    return directory / f"{step:02d}.parquet"


def copy_earlier_rows(source: Path, directory: Path) -> None:
    """Copy the files of earlier rows from `source` to `directory`, which is made, or give them names there, too."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.parquet")):
        link_or_copy(path, directory / path.name)


def write_earlier_rows(path: Path, plan: Plan, step: int, parts: Iterable[Rows]) -> int:
    """Write the earlier rows of a step for later files, in the order of `parts`; return their number.

    The bytes depend on the rows alone and not on how they are cut into parts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    schema, file, count = _schema(plan, step), AtomicFile(path), 0
    with file.guard(), pq.ParquetWriter(file.partial, schema, write_page_checksum=True) as writer:
        waiting = schema.empty_table()
        for rows in parts:
            arrays = [ids_as_integers(rows.columns[name]) for name in plan.operators[step].reads]
            arrays += [pa.array(rows.nanoseconds[name]) for name in _nanoseconds(plan, step)]
            waiting = pa.concat_tables([waiting, pa.Table.from_arrays(arrays, schema=schema)])
            count += rows.num_rows
            while waiting.num_rows >= GROUP_ROWS:
                writer.write_table(waiting.slice(0, GROUP_ROWS).combine_chunks(), row_group_size=GROUP_ROWS)
                waiting = waiting.slice(GROUP_ROWS)
        if waiting.num_rows:
            writer.write_table(waiting.combine_chunks(), row_group_size=GROUP_ROWS)
    file.commit()
    return count


def _nanoseconds(plan: Plan, step: int) -> dict[str, str]:
    """Return the columns that a step reads with `Rows.nanoseconds`, and the names of these in the file."""
    times = plan.times_with_parts(step)
    return {name: NANOSECONDS_PREFIX + name for name in plan.operators[step].reads if name in times}


def _schema(plan: Plan, step: int) -> pa.Schema:
    types: Mapping[str, ColumnType] = plan.types[step]
    kinds = {name: types[name].kind for name in plan.operators[step].reads}
    fields = [(name, pa.int64() if kind == "id" else ARROW_TYPES[kind]) for name, kind in kinds.items()]
    fields += [(column, pa.int32()) for column in _nanoseconds(plan, step).values()]
    # The rows to keep depend on the fields of the step, such as the length of its lists.
    step_data = json.dumps(to_data(plan.spec.steps[step]), sort_keys=True)
    return pa.schema(fields, metadata={_STEP: step_data.encode()})
