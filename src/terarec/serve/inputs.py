"""The raw columns of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terarec.etl.columns import ColumnType
from terarec.etl.workflow import Workflow

ColumnKind = Literal["number", "integer", "string"]
_KINDS: dict[str, ColumnKind] = {"number": "number", "integer": "integer", "text": "string", "hex32": "string"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputColumn:
    """A raw column of a record.

    Attributes:
        name: of the column.
        kind: what its values are.
        hotness: 1 for one value a record; more for a list of at most so many values; None for one of any length.
    """

    name: str
    kind: ColumnKind
    hotness: int | None = 1


def input_columns(workflow: Workflow) -> tuple[InputColumn, ...]:
    """The raw columns of a record that `workflow` encodes."""
    return tuple(_input_column(workflow, name, found) for name, found in workflow.record_columns.items())


def _input_column(workflow: Workflow, name: str, found: ColumnType) -> InputColumn:
    source = workflow.spec.source.column(name)
    is_written_time = source is not None and source.format is not None
    # A list of at most one value is a list all the same.
    hotness = (None if found.max_length is None else max(found.max_length, 2)) if found.is_list else 1
    return InputColumn(name=name, kind="string" if is_written_time else _KINDS[found.kind], hotness=hotness)
