# SPDX-License-Identifier: Apache-2.0
"""Parameters of fitted steps, as the files of states have them, read and validated as specs are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import ConfigError, FormatError
from terarec.spec import checks, from_data


@dataclass(frozen=True, kw_only=True)
class FittedParams(checks.Checked):
    """Parameters of a column, which are finite numbers."""


def params_of(names: Sequence[str]) -> type[FittedParams]:
    """Return a class of parameters of these names, for an operator of a user."""
    fields = [(name, checks.Finite) for name in names]
    return dataclasses.make_dataclass("Params", fields, bases=(FittedParams,), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class ScaleParams(FittedParams):
    """Mean and deviation, which is positive."""

    mean: checks.Finite
    deviation: checks.Positive


@dataclass(frozen=True, kw_only=True)
class RangeParams(FittedParams):
    """Smallest and largest number."""

    minimum: checks.Finite
    maximum: checks.Finite

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite_float(self, "maximum", low=self.minimum)


@dataclass(frozen=True, kw_only=True)
class ShiftParams(FittedParams):
    """Number to add."""

    shift: checks.Finite


@dataclass(frozen=True, kw_only=True)
class MedianParams(FittedParams):
    """Median."""

    median: checks.Finite


@dataclass(frozen=True, kw_only=True)
class BoundaryParams(FittedParams):
    """Boundaries of intervals, ascending."""

    boundaries: Annotated[tuple[float, ...], checks.list_of(checks.number())]

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(one > other for one, other in itertools.pairwise(self.boundaries)):
            checks.fail(self, "boundaries", "ascending numbers")


StateT = TypeVar("StateT")


def decode_state(state_type: type[StateT], data: object, where: str) -> StateT:
    """Return a part of a state as a spec is read from JSON.

    Raises:
        FormatError: An unknown, missing or mistyped field, or a value that `state_type` rejects.
    """
    try:
        return from_data(state_type, data, where)
    except ConfigError as error:
        raise FormatError(error.where, error.problem) from None


def check_counts(table: pa.Table, path: Path) -> None:
    """Raise `FormatError` unless the counts of a table are 0 or more."""
    least = pc.min(table.column("count")).as_py()
    if least is not None and least < 0:
        raise FormatError(f"{path}, column 'count'", f"holds {least}, expected counts >= 0")
