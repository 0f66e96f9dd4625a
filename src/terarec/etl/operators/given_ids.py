"""Ids and keys that the source holds already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from terarec.etl.columns import REFUSED_SHOWN, Block, Column, ColumnType, RowFaultError
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction, PlainLists
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import accepted_list, refused
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import GivenIds


class GivenIdsCode(StepCode[GivenIds]):
    """Code of `GivenIds`."""

    accepted = ("integer",)
    refuses = True

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Ids, or integers where there are keys; lists of at most `max_length`."""
        made: dict[str, ColumnType] = {}
        for (name, output), rows in zip(self.spec.pairs, self.spec.rows, strict=True):
            found = self.input_type(types, name)
            bounds = [bound for bound in (found.max_length, self.spec.max_length) if bound is not None]
            longest = min(bounds, default=None) if found.is_list else None
            made[output] = ColumnType("integer" if rows is None else "id", found.is_list, longest)
        return made

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """As told; keys have none."""
        return {output: rows for output, rows in zip(self.writes, self.spec.rows, strict=True) if rows is not None}

    def apply(self, block: Block, state: State | None) -> Block:
        """The same numbers, checked."""
        made = {}
        for (name, output), rows in zip(self.spec.pairs, self.spec.rows, strict=True):
            self._check_lengths(block, name)
            column = block.columns[name]
            if rows is not None:
                wrong = (column.values < 0) | (column.values >= rows) | column.is_missing()
                if wrong.any():
                    raise refused(block, name, wrong, accepted_id(rows))
                column = column.like(Column("id", column.values))
            made[output] = column
        return block.with_columns(made)

    def _check_lengths(self, block: Block, name: str) -> None:
        offsets, most = block.columns[name].offsets, self.spec.max_length
        if offsets is None or most is None:
            return
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths > most)
        if long.size:
            got = [f"got a list of {length}" for length in lengths[long][:REFUSED_SHOWN].tolist()]
            raise RowFaultError(name, block.rows[long], got, accepted_list(most))

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """Python integers as they are."""
        return [
            PlainFunction((name,), (output,), partial(self._plain, rows), takes="values" if rows is None else "raw")
            for (name, output), rows in zip(self.spec.pairs, self.spec.rows, strict=True)
        ]

    def _plain(self, rows: int | None, values: list[Any] | PlainLists) -> Sequence[Any]:
        items = values.items if isinstance(values, PlainLists) else values
        if rows is not None:
            for row, value in enumerate(items):
                if type(value) is not int or not 0 <= value < rows:
                    raise RefusedValueError(row)
            items = np.array(items, dtype=np.int64)
        if not isinstance(values, PlainLists):
            return (items,)
        if self.spec.max_length is not None and max(map(len, values.each()), default=0) > self.spec.max_length:
            raise RefusedValueError(0)
        return (PlainLists(items, values.offsets),)


def accepted_id(rows: int) -> str:
    """What one of `rows` ids is."""
    return f"an id, 0 <= id < {rows}"
