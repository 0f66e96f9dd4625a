"""Functions that can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column, ColumnType, from_arrow, to_arrow
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import StepCode
from terarec.spec import LambdaOp


class LambdaOpCode(StepCode[LambdaOp]):
    """Code of `LambdaOp`."""

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """As told, one value a row."""
        imported(self.spec.function)
        return {output: ColumnType(self.spec.output_type) for output in self.spec.outputs}

    def apply(self, block: Block, state: State | None) -> Block:
        """Call the function.

        Raises:
            ConfigError: it returned something else than it should.
        """
        arguments = [to_arrow(block.columns[name]) for name in self.spec.columns]
        result = imported(self.spec.function)(*arguments)
        arrays = result if isinstance(result, tuple) else (result,)
        if len(arrays) != len(self.spec.outputs):
            raise ConfigError(
                f"{self.spec.function}: returned {len(arrays)} arrays, expected {len(self.spec.outputs)}, one for each "
                "of outputs"
            )
        pairs = zip(self.spec.outputs, arrays, strict=True)
        return block.with_columns({output: self._column(array, block.num_rows) for output, array in pairs})

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


def imported(function: str) -> Callable[..., Any]:
    """The function that ``"package.module:name"`` names.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"function {function!r}: cannot be imported ({error}), expected 'package.module:name'"
        ) from None
    if not callable(found):
        raise ConfigError(f"function {function!r}: is no function")
    result: Callable[..., Any] = found
    return result
