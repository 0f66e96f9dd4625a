"""Several columns to one text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction
from terarec.etl.operators.step_code import StepCode
from terarec.spec import Cross

SEPARATOR = "\x1f"
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)


class CrossCode(StepCode[Cross]):
    """Code of `Cross`."""

    accepted = ("text", "integer", "hex32")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Text."""
        for name in self.spec.columns:
            if self.input_type(types, name).is_list:
                raise ConfigError(f"column {name!r} holds {types[name]}, expected one value a row")
        return {self.spec.output: ColumnType("text")}

    def apply(self, block: Block, state: State | None) -> Block:
        """The values joined by the unit separator."""
        columns = [block.columns[name] for name in self.spec.columns]
        parts = [_texts(column) for column in columns]
        joined = pc.binary_join_element_wise(*parts, pa.scalar(SEPARATOR, pa.large_string()))
        all_missing = np.logical_and.reduce([column.is_missing() for column in columns])
        if all_missing.any():
            joined = pc.if_else(pa.array(all_missing), pa.scalar(None, pa.large_string()), joined)
        return block.with_columns({self.spec.output: Column("text", joined)})

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of plain values."""
        spell = [_PLAIN_SPELLINGS[types[name].kind] for name in self.spec.columns]

        def call(*columns: list[Any]) -> Sequence[Any]:
            spelled = [[one(value) for value in values] for one, values in zip(spell, columns, strict=True)]
            return ([SEPARATOR.join(parts) if any(parts) else None for parts in zip(*spelled, strict=True)],)

        return [PlainFunction(self.spec.columns, (self.spec.output,), call)]


_PLAIN_SPELLINGS: Mapping[str, Callable[[Any], str]] = {
    "text": lambda text: text or "",
    "integer": lambda number: "" if number is None else str(number),
    "hex32": lambda digits: digits.lower().zfill(8) if digits else "",
}


def _texts(column: Column) -> pa.LargeStringArray:
    """The values as text, "" where missing."""
    if column.type == "text":
        return column.values.fill_null("")
    if column.type == "integer":
        return pa.array(column.values, mask=column.missing).cast(pa.large_string()).fill_null("")
    digits = _DIGITS[(column.values[:, None] >> _SHIFTS) & np.uint32(15)]
    offsets = pa.py_buffer(np.arange(0, 8 * len(column.values) + 1, 8, dtype=np.int64))
    texts = pa.LargeStringArray.from_buffers(len(column.values), offsets, pa.py_buffer(np.ascontiguousarray(digits)))
    return texts if column.missing is None else pc.if_else(pa.array(column.missing), "", texts)
