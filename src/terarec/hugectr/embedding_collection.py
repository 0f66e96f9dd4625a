# SPDX-License-Identifier: Apache-2.0
"""EmbeddingCollectionConfig, the lookups of an embedding collection, and EmbeddingPlanner, which 3.7 to 4.1 have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from typing_extensions import override

from terarec.hugectr.enums import CompressionStrategy
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, IllegalCallError, WrongInputError
from terarec.hugectr.objects import CollectionOptions, EmbeddingTableConfig, EmbeddingTablePlaceHolder
from terarec.hugectr.schema.table import bind_arguments, form_of
from terarec.io.opening import read_bytes
from terarec.spec.checks import shortened
from terarec.spec.codec import parse_json

_LOOKUP = "EmbeddingCollectionConfig.embedding_lookup"
_PLAN = "EmbeddingPlanner.create_embedding_collection"
_Plan = tuple[list[list[str]], list[tuple[str, list[str]]]]  # the arguments of `shard`


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingLookup:
    """One lookup of a collection.

    Attributes:
        table: Its table.
        bottom_name: Sparse input that it reads.
        top_name: Its output: [B, 1, ev_size] for sum and average, [B, 1, hotness * ev_size] for concat; without the
            dimension of 1 if it `is_flat`.
        combiner: "sum", "average" or "concat".
    """

    table: EmbeddingTableConfig
    bottom_name: str
    top_name: str
    combiner: str

    @property
    def is_flat(self) -> bool:
        """Whether the output has two dimensions, as in release 3.7."""
        return isinstance(self.table, EmbeddingTablePlaceHolder)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """Placement of the tables of a collection; it has no effect on results.

    Attributes:
        matrix: Names of the tables of every GPU.
        strategy: ("mp" or "dp", tables as names or (name, number of column parts)) for every group.
        compression: Names of tables by what GPUs send of them.
    """

    matrix: tuple[tuple[str, ...], ...]
    strategy: tuple[tuple[str, tuple[str | tuple[str, int], ...]], ...]
    compression: Mapping[CompressionStrategy, Sequence[str]]

    def check(self, tables: Sequence[str]) -> None:
        """Raise unless every one of `tables` is in one group and on some GPU, copies on all, and no other is named."""
        grouped = [_name(table) for _, group in self.strategy for table in group]
        placed = {table for gpu in self.matrix for table in gpu}
        for table in dict.fromkeys([*grouped, *placed]):
            if table not in tables:
                raise WrongInputError(
                    "shard", f"got a table {table!r}, expected tables with a lookup: {_listed(tables)}"
                )
        for table in tables:
            if grouped.count(table) != 1:
                raise WrongInputError(
                    "shard: shard_strategy", f"table {table!r} is in {grouped.count(table)} groups, expected one"
                )
            if table not in placed:
                raise WrongInputError("shard: shard_matrix", f"table {table!r} is on no GPU, expected at least one")
        copies = [_name(table) for kind, group in self.strategy if kind == "dp" for table in group]
        for gpu, names_on_gpu in enumerate(self.matrix):
            missing = [table for table in copies if table not in names_on_gpu]
            if missing:
                raise WrongInputError("shard: shard_matrix", f"GPU {gpu} lacks the dp table {missing[0]!r}")


_OLD_KINDS = {"localized": "mp"}
"""3.7 calls complete tables on one GPU each "localized"."""


def _name(table: str | tuple[str, int]) -> str:
    return table if isinstance(table, str) else table[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


class EmbeddingCollectionConfig(CollectionOptions):
    """An embedding collection, to which `embedding_lookup` adds lookups and `shard` a placement.

    Attributes:
        lookups: One `EmbeddingLookup` each.
        concatenated_name: The one output [B, sum of widths] of the form with lists, or of release 23.02's layout
            "batch_major"; empty for one output a lookup.
        plan: The arguments of `shard`, or None.
    """

    lookups: tuple[EmbeddingLookup, ...]
    concatenated_name: str
    plan: ShardPlan | None

    @classmethod
    @override
    def first_values(cls) -> dict[str, Any]:
        return {"lookups": (), "concatenated_name": "", "plan": None}

    @bind_arguments("EmbeddingCollectionConfig.embedding_lookup")
    def embedding_lookup(
        self,
        table_config: EmbeddingTableConfig | Sequence[EmbeddingTableConfig],
        bottom_name: str | Sequence[str],
        top_name: str,
        combiner: str | Sequence[str],
    ) -> None:
        """Add a lookup; lists add several whose outputs are concatenated, in the only call of the collection.

        Raises:
            WrongInputError: A value of another kind, lists of different lengths, or an output with a name in use.
            IllegalCallError: A call besides one with lists.
        """
        # Release 23.02 names the layout of the output in the constructor; others join where the lookup has lists.
        is_joined = self._values.get("output_layout") == "batch_major"
        has_lists = isinstance(table_config, list)
        values = {"table_config": table_config, "bottom_name": bottom_name, "top_name": top_name, "combiner": combiner}
        if (self.concatenated_name and not is_joined) or (has_lists and self.lookups):
            raise IllegalCallError("embedding_lookup", "got a second call besides one with lists, expected one call")
        if has_lists:
            # Objects are frozen for scripts; this one grows by its own methods alone.
            self._values.update(concatenated_name=top_name, lookups=_of_lists(values))
            return
        lookups = (*self.lookups, _lookup(values, self.lookups))
        name = ",".join(lookup.top_name for lookup in lookups) if is_joined else ""
        self._values.update(concatenated_name=name, lookups=lookups)

    @bind_arguments("EmbeddingCollectionConfig.shard")
    def shard(
        self,
        shard_matrix: Sequence[Sequence[str]],
        shard_strategy: Sequence[tuple[str, Sequence[str | tuple[str, int]]]],
        compression_strategy: Mapping[CompressionStrategy, Sequence[str]] = {},
    ) -> None:
        """Set the placement of the tables.

        Raises:
            WrongInputError: A table without a lookup, in no group or in several, on no GPU, or a copy that one lacks.
        """
        plan = ShardPlan(
            matrix=tuple(tuple(gpu) for gpu in shard_matrix),
            strategy=tuple((_OLD_KINDS.get(kind, kind), tuple(tables)) for kind, tables in shard_strategy),
            compression=compression_strategy,
        )
        plan.check(self.table_names())
        self._values["plan"] = plan

    def table_names(self) -> list[str]:
        """Return the names of the tables, in the order of their first lookups."""
        return list(dict.fromkeys(lookup.table.name for lookup in self.lookups))


def _lookup(values: Mapping[str, Any], others: Sequence[EmbeddingLookup]) -> EmbeddingLookup:
    for name in ("bottom_name", "combiner"):
        if not isinstance(values[name], str):
            raise WrongInputError(f"{_LOOKUP}: {name}", "got a list, expected one, as table_config is one")
    if any(lookup.top_name == values["top_name"] for lookup in others):
        raise WrongInputError(f"{_LOOKUP}: top_name", f"got {values['top_name']!r} a second time, expected a new name")
    # Tables are found by name in dumps and plans, so one name must mean one table.
    same = [lookup.table for lookup in others if lookup.table.name == values["table_config"].name]
    if any(table != values["table_config"] for table in same):
        raise WrongInputError(
            f"{_LOOKUP}: table_config", f"got another table named {same[0].name!r}, expected a new name"
        )
    # Releases and their examples spell it either way.
    combiner = "average" if values["combiner"] == "mean" else values["combiner"]
    return EmbeddingLookup(
        table=values["table_config"], bottom_name=values["bottom_name"], top_name=values["top_name"], combiner=combiner
    )


def _of_lists(values: Mapping[str, Any]) -> tuple[EmbeddingLookup, ...]:
    tables, bottoms, combiners = values["table_config"], values["bottom_name"], values["combiner"]
    if (
        not isinstance(bottoms, list)
        or not isinstance(combiners, list)
        or not len(tables) == len(bottoms) == len(combiners)
    ):
        raise WrongInputError(
            _LOOKUP,
            f"got {len(tables)} tables, bottom_name {bottoms} and combiner {combiners}, "
            f"expected a list of {len(tables)} of each",
        )
    lookups: tuple[EmbeddingLookup, ...] = ()
    for place, (table, bottom, combiner) in enumerate(zip(tables, bottoms, combiners, strict=True)):
        # The script has one name for the joined output, but each lookup needs one of its own in the graph.
        one = {"table_config": table, "bottom_name": bottom, "combiner": combiner}
        lookups += (_lookup({**one, "top_name": f"{values['top_name']}{place}"}, lookups),)
    return lookups


class EmbeddingPlanner:
    """An embedding collection in the form of releases 3.7 to 4.1."""

    def __init__(self) -> None:
        self._collection = EmbeddingCollectionConfig()

    @bind_arguments("EmbeddingPlanner.embedding_lookup")
    def embedding_lookup(
        self, table_config: EmbeddingTableConfig, bottom_name: str, top_name: str, combiner: str
    ) -> None:
        """Add a lookup; the errors are those of `EmbeddingCollectionConfig.embedding_lookup`."""
        self._collection.embedding_lookup(table_config, bottom_name, top_name, combiner)

    @overload
    def create_embedding_collection(self, plan_file: str) -> EmbeddingCollectionConfig: ...
    @overload
    def create_embedding_collection(
        self,
        shard_matrix: Sequence[Sequence[int]],
        emb_table_group_strategy: Sequence[int | Sequence[int]],
        emb_table_placement_strategy: Sequence[str],
    ) -> EmbeddingCollectionConfig: ...
    def create_embedding_collection(self, *args: object, **kwargs: object) -> EmbeddingCollectionConfig:
        """Return the collection of all lookups, with the plan from a file (3.7 to 4.0) or from matrices (4.1).

        Raises:
            FileCannotOpenError: The plan's file does not exist.
            BrokenFileError: It is no JSON, or not laid out as a plan.
            WrongInputError: As `EmbeddingCollectionConfig.shard`.
        """
        values = form_of(_PLAN, args, kwargs).read(args, kwargs)
        if "plan_file" in values:
            self._collection.shard(*_plan_of_file(values["plan_file"], self._collection))
        else:
            self._collection.shard(*_plan_of_matrices(values, self._collection))
        return self._collection


EmbeddingCollectionPlaceholder = EmbeddingCollectionConfig
"""What 3.7 to 4.1 call the planner's collection."""


def _plan_of_matrices(values: Mapping[str, Any], collection: EmbeddingCollectionConfig) -> _Plan:
    names = collection.table_names()
    groups, kinds = values["emb_table_group_strategy"], values["emb_table_placement_strategy"]
    if len(groups) != len(kinds):
        raise WrongInputError(_PLAN, f"got {len(groups)} groups and {len(kinds)} placements, expected as many of each")
    if any(len(gpu) != len(names) for gpu in values["shard_matrix"]):
        raise WrongInputError(f"{_PLAN}: shard_matrix", f"expected {len(names)} numbers for every GPU")
    matrix = [[name for name, is_there in zip(names, gpu, strict=True) if is_there] for gpu in values["shard_matrix"]]
    # Groups and columns go by the number of a table, which is its name in those releases.
    return matrix, [(kind, [str(table) for table in group]) for kind, group in zip(kinds, groups, strict=True)]


def _plan_of_file(path: str, collection: EmbeddingCollectionConfig) -> _Plan:
    """Read a plan file, which lists for every GPU its groups: lookups by number, and the placement."""
    if not Path(path).is_file():
        raise FileCannotOpenError(f"{_PLAN}: plan_file", f"{path!r} does not exist")
    try:
        plan = parse_json(read_bytes(path))
        tables_of_gpus = [
            [
                (group["table_placement_strategy"], [int(lookup) for lookup in group["local_embedding_list"]])
                for group in gpu
            ]
            for gpu in plan
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFileError(
            path, f"not a plan: {shortened(repr(error))}; expected a list of groups for every GPU"
        ) from None
    lookups = collection.lookups
    if any(not 0 <= lookup < len(lookups) for gpu in tables_of_gpus for _, group in gpu for lookup in group):
        raise BrokenFileError(path, f"names a lookup beyond the {len(lookups)} of the collection")

    def names(group: Sequence[int]) -> list[str]:
        # Several lookups of a group may read one table, which is placed once.
        return list(dict.fromkeys(lookups[number].table.name for number in group))

    matrix = [[name for _, group in gpu for name in names(group)] for gpu in tables_of_gpus]
    kinds = {name: kind for gpu in tables_of_gpus for kind, group in gpu for name in names(group)}
    strategy = [(kind, [name for name, own in kinds.items() if own == kind]) for kind in dict.fromkeys(kinds.values())]
    return matrix, strategy
