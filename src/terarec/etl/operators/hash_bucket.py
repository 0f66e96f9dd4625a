"""Values to ids by their hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction, item_function
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import hashes_of
from terarec.kernels.cpu.hashes import xxh64_list
from terarec.spec import MISSING_ID, HashBucket


class HashBucketCode(StepCode[HashBucket]):
    """Code of `HashBucket`."""

    accepted = ("text", "integer", "hex32")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Ids."""
        return {
            output: ColumnType("id", found.is_list, found.max_length)
            for output, found in StepCode.output_types(self, types).items()
        }

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """The buckets and the missing value's id."""
        return dict.fromkeys(self.writes, self.spec.buckets + 1)

    def apply(self, block: Block, state: State | None) -> Block:
        """1 + hash mod buckets."""
        made = {}
        for name, output in self.spec.pairs:
            column = block.columns[name]
            ids = self._ids(hashes_of(column, self.spec.seed))
            ids[column.is_missing()] = MISSING_ID
            made[output] = column.like(Column("id", ids))
        return block.with_columns(made)

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of plain values."""
        return [
            item_function(
                name,
                output,
                self._ids_of_digits if types[name].kind == "hex32" else self._ids_of_values,
                is_list=types[name].is_list,
            )
            for name, output in self.spec.pairs
        ]

    def _ids(self, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        return hashes % self.spec.buckets + 1

    def _ids_of_values(self, values: list[Any]) -> NDArray[np.int64]:
        ids = self._ids(xxh64_list(values, self.spec.seed))
        if None in values or "" in values:
            ids[[value is None or value == "" for value in values]] = MISSING_ID
        return ids

    def _ids_of_digits(self, values: list[str | None]) -> NDArray[np.int64]:
        return self._ids_of_values([int(digits, 16) if digits else None for digits in values])
