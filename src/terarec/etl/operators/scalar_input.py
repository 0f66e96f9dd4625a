"""The check of inputs that hold one value a row."""

from __future__ import annotations

from collections.abc import Sequence

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.operators.contract import ColumnTypes


def scalar_input(types: ColumnTypes, name: str, accepted: Sequence[str]) -> ColumnType:
    """The type of the input `name`.

    Raises:
        ConfigError: a column of lists, or of a kind that is not `accepted`.
    """
    found = types[name]
    if found.is_list or found.kind not in accepted:
        raise ConfigError(f"column {name!r} holds {found}, expected one {' or '.join(accepted)} a row")
    return found


def group_inputs(types: ColumnTypes, group: str, order: str) -> None:
    """Check the columns by which rows are grouped and ordered.

    Raises:
        ConfigError: lists, numbers as `group`, or an `order` that is no number.
    """
    scalar_input(types, group, ("text", "integer", "hex32"))
    scalar_input(types, order, ("integer", "number"))
