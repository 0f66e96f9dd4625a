"""Lists of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column, ColumnType, Kind, concatenate_columns
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction, PlainLists, joined
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import value_of
from terarec.spec import Pad


class PadCode(StepCode[Pad]):
    """Code of `Pad`."""

    takes_lists = True

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Lists of the length that is asked for."""
        made = {}
        for name, output in self.spec.pairs:
            found = self.input_type(types, name)
            try:
                value = value_of(found.kind, self.spec.value)
            except ConfigError as error:
                raise ConfigError(f"column {name!r}: {error}") from None
            if found.kind == "id" and value < 0:
                raise ConfigError(f"column {name!r}: got {self.spec.value!r}, expected an id >= 0")
            made[output] = ColumnType(found.kind, True, self.spec.length)
        return made

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Those of the inputs, the padding included."""
        return {output: max(rows[name], int(self.spec.value) + 1) for name, output in self.spec.pairs if name in rows}

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of plain lists."""
        return [
            PlainFunction((name,), (output,), partial(self._plain, types[name].kind))
            for name, output in self.spec.pairs
        ]

    def _plain(self, kind: Kind, lists: PlainLists) -> Sequence[Any]:
        length = self.spec.length
        padding = [self.spec.value if kind == "hex32" else value_of(kind, self.spec.value)] * length
        return (joined([[*items[:length], *padding[len(items) :]] for items in lists.each()], kind),)

    def apply(self, block: Block, state: State | None) -> Block:
        """Cut, or filled up at the end."""
        made = {}
        for name, output in self.spec.pairs:
            column = block.columns[name]
            assert column.offsets is not None
            places = np.arange(self.spec.length)
            items = column.offsets[:-1, None] + places
            # The padding is one more value behind the others.
            items = np.where(places < np.diff(column.offsets)[:, None], items, len(column.values)).ravel()
            flat = concatenate_columns([column.flat(), self._padding(column)]).take(items)
            offsets = np.arange(len(column) + 1, dtype=np.int64) * self.spec.length
            made[output] = Column(flat.type, flat.values, flat.missing, offsets)
        return block.with_columns(made)

    def _padding(self, column: Column) -> Column:
        value = value_of(column.type, self.spec.value)
        if column.type == "text":
            return Column("text", pa.array([value], type=pa.large_string()))
        return Column(column.type, np.array([value], dtype=column.values.dtype))
