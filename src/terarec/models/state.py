"""The two halves of a model's weights: dense tensors that autograd knows, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.storage import StaticTable


def tables(model: nn.Module) -> dict[str, StaticTable]:
    """All embedding tables of `model` by name."""
    return {name: table for _, collection in _collections(model) for name, table in collection.tables.items()}


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of ``model.state_dict()`` that is not in tables, sharing memory with the model."""
    in_tables = _table_keys(model)
    return {key: value for key, value in model.state_dict().items() if key not in in_tables}


def load_dense_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state`, as `dense_state` gives it, into `model`.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape; nothing was copied then.
    """
    mine = dense_state(model)
    for key in (*mine, *state):
        got = list(state[key].shape) if key in state else None
        expected = list(mine[key].shape) if key in mine else None
        if got != expected:
            raise ConfigError(
                f"weights {key!r}: got shape {got}, expected {expected}; was the model described otherwise?"
            )
    model.load_state_dict(state, strict=False)


def _collections(model: nn.Module) -> Iterator[tuple[str, EmbeddingCollection]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, EmbeddingCollection))


def _table_keys(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.tables.{name}".removeprefix(".")
        for prefix, collection in _collections(model)
        for name in collection.tables
    }
