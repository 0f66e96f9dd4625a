"""Tables in tiers in training: rows are read ahead, and moves are counted."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import reduce
from typing import Any

from torch import nn

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection
from terarec.parallel import prefetched
from terarec.storage import TierUse

_AHEAD = 1  # batches whose rows are read while one trains, besides the one that is being read


def collections_in_tiers(model: nn.Module) -> list[EmbeddingCollection]:
    """Return the collections of `model` with tables in tiers."""
    found = (module for module in model.modules() if isinstance(module, EmbeddingCollection))
    return [collection for collection in found if collection.tier_use() is not None]


def use_of(model: nn.Module) -> TierUse | None:
    """Return what the tiers of all tables of `model` did so far; None without any."""
    uses = [collection.tier_use() or TierUse() for collection in collections_in_tiers(model)]
    return reduce(TierUse.plus, uses) if uses else None


def read_ahead(
    batches: Iterable[tuple[Batch, dict[str, Any]]], model: nn.Module
) -> Generator[tuple[Batch, dict[str, Any]], None, None]:
    """Yield `batches`, drawn by a thread that has the rows of each read for the tables of `model`."""
    collections = collections_in_tiers(model)

    def drawn() -> Generator[tuple[Batch, dict[str, Any]], None, None]:
        for batch, state in batches:
            for collection in collections:
                collection.prefetch(batch.sparse, _AHEAD + 1)
            yield batch, state

    return prefetched(drawn(), _AHEAD)
