"""Values to ids by their hash."""

from __future__ import annotations

from collections.abc import Mapping

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import hashes_of
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
        for output, name in zip(self.writes, self.spec.columns, strict=True):
            column = block.columns[name]
            ids = hashes_of(column, self.spec.seed) % self.spec.buckets + 1
            ids[column.is_missing()] = MISSING_ID
            made[output] = column.like(Column("id", ids))
        return block.with_columns(made)
