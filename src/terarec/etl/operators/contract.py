"""What the code of an operator offers to the engines. Meanings are described in docs/workflows.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from terarec.etl.columns import Block, ColumnType
from terarec.etl.operators.plain_function import PlainFunction
from terarec.spec import Operator

Stage: TypeAlias = Literal["stateless", "fitted", "grouped", "rows"]
"""stateless: a row at a time; fitted: the same with a state learnt in training; grouped: looks at other rows, `apply`
takes blocks that hold all rows of each of their groups, by rising row id; rows: changes which rows there are."""

ColumnTypes: TypeAlias = Mapping[str, ColumnType]
"""Name -> type of the columns at some place of a workflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillOptions:
    """What a statistic may take while it gathers.

    Attributes:
        directory: exists; for what does not fit in memory. Its content goes with the end of the phase.
        memory_bytes: about so much before it spills; None: as much as it needs.
    """

    directory: Path
    memory_bytes: int | None = None


@runtime_checkable
class State(Protocol):
    """What a fitted step learnt. Frozen."""

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``, ``<name>.parquet`` or both (or ``<name>-<part>.parquet``) into `directory`."""
        ...


class Statistic(Protocol):
    """Gathers what a fitted step learns, block by block."""

    def observe(self, block: Block) -> Any:
        """Look at a block of training rows; threads call it at the same time. What it returns goes to `merge`."""
        ...

    def merge(self, partial: Any) -> None:
        """Take in what `observe` returned: one thread calls it, in the order of the blocks."""
        ...

    def finish(self) -> State:
        """The state, after the last block."""
        ...


class OperatorCode(Protocol):
    """The code of one step, made from its spec."""

    @property
    def spec(self) -> Operator:
        """The step."""
        ...

    @property
    def stage(self) -> Stage:
        """See `Stage`."""
        ...

    @property
    def table(self) -> str | None:
        """The side table whose blocks a statistic observes in the place of training rows, None for these."""
        ...

    @property
    def refuses(self) -> bool:
        """Whether `apply` may refuse values."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step takes while a data set is prepared."""
        ...

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        ...

    @property
    def removes(self) -> tuple[str, ...]:
        """Columns that no later step may read."""
        ...

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Types of `writes`, given those of all columns before the step (which has all of `reads`).

        Raises:
            ConfigError: an input of a type that the operator does not take; names the column and what is accepted.
        """
        ...

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Numbers of ids of those outputs that are ids, given those of all id columns before the step."""
        ...

    def apply(self, block: Block, state: State | None) -> Block:
        """Do the step to the rows of a block. The result shares the columns that the step leaves alone.

        Raises:
            RowFaultError: rows hold a value that the step does not take.
        """
        ...

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """What does the step to a few records, given the types of the columns before it.

        Where several write one output, one of them gives it as a matrix of numbers.
        """
        ...

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """A fresh statistic (fitted steps only); `types` as for `output_types`, or of the side table."""
        ...

    def load_state(self, directory: Path, name: str) -> State:
        """Read what `State.save` wrote (fitted steps only).

        Raises:
            DataNotFoundError: no such file.
            FormatError: a file of another content.
        """
        ...
