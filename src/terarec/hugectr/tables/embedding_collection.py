"""EmbeddingCollectionConfig and EmbeddingPlanner with what their methods take."""

from __future__ import annotations

from dataclasses import replace

from terarec.hugectr.enums import CommunicationStrategy, CompressionStrategy
from terarec.hugectr.tables.embedding_table import EmbeddingTableConfig
from terarec.hugectr.tables.kinds import (
    TEXT,
    TRUTH,
    either,
    instance,
    listed,
    mapped,
    member,
    one_of,
    one_or_list,
    pair,
    whole,
)
from terarec.hugectr.tables.table import Parameter, Status, Table

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
