"""Recording of the tables of a model, without their memory, to estimate it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTables:
    """The tables of one collection.

    Attributes:
        tables: Tables as the model asked for them.
        features: Features that look them up.
    """

    tables: tuple[TableSpec | DynamicTableSpec, ...]
    features: tuple[FeatureSpec, ...]


_RECORD: ContextVar[list[RecordedTables] | None] = ContextVar("record", default=None)


@contextmanager
def record_tables() -> Iterator[list[RecordedTables]]:
    """Record the tables of all collections that this thread makes in the block.

    These collections have static tables of one row, so that a model of any size can be built to see what it needs.

    Yields:
        The list of records, which grows within the block.
    """
    found: list[RecordedTables] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def tables_to_make(
    tables: Sequence[TableSpec | DynamicTableSpec], features: Sequence[FeatureSpec]
) -> Sequence[TableSpec | DynamicTableSpec]:
    """Return the tables that a collection makes: `tables` or, where they are recorded, small ones in their place."""
    record = _RECORD.get()
    if record is None:
        return tables
    record.append(RecordedTables(tables=tuple(tables), features=tuple(features)))
    return [replace(table, rows=1) if isinstance(table, TableSpec) else table for table in tables]
