"""EmbeddingTableConfig, EmbeddingCollectionConfig and EmbeddingPlanner with what their methods take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import CommunicationStrategy, CompressionStrategy, Initializer_t
from terarec.hugectr.tables.kinds import (
    NOTHING,
    TEXT,
    TRUTH,
    either,
    instance,
    listed,
    mapped,
    member,
    number,
    one_of,
    one_or_list,
    optional,
    pair,
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


EMBEDDING_COLLECTION_CONFIG = Table(
    name="EmbeddingCollectionConfig",
    meaning="an embedding collection",
    rows=(
        Parameter(
            name="use_exclusive_keys",
            kind=TRUTH,
            default=False,
            since="4.2",
            status=Status.IGNORED,
            why="it only chooses how a GPU sorts keys",
            meaning="no key is in two tables",
        ),
        Parameter(
            name="comm_strategy",
            kind=member(CommunicationStrategy),
            default=CommunicationStrategy.Uniform,
            since="23.04",
            status=Status.IGNORED,
            why="it only chooses how GPUs exchange vectors",
            meaning="how GPUs exchange vectors",
        ),
    ),
)
_LAYOUTS = ("feature_major", "batch_major")
COLLECTION_CONFIG_23_02 = Table(
    name="EmbeddingCollectionConfig",
    meaning="an embedding collection (23.02)",
    rows=(
        Parameter(
            name="output_layout",
            kind=one_of(*_LAYOUTS),
            default="feature_major",
            since="23.02",
            until="23.02",
            meaning="batch_major: one output of all lookups, named by theirs with commas between",
        ),
        Parameter(
            name="indices_only",
            kind=TRUTH,
            default=False,
            since="23.02",
            until="23.02",
            status=Status.IGNORED,
            why="it only chooses how a GPU takes keys over from the reader",
            meaning="readers hand on keys alone",
        ),
    ),
    fits=lambda args, kwargs: bool(
        {"output_layout", "indices_only"} & set(kwargs) or (args[:1] and args[0] in _LAYOUTS)
    ),
    derive=lambda values: {"use_exclusive_keys": False, "comm_strategy": CommunicationStrategy.Uniform},
)
_COMBINER = one_of("sum", "average", "mean", "concat")
EMBEDDING_LOOKUP = Table(
    name="EmbeddingCollectionConfig.embedding_lookup",
    meaning="a lookup in a table, or with lists of as many lookups whose outputs are joined",
    rows=(
        Parameter(
            name="table_config",
            kind=either(instance(EmbeddingTableConfig), listed(instance(EmbeddingTableConfig))),
            since="4.2",
            meaning="table or tables",
            aliases=("emb_table",),  # of 3.7
        ),
        Parameter(name="bottom_name", kind=either(TEXT, listed(TEXT)), since="4.2", meaning="sparse input or inputs"),
        Parameter(name="top_name", kind=TEXT, since="4.2", meaning="output"),
        Parameter(
            name="combiner",
            kind=either(_COMBINER, listed(_COMBINER)),
            since="4.2",
            meaning="how the vectors of a slot become one",
        ),
    ),
)
PLANNER_LOOKUP = replace(
    EMBEDDING_LOOKUP,
    name="EmbeddingPlanner.embedding_lookup",
    meaning="a lookup in a table",
    rows=tuple(
        replace(row, kind=kind, since="3.7", until="4.1")
        for row, kind in zip(
            EMBEDDING_LOOKUP.rows, (instance(EmbeddingTableConfig), TEXT, TEXT, _COMBINER), strict=True
        )
    ),
)
SHARD = Table(
    name="EmbeddingCollectionConfig.shard",
    meaning="which GPU has which rows",
    rows=(
        Parameter(name="shard_matrix", kind=listed(listed(TEXT)), since="4.2", meaning="tables of every GPU, by name"),
        Parameter(
            name="shard_strategy",
            kind=listed(pair(one_of("mp", "dp", "localized"), listed(either(TEXT, pair(TEXT, whole(1)))))),
            since="4.2",
            meaning="groups of tables: in parts (mp, or localized) or as copies (dp)",
        ),
        Parameter(
            name="compression_strategy",
            kind=mapped(member(CompressionStrategy), listed(TEXT)),
            default={},
            since="23.08",
            status=Status.IGNORED,
            why="it only chooses what GPUs send",
            meaning="what GPUs send of which tables",
        ),
    ),
)
PLAN_FILE = Table(
    name="EmbeddingPlanner.create_embedding_collection",
    meaning="the collection of all lookups (3.7 to 4.0)",
    rows=(Parameter(name="plan_file", kind=TEXT, since="3.7", until="4.0", meaning="JSON file: which GPU has what"),),
)
PLAN_MATRIX = Table(
    name="EmbeddingPlanner.create_embedding_collection",
    meaning="the collection of all lookups (4.1)",
    rows=(
        Parameter(
            name="shard_matrix",
            kind=listed(listed(one_of(0, 1))),
            since="4.1",
            until="4.1",
            meaning="for every GPU and every table whether it is there",
        ),
        Parameter(
            name="emb_table_group_strategy",
            kind=listed(one_or_list(whole(0))),
            since="4.1",
            until="4.1",
            meaning="groups of tables, by number",
        ),
        Parameter(
            name="emb_table_placement_strategy",
            kind=listed(one_of("mp", "dp", "localized")),
            since="4.1",
            until="4.1",
            meaning="how each group is spread",
        ),
    ),
)
