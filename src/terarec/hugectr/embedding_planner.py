"""EmbeddingPlanner: an embedding collection and its plan in the words of 3.7 to 4.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from terarec.hugectr.tables.embedding_collection import PLAN_FILE, PLAN_MATRIX, PLANNER_LOOKUP
from terarec.spec.codec import parse_json
from terarec.spec.quoting import shortened


class EmbeddingPlanner:
    """How 3.7 to 4.1 spell an embedding collection."""

    def __init__(self) -> None:
        self._collection = EmbeddingCollectionConfig()

    def embedding_lookup(self, *args: Any, **kwargs: Any) -> None:
        """Add a lookup; the errors are those of `EmbeddingCollectionConfig.embedding_lookup`."""
        self._collection.embedding_lookup(**PLANNER_LOOKUP.read(args, kwargs))

    def create_embedding_collection(self, *args: Any, **kwargs: Any) -> EmbeddingCollectionConfig:
        """The collection of all lookups, with the plan from a file (3.7 to 4.0) or from matrices (4.1).

        Raises:
            FileCannotOpenError: the plan's file does not exist.
            BrokenFileError: it is no JSON, or not laid out as a plan.
            WrongInputError: as `EmbeddingCollectionConfig.shard`.
        """
        is_file = "plan_file" in kwargs or (len(args) == 1 and isinstance(args[0], str))
        if is_file:
            self._collection.shard(*_plan_of_file(PLAN_FILE.read(args, kwargs)["plan_file"], self._collection))
        else:
            self._collection.shard(*_plan_of_matrices(PLAN_MATRIX.read(args, kwargs), self._collection))
        return self._collection


EmbeddingCollectionPlaceholder = EmbeddingCollectionConfig
"""What 3.7 to 4.1 call the planner's collection."""


def _plan_of_matrices(given: Mapping[str, Any], collection: EmbeddingCollectionConfig) -> tuple[Any, Any]:
    names = collection.table_names()
    groups, kinds = given["emb_table_group_strategy"], given["emb_table_placement_strategy"]
    if len(groups) != len(kinds):
        raise WrongInputError(
            f"{PLAN_MATRIX.name}: got {len(groups)} groups and {len(kinds)} placements, expected as many of each"
        )
    if any(len(gpu) != len(names) for gpu in given["shard_matrix"]):
        raise WrongInputError(f"{PLAN_MATRIX.name}: shard_matrix: expected {len(names)} numbers for every GPU")
    matrix = [[name for name, is_there in zip(names, gpu, strict=True) if is_there] for gpu in given["shard_matrix"]]
    # Groups and columns go by the number of a table, which is its name in those releases.
    return matrix, [(kind, [str(table) for table in group]) for kind, group in zip(kinds, groups, strict=True)]


def _plan_of_file(path: str, collection: EmbeddingCollectionConfig) -> tuple[Any, Any]:
    """A plan file lists for every GPU its groups: lookups by number, and how the group is placed."""
    if not Path(path).is_file():
        raise FileCannotOpenError(f"{PLAN_FILE.name}: plan_file: {path!r} does not exist")
    try:
        plan = parse_json(Path(path).read_text())
        held = [
            [
                (group["table_placement_strategy"], [int(lookup) for lookup in group["local_embedding_list"]])
                for group in gpu
            ]
            for gpu in plan
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFileError(
            f"{path}: not a plan: {shortened(repr(error))}; expected a list of groups for every GPU"
        ) from None
    lookups = collection.lookups
    if any(not 0 <= lookup < len(lookups) for gpu in held for _, group in gpu for lookup in group):
        raise BrokenFileError(f"{path}: names a lookup beyond the {len(lookups)} of the collection")

    def names(group: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(lookups[number].table.name for number in group))

    matrix = [[name for _, group in gpu for name in names(group)] for gpu in held]
    kinds = {name: kind for gpu in held for kind, group in gpu for name in names(group)}
    strategy = [(kind, [name for name, own in kinds.items() if own == kind]) for kind in dict.fromkeys(kinds.values())]
    return matrix, strategy
