"""Functions that can be imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column, ColumnType, Kind, from_arrow, to_arrow
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_arrow import arrow_of_plain, plain_of_column, plain_of_python, python_of_plain
from terarec.etl.operators.plain_function import PlainFunction
from terarec.etl.operators.step_code import StepCode
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import LambdaOp
from terarec.spec.named_code import imported


class LambdaOpCode(StepCode[LambdaOp]):
    """Code of `LambdaOp`."""

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """As told, one value a row."""
        imported(self.spec.function)
        if self.spec.record_function is not None:
            imported(self.spec.record_function)
        return {output: ColumnType(self.spec.output_type) for output in self.spec.outputs}

    def apply(self, block: Block, state: State | None) -> Block:
        """Call the function.

        Raises:
            ConfigError: it returned something else than it should.
        """
        made = self._made([to_arrow(block.columns[name]) for name in self.spec.columns], block.num_rows)
        return block.with_columns(dict(zip(self.spec.outputs, made, strict=True)))

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """Calls the function of a record's values, and without one the function with Arrow arrays."""
        kinds = [types[name].kind for name in self.spec.columns]
        if self.spec.record_function is None:
            call = partial(self._plain_by_arrow, kinds)
        else:
            call = partial(self._plain_by_record, kinds, imported(self.spec.record_function))
        return [PlainFunction(self.spec.columns, self.spec.outputs, call)]

    def _plain_by_arrow(self, kinds: Sequence[Kind], *columns: Any) -> Sequence[Any]:
        arrays = [arrow_of_plain(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        return [plain_of_column(column) for column in self._made(arrays, len(arrays[0]))]

    def _plain_by_record(self, kinds: Sequence[Kind], function: Callable[..., Any], *columns: Any) -> Sequence[Any]:
        arguments = [python_of_plain(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        try:
            results = [function(*row) for row in zip(*arguments, strict=True)]
        except ValueError:
            raise RefusedValueError(0) from None  # `function` tells what is wrong with the value
        made = zip(*results, strict=True) if len(self.spec.outputs) > 1 else (results,)
        outputs = [plain_of_python(list(values), self.spec.output_type) for values in made]
        return outputs or [plain_of_python([], self.spec.output_type)] * len(self.spec.outputs)

    def _made(self, arguments: Sequence[pa.Array], num_rows: int) -> list[Column]:
        """What the function makes of Arrow arrays, a column for each output."""
        result = imported(self.spec.function)(*arguments)
        arrays = result if isinstance(result, tuple) else (result,)
        if len(arrays) != len(self.spec.outputs):
            raise ConfigError(
                f"{self.spec.function}: returned {len(arrays)} arrays, expected {len(self.spec.outputs)}, one for each "
                "of outputs"
            )
        return [self._column(array, num_rows) for array in arrays]

    def _column(self, array: Any, num_rows: int) -> Column:
        kind = self.spec.output_type
        if not isinstance(array, pa.Array | pa.ChunkedArray) or len(array) != num_rows:
            shown = f"{len(array)} values" if isinstance(array, pa.Array | pa.ChunkedArray) else type(array).__name__
            raise ConfigError(f"{self.spec.function}: returned {shown}, expected an Arrow array of {num_rows} values")
        try:
            column = from_arrow(array, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ConfigError(f"{self.spec.function}: returned {array.type}, expected values of {kind}") from None
        if column.is_list:
            raise ConfigError(f"{self.spec.function}: returned {array.type}, expected one value a row")
        if kind == "number" and np.isinf(column.values).any():
            raise ConfigError(f"{self.spec.function}: returned an infinite number, expected finite ones or null")
        return column
