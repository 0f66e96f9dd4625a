"""What the code of most operators has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from terarec.errors import ConfigError
from terarec.etl.columns import Block, ColumnType
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State, Statistic
from terarec.etl.operators.plain_function import PlainFunction

SpecT = TypeVar("SpecT", bound=Any)


class StepCode(Generic[SpecT]):
    """Base of an `OperatorCode`: stateless unless a subclass says otherwise. See the protocol for the methods.

    Attributes:
        spec: the step.
        stage: see `contract.Stage`; a class whose stage depends on its spec sets it when made.
        table: the side table that a statistic observes.
    """

    stage: Stage = "stateless"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "number", "hex32", "id")
    """Kinds of the inputs that the operator takes."""
    takes_lists: ClassVar[bool] = False
    """Whether the inputs must be lists; else lists are taken item by item."""
    refuses: bool = False
    """Whether `apply` may refuse values, by a `RowFaultError`."""

    def __init__(self, spec: SpecT) -> None:
        self.spec = spec
        self.table: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step takes while a data set is prepared."""
        names: tuple[str, ...] = self.spec.reads
        return names

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        names: tuple[str, ...] = self.spec.writes
        return names

    @property
    def removes(self) -> tuple[str, ...]:
        """Columns that no later step may read."""
        return ()

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """By default the types of the inputs in ``spec.pairs``, whose kinds must be `accepted`."""
        return {output: self.input_type(types, name) for name, output in self.spec.pairs}

    def input_type(self, types: ColumnTypes, name: str) -> ColumnType:
        """The type of the input `name`, checked against `accepted`."""
        found = types[name]
        if found.kind not in self.accepted:
            raise ConfigError(f"column {name!r} holds {found}, expected {' or '.join(self.accepted)}")
        if self.takes_lists and not found.is_list:
            raise ConfigError(f"column {name!r} holds one {found} a row, expected lists")
        return found

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """By default those of the inputs, for outputs that are made one by one of these."""
        return {output: rows[name] for name, output in getattr(self.spec, "pairs", ()) if name in rows}

    def apply(self, block: Block, state: State | None) -> Block:
        """Do the step to the rows of a block."""
        raise NotImplementedError

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """What does the step to a few records; steps that are not done to records have none."""
        return ()

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """A fresh statistic; steps that learn nothing have none."""
        raise NotImplementedError(f"{type(self.spec).__name__} learns nothing")

    def load_state(self, directory: Path, name: str) -> State:
        """Read what `State.save` wrote; steps that learn nothing have none."""
        raise NotImplementedError(f"{type(self.spec).__name__} learns nothing")
