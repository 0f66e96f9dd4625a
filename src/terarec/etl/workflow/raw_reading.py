"""The operations that read the raw columns of a record, as callers hold them in lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import ColumnType
from terarec.etl.workflow.operations import NumberPlace, Operations, alone
from terarec.etl.workflow.plain_reading import plain_reader
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.serving import ServingPlan
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.spec import SourceColumn


class RawReading:
    """Adds to `operations` what reads the columns that are asked for.

    Args:
        plan: of the workflow.
        serving: the raw columns, whose values are in the first slots.
        operations: of the program.
    """

    def __init__(self, plan: Plan, serving: ServingPlan, operations: Operations) -> None:
        self._plan, self._types, self._operations = plan, serving.inputs, operations
        self._slots = {name: slot for slot, name in enumerate(serving.inputs)}
        self._rows: dict[str, list[int]] = {"number": [], "integer": []}

    def values(self, name: str, *, is_checked: bool) -> int:
        """The slot of the plain values of a raw column; of raw ones where what takes them checks them."""
        found, slot = self._types[name], self._slots[name]
        if found == ColumnType("number"):
            return self._operations.row(self.numbers(name))
        source = self._source(name)
        cleaning = Cleaning() if source is None else Cleaning.of_records(self._plan.spec.source)
        if cleaning.is_needed:
            slot = self._operations.once(("clean", name), [slot], alone(cleaning.values))
        reader = plain_reader(found, source, cleaning, is_checked=is_checked)
        return slot if reader is None else self._operations.once(("raw", name, is_checked), [slot], alone(reader))

    def numbers(self, name: str) -> NumberPlace:
        """Where the numbers or integers of a raw column are, one a row, as numbers."""
        found, source = self._types[name], self._source(name)
        if source is not None and source.type == "time":
            return self._operations.numbers(self.values(name, is_checked=False))
        rows, raw = self._rows[found.kind], self._slots[name]
        if raw not in rows:
            rows.append(raw)  # the matrix of all raw columns of the kind, which grows while they are asked for
        slot = self._operations.once(("raw", found.kind), rows, partial(_matrix, found.kind == "integer"))
        return NumberPlace(slot, rows.index(raw))

    def _source(self, name: str) -> SourceColumn | None:
        return self._plan.spec.source.column(name) if name in self._plan.types[0] else None


def _matrix(whole: bool, *columns: list[Any]) -> Sequence[Any]:
    return (numbers_of_list(list(chain.from_iterable(columns)), whole=whole).reshape(len(columns), -1),)
