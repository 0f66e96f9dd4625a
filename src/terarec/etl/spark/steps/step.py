"""One step of a workflow, and what its expressions need to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column

from terarec.etl.columns import ColumnType
from terarec.etl.ops import ColumnTypes
from terarec.etl.spark.expressions import column, each


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it stands in a workflow.

    Attributes:
        index: its position.
        code: of the step (its local code, which checks types and holds what is learnt).
        types: of the columns before it.
        state: what it learnt, None if nothing.
        made: types of the columns after it.
        is_judged: whether rows of which it refuses something were left out before.
    """

    index: int
    code: Any
    types: ColumnTypes
    state: Any
    made: ColumnTypes
    is_judged: bool

    @property
    def spec(self) -> Any:
        """The step's spec."""
        return self.code

    def map(self, function: Callable[[str, ColumnType, Column], Column]) -> Mapping[str, Column]:
        """The outputs, each by `function` (name, type, value) of every value of its input."""

        def of(name: str) -> Callable[[Column], Column]:
            return lambda x: function(name, self.types[name], x)

        return {output: each(self.types[name], column(name), of(name)) for name, output in self.spec.pairs}
