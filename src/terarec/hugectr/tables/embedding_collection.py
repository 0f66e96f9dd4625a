"""EmbeddingTableConfig, EmbeddingCollectionConfig and EmbeddingPlanner with what their methods take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import CommunicationStrategy, CompressionStrategy
from terarec.hugectr.tables.kinds import (
    NOTHING,
    TEXT,
    TRUTH,
    either,
    instance,
    listed,
    mapped,
    member,
    one_of,
    one_or_list,
    optional,
    pair,
    whole,
)
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Status, Table


def _sizes_are_good(values: Mapping[str, Any]) -> str | None:
    if values["max_vocabulary_size"] == 0:
        return "max_vocabulary_size: got 0, expected a number of rows, or -1 for a table that grows"
    if values["ev_size"] > 256:
        return f"ev_size: got {values['ev_size']}, expected at most 256"
    return None


_OPTIMIZER = Parameter(
    name="opt_params",
    kind=optional(instance(OptParamsPy)),
    default=None,
    meaning="the table's optimizer; None: the model's",
)
_SIZES = (
    Parameter(name="max_vocabulary_size", kind=whole(-1), since="3.7", meaning="rows; -1: a table that grows"),
    Parameter(name="ev_size", kind=whole(1), since="3.7", meaning="width of a vector"),
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
            why="rows start from U(+-sqrt(1 / max_vocabulary_size))",
            meaning="how rows start",
        ),
    ),
    rules=(_sizes_are_good,),
)


def _older_table(first: str, since: str, until: str) -> Table:
    keys = tuple(
        Parameter(
            name=name,
            kind=whole(),
            default=0,
            since=since,
            until=until,
            status=Status.IGNORED,
            why="the number of rows already bounds the keys",
            meaning=f"{what} key",
        )
        for name, what in (("min_key", "least"), ("max_key", "greatest"))
    )
    return Table(
        name="EmbeddingTableConfig",
        meaning=f"a table of an embedding collection ({since} to {until})",
        rows=(
            Parameter(name=first, kind=whole(0), since=since, until=until, meaning="its number, which is its name"),
            *_SIZES,
            *keys,
            replace(_OPTIMIZER, since=since),
        ),
        rules=(_sizes_are_good,),
        fits=lambda args, kwargs: (
            first in kwargs or bool(first == "table_id" and args and not isinstance(args[0], str))
        ),
        derive=lambda values: {"name": str(values[first]), "init_param": None},
    )


class EmbeddingTableConfig(
    Record,
    forms=(EMBEDDING_TABLE_CONFIG, _older_table("table_id", "3.8", "4.1"), _older_table("id_space", "3.7", "3.7")),
):
    """A table of an embedding collection; ``max_vocabulary_size`` -1 is a table that grows."""


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
            kind=listed(pair(one_of("mp", "dp"), listed(either(TEXT, pair(TEXT, whole(1)))))),
            since="4.2",
            meaning="groups of tables: in parts (mp) or as copies (dp)",
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
            kind=listed(one_of("mp", "dp")),
            since="4.1",
            until="4.1",
            meaning="how each group is spread",
        ),
    ),
)
