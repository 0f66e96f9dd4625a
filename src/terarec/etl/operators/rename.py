"""Other names for columns."""

from __future__ import annotations

from collections.abc import Mapping

from terarec.etl.columns import Block
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import StepCode
from terarec.spec import Rename


class RenameCode(StepCode[Rename]):
    """Code of `Rename`."""

    @property
    def removes(self) -> tuple[str, ...]:
        """The old names."""
        return tuple(name for name in self.spec.names if name not in self.spec.names.values())

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """The types of the old names."""
        return {new: types[old] for old, new in self.spec.names.items()}

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Those of the old names."""
        return {new: rows[old] for old, new in self.spec.names.items() if old in rows}

    def apply(self, block: Block, state: State | None) -> Block:
        """The same columns under other names."""
        kept = {name: column for name, column in block.columns.items() if name not in self.spec.names}
        named = {new: block.columns[old] for old, new in self.spec.names.items()}
        return Block({**kept, **named}, block.rows, block.split)
