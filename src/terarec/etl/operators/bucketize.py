"""Numbers to ids of intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction, as_numbers, item_function
from terarec.etl.operators.step_code import StepCode
from terarec.spec import MISSING_ID, Bucketize


class BucketizeCode(StepCode[Bucketize]):
    """Code of `Bucketize` with given boundaries."""

    accepted = ("number", "integer")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Ids."""
        return {
            output: ColumnType("id", found.is_list, found.max_length)
            for output, found in StepCode.output_types(self, types).items()
        }

    def boundaries_of(self, name: str, state: State | None) -> tuple[float, ...]:
        """The boundaries for the input `name`."""
        return self.spec.boundaries

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """The missing value's id, and one interval more than boundaries."""
        return {output: len(self.boundaries_of(name, state)) + 2 for name, output in self.spec.pairs}

    def apply(self, block: Block, state: State | None) -> Block:
        """1 + the number of boundaries that are <= x."""
        made = {}
        for name, output in self.spec.pairs:
            column = block.columns[name]
            made[output] = column.like(Column("id", _ids(self._bounds(name, state), column.numbers())))
        return block.with_columns(made)

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of numbers, column by column."""
        functions = []
        for name, output in self.spec.pairs:
            bounds = self._bounds(name, state)
            if types[name].is_list:
                functions.append(item_function(name, output, partial(_ids_of_items, bounds), is_list=True))
            else:
                functions.append(PlainFunction((name,), (output,), partial(_ids, bounds), takes="matrix"))
        return functions

    def _bounds(self, name: str, state: State | None) -> NDArray[np.float64]:
        return np.asarray(self.boundaries_of(name, state), dtype=np.float64)


def _ids(boundaries: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Of ``numbers float64[...]``, NaN being missing."""
    ids = np.searchsorted(boundaries, numbers, side="right").astype(np.int64, copy=False) + 1
    ids[np.isnan(numbers)] = MISSING_ID
    return ids


def _ids_of_items(boundaries: NDArray[np.float64], items: Any) -> NDArray[np.int64]:
    return _ids(boundaries, as_numbers(items))
