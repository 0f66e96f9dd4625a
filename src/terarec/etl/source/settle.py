"""What the policy makes of fields that turned out to be no values after their rows were read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Column
from terarec.etl.source.bad_input import FAULTS_SHOWN, InputFault, Place, show
from terarec.etl.source.raw_block import FieldFaults, ParsedPart
from terarec.formats.block import offsets_of
from terarec.spec import BadInputPolicy, SourceColumn


def settle(
    parsed: ParsedPart,
    found: Sequence[FieldFaults],
    policy: BadInputPolicy,
    fault_of: Callable[[FieldFaults, int], InputFault],
) -> ParsedPart:
    """`parsed` with the faults `found` in its columns, whose rows are left out if the policy is "skip".

    Args:
        parsed: rows and the faults before.
        found: in any order; a row that is left out counts once, for its first fault by column and kind.
        policy: see `BadInputPolicy`.
        fault_of: the report of the fault at a position in `FieldFaults.rows`.
    """
    if not found:
        return parsed
    counts = Counter(parsed.counts)
    faults = list(parsed.faults)
    num_rows = len(next(iter(parsed.columns.values())))
    bad = np.zeros(num_rows, dtype=np.bool_)
    for fields in sorted(found, key=lambda fields: (fields.column or "", fields.kind)):
        fresh = ~bad[fields.rows] if policy != "missing" else np.ones(len(fields.rows), dtype=np.bool_)
        if fresh.any():
            counts[fields.kind] += int(fresh.sum())
        faults += [fault_of(fields, int(at)) for at in np.flatnonzero(fresh)[:FAULTS_SHOWN] if at < len(fields.got)]
        bad[fields.rows] = True
    faults.sort(key=lambda fault: fault.number)
    if policy != "skip":
        return ParsedPart(parsed.columns, parsed.kept, counts, faults[:FAULTS_SHOWN])
    good = np.flatnonzero(~bad)
    columns = {name: _taken(column, good) for name, column in parsed.columns.items()}
    kept = good if parsed.kept is None else parsed.kept[good]
    return ParsedPart(columns, kept, counts, faults[:FAULTS_SHOWN])


def without_bad(
    column: Column, source: SourceColumn, bad: NDArray[np.bool_], kind: str, expected: str, values: Any
) -> tuple[Column, FieldFaults]:
    """`column`, a list with a bad item being empty, and what is wrong.

    Args:
        column: its bad values are missing.
        source: its spec.
        bad: bool[m], which values are bad; one is at least.
        kind: of the faults.
        expected: what is accepted.
        values: Arrow array [m] of what stands there.
    """
    items = np.flatnonzero(bad)
    rows = items
    if column.offsets is not None:
        rows, first = np.unique(np.searchsorted(column.offsets, items, side="right") - 1, return_index=True)
        items = items[first]
        column = _without_items(column, rows)
    got = [show(str(values[int(item)].as_py())) for item in items[:FAULTS_SHOWN]]
    return column, FieldFaults(source.name, kind, expected, rows, got)


def _without_items(column: Column, rows: NDArray[np.int64]) -> Column:
    """`column` with no items in its lists at these rows."""
    lengths = np.diff(np.asarray(column.offsets))
    bad = np.zeros(len(lengths), dtype=np.bool_)
    bad[rows] = True
    items = _taken(column.flat(), np.flatnonzero(np.repeat(~bad, lengths)))
    lengths[rows] = 0
    return Column(items.type, items.values, items.missing, offsets_of(lengths))


def _taken(column: Column, rows: NDArray[np.int64]) -> Column:
    """These rows of `column`, without a mask if none of them is missing."""
    taken = column.take(rows)
    if taken.missing is None or taken.missing.any():
        return taken
    return Column(taken.type, taken.values, None, taken.offsets)


def report_fault(fields: FieldFaults, at: int, *, path: str, number: int, place: Place = "line") -> InputFault:
    """The fault at position `at` of `fields`, in line or row `number` of a file."""
    return InputFault(
        path=path,
        place=place,
        number=number,
        kind=fields.kind,
        column=fields.column,
        got=fields.got[at],
        expected=fields.expected,
    )
