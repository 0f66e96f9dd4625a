"""Operators that name, cut and compute columns, or choose rows. See docs/workflows.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from terarec.spec import checks
from terarec.spec.operators.mapped import InputColumns, column_named, columns_named
from terarec.spec.quoting import quoted

ValueType = Literal["text", "integer", "number", "hex32"]
_VALUE_TYPES = ("text", "integer", "number", "hex32")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rename:
    """Gives columns other names, all at once: {"a": "b", "b": "a"} swaps two."""

    kind: ClassVar[str] = "rename"
    names: Mapping[str, str]

    def __post_init__(self) -> None:
        names = [*self.names, *self.names.values()]
        if not self.names or not all(isinstance(name, str) and name for name in names):
            checks.reject(self, "names", f"got {quoted(dict(self.names))}, expected old names with their new names")
        checks.distinct(self, "names", tuple(self.names.values()))

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared; they are gone after it."""
        return tuple(self.names)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return tuple(self.names)

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return tuple(self.names.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class LambdaOp(InputColumns):
    """Calls a function that can be imported, such as "shop.features:price_per_item".

    It takes one Arrow array for each of `columns` (nulls are missing) and returns one for each of `outputs`: the array
    for one output, a tuple of arrays for several. Row i of the result may depend on row i of the arguments alone.

    Attributes:
        columns: the inputs.
        outputs: the columns that the function makes.
        function: "package.module:name".
        output_type: of all outputs.
        spark_function: "package.module:name" of the same on Spark's columns; without it Spark cannot run the workflow.
        record_function: "package.module:name" of the same on one row's Python values, None for a missing one and hex32
            as int; it gives a value, or a tuple for several outputs. It spares a served record Arrow's arrays.
    """

    kind: ClassVar[str] = "lambda_op"
    outputs: tuple[str, ...]
    function: str
    output_type: ValueType
    spark_function: str | None = None
    record_function: str | None = None

    def __post_init__(self) -> None:
        InputColumns.__post_init__(self)
        columns_named(self, "outputs")
        checks.one_of(self, "output_type", _VALUE_TYPES)
        for field in ("function", "spark_function", "record_function"):
            value = getattr(self, field)
            if (value is not None or field == "function") and not (
                isinstance(value, str) and _FUNCTION.fullmatch(value)
            ):
                checks.fail(self, field, "a function that can be imported, as 'package.module:name'")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitText(InputColumns):
    """Cuts a text column at `separator` into its first parts; a part that is absent or empty is missing.

    Attributes:
        columns: one text column.
        separator: text between the parts.
        outputs: one for each part that is wanted; what follows the last one's separator is left out.
        types: of the outputs, one for each; a part that is no such value is bad input.
    """

    kind: ClassVar[str] = "split_text"
    separator: str
    outputs: tuple[str, ...]
    types: tuple[ValueType, ...]

    def __post_init__(self) -> None:
        InputColumns.__post_init__(self)
        columns_named(self, "outputs")
        if len(self.columns) != 1:
            checks.fail(self, "columns", "one column name")
        if not isinstance(self.separator, str) or not self.separator:
            checks.fail(self, "separator", "a text that is not empty")
        wrong = any(value_type not in _VALUE_TYPES for value_type in self.types)
        if wrong or len(self.types) != len(self.outputs):
            checks.fail(self, "types", f"one of {', '.join(map(repr, _VALUE_TYPES))} for each of outputs")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRows:
    """Keeps the rows whose `column` is one of `values`, or lies within the bounds; a missing value is not kept.

    At serving every record is kept.

    Attributes:
        column: text, integer or hex32 for `values`; number or integer for the bounds.
        values: as texts; integers in decimal, hex32 as hexadecimal digits.
        at_least: the lowest number that is kept.
        at_most: the highest number that is kept.
    """

    kind: ClassVar[str] = "keep_rows"
    column: str
    values: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        column_named(self, "column")
        bounds = [bound for bound in ("at_least", "at_most") if getattr(self, bound) is not None]
        if bool(self.values) is bool(bounds):
            checks.reject(self, "", "expected either values, or at_least or at_most or both")
        if not isinstance(self.values, tuple) or not all(isinstance(value, str) and value for value in self.values):
            checks.fail(self, "values", "texts that are not empty")
        for bound in bounds:
            checks.finite_float(self, bound)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return (self.column,)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: none, as every record is kept."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return ()
