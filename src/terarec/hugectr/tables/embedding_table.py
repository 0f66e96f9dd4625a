"""EmbeddingTableConfig in the words of every release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import Initializer_t
from terarec.hugectr.tables.kinds import (
    NOTHING,
    TEXT,
    instance,
    member,
    number,
    optional,
    whole,
)
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Fits, Parameter, Status, Table


def _sizes_are_good(values: Mapping[str, Any]) -> str | None:
    if values["max_vocabulary_size"] == 0:
        return "max_vocabulary_size: got 0, expected a number of rows, or -1 for a table that grows"
    if values["ev_size"] > 256:
        return f"ev_size: got {values['ev_size']}, expected at most 256"
    return None


_FIRST_ROWS = "rows start from U(+-sqrt(1 / max_vocabulary_size))"
_OPTIMIZER = Parameter(
    name="opt_params",
    kind=optional(instance(OptParamsPy)),
    default=None,
    meaning="the table's optimizer; None: the model's",
    aliases=("opt_params_py", "opt_params_or_empty"),  # of 3.7 to 4.1, and of 4.2 on
)
_SIZES = (
    Parameter(name="max_vocabulary_size", kind=whole(-1), since="3.7", meaning="rows; -1: a table that grows"),
    Parameter(name="ev_size", kind=whole(1), since="3.7", meaning="width of a vector"),
)


def _key_bounds(since: str, until: str, *, is_positional: bool = False) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name=name,
            kind=whole(),
            default=0,
            since=since,
            until=until,
            status=Status.IGNORED,
            why="the number of rows already bounds the keys",
            meaning=f"{what} key",
            is_positional=is_positional,
        )
        for name, what in (("min_key", "least"), ("max_key", "greatest"))
    )


EMBEDDING_TABLE_CONFIG = Table(
    name="EmbeddingTableConfig",
    meaning="a table of an embedding collection",
    rows=(
        Parameter(name="name", kind=TEXT, since="4.2", meaning="its name"),
        *_SIZES,
        replace(_OPTIMIZER, since="4.2"),
        Parameter(
            name="init_param",
            kind=NOTHING,
            default=None,
            since="4.2",
            status=Status.REFUSED,
            why=_FIRST_ROWS,
            meaning="how rows start",
            aliases=("init_param_or_empty",),
        ),
        *_key_bounds("4.2", "23.02"),
    ),
    rules=(_sizes_are_good,),
)


def _older_table(
    name: str, since: str, until: str, first: str, *rest: Parameter, fits: Fits = lambda args, kwargs: False
) -> Table:
    return Table(
        name=name,
        meaning=f"a table of an embedding collection ({since} to {until})",
        rows=(
            Parameter(name=first, kind=whole(0), since=since, until=until, meaning="its number, which is its name"),
            *_SIZES,
            *rest,
        ),
        rules=(_sizes_are_good,),
        fits=fits,
        derive=lambda values: {"min_key": 0, "max_key": 0, **values, "name": str(values[first]), "init_param": None},
    )


_OF_4_1 = {"initializer_type", "up_bound", "max_sequence_len"}


def _has_number(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return "table_id" in kwargs or bool(args and not isinstance(args[0], str))


def _is_of_4_1(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # The fourth place was the least key's until 4.1, which has the optimizer there.
    has_optimizer = len(args) > 3 and isinstance(args[3], OptParamsPy)
    return _has_number(args, kwargs) and (has_optimizer or bool(_OF_4_1 & set(kwargs)))


_TABLE_4_1 = _older_table(
    "EmbeddingTableConfig",
    "4.1",
    "4.1",
    "table_id",
    replace(_OPTIMIZER, since="4.1"),
    Parameter(
        name="initializer_type",
        kind=member(Initializer_t),
        default=Initializer_t.Default,
        since="4.1",
        until="4.1",
        status=Status.REFUSED,
        why=_FIRST_ROWS,
        meaning="how rows start",
    ),
    Parameter(
        name="up_bound",
        kind=number(),
        default=-1.0,
        since="4.1",
        until="4.1",
        status=Status.REFUSED,
        why=_FIRST_ROWS,
        meaning="greatest first weight; -1: sqrt(1 / max_vocabulary_size)",
    ),
    Parameter(
        name="max_sequence_len",
        kind=whole(-1),
        default=-1,
        since="4.1",
        until="4.1",
        status=Status.IGNORED,
        why="no first weight depends on it",
        meaning="length of a sequence",
    ),
    fits=_is_of_4_1,
)
_TABLE_3_8 = _older_table(
    "EmbeddingTableConfig",
    "3.8",
    "4.0",
    "table_id",
    *_key_bounds("3.8", "4.0", is_positional=True),
    replace(_OPTIMIZER, since="3.8"),
    fits=_has_number,
)
_TABLE_3_7 = _older_table(
    "EmbeddingTablePlaceHolder",
    "3.7",
    "3.7",
    "id_space",
    *_key_bounds("3.7", "3.7", is_positional=True),
    replace(_OPTIMIZER, since="3.7"),
)


class EmbeddingTableConfig(Record, forms=(EMBEDDING_TABLE_CONFIG, _TABLE_4_1, _TABLE_3_8)):
    """A table of an embedding collection; ``max_vocabulary_size`` -1 is a table that grows."""


class EmbeddingTablePlaceHolder(EmbeddingTableConfig, forms=(_TABLE_3_7,)):
    """What release 3.7 has for it: the outputs of its lookups have two dimensions."""
