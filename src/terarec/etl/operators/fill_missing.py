"""Missing values become a value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column, ColumnType, Kind
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.operators.plain_function import PlainFunction, item_function
from terarec.etl.operators.values import value_of
from terarec.spec import FillMissing


class FillMissingCode(NumberStepCode[FillMissing]):
    """Code of `FillMissing` with a value."""

    keeps_integers = True
    accepted = ("number", "integer", "text", "hex32")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """The types of the inputs, and numbers for the indicators."""
        inputs = [self.input_type(types, name) for name in self.spec.columns]
        for name, found in zip(self.spec.columns, inputs, strict=True):
            self.check_fill(name, found)
        made = dict(zip(self.writes, inputs, strict=False))
        for name, found in zip(self.spec.indicators, inputs, strict=False):
            made[name] = ColumnType("number", found.is_list, found.max_length)
        return made

    def check_fill(self, name: str, found: ColumnType) -> None:
        """Raise unless the input `name` can hold what fills it."""
        if self.spec.value is not None:
            try:
                value_of(found.kind, self.spec.value)
            except ConfigError as error:
                raise ConfigError(f"column {name!r}: {error}") from None

    def fill_of(self, name: str, kind: Kind, state: State | None) -> Any:
        """What missing values of the input `name`, a column of `kind`, become."""
        assert self.spec.value is not None
        return value_of(kind, self.spec.value)

    def figures(self, name: str, state: State | None) -> tuple[float, ...]:
        """What missing numbers become."""
        return (float(self.fill_of(name, "number", state)),)

    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """The number, or where it is missing the one that fills it."""
        return np.where(np.isnan(numbers), figures[0], numbers)

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """Numbers by the formula, other values one by one, and the indicators."""
        functions = list(super().plain_functions(types, state))
        for name, output in self.spec.pairs:
            found = types[name]
            if found.kind != "number":
                call = partial(_filled_values, self._plain_fill(name, found.kind, state))
                functions.append(item_function(name, output, call, is_list=found.is_list))
        for name, output in zip(self.spec.columns, self.spec.indicators, strict=False):
            functions.append(item_function(name, output, _indicated, is_list=types[name].is_list))
        return functions

    def _plain_fill(self, name: str, kind: Kind, state: State | None) -> Any:
        """What fills a list of plain values; hexadecimal digits are text there."""
        if kind == "hex32":
            return self.spec.value
        fill = self.fill_of(name, kind, state)
        return int(fill) if kind == "integer" else fill

    def apply(self, block: Block, state: State | None) -> Block:
        """Fill, and say where."""
        made: dict[str, Column] = {}
        for position, (name, output) in enumerate(self.spec.pairs):
            column = block.columns[name]
            made[output] = column.like(_filled(column, self.fill_of(name, column.type, state)))
            if self.spec.indicator:
                indicator = column.is_missing().astype(np.float64)
                made[self.spec.indicators[position]] = column.like(Column("number", indicator))
        return block.with_columns(made)


def _filled_values(fill: Any, values: list[Any]) -> list[Any]:
    return [fill if value is None or value == "" else value for value in values]


def _indicated(values: Any) -> NDArray[np.float64]:
    if isinstance(values, list):
        return np.array([value is None or value == "" for value in values], dtype=np.float64)
    return np.asarray(np.isnan(values), dtype=np.float64)


def _filled(column: Column, value: Any) -> Column:
    if column.type != "text":
        if column.type != "number" and value == 0:
            return Column(column.type, column.values)  # which are 0 where missing
        filled = np.where(column.is_missing(), value, column.values).astype(column.values.dtype, copy=False)
        return Column(column.type, filled)
    missing = column.is_missing()
    if not missing.any():
        return column.flat()
    return Column("text", pc.if_else(pa.array(missing), pa.scalar(value, pa.large_string()), column.values))
