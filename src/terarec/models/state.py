"""The two halves of a model's weights: dense tensors that autograd knows, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.storage import DynamicTable, StaticTable


def tables(model: nn.Module) -> dict[str, StaticTable | DynamicTable]:
    """All embedding tables of `model` by name."""
    collections = (module for module in model.modules() if isinstance(module, EmbeddingCollection))
    return {name: table for collection in collections for name, table in collection.tables.items()}


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of ``model.state_dict()`` that is not in tables, sharing memory with the model.

    Made without ``state_dict()``, which copies dynamic tables.
    """
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, EmbeddingCollection):
            module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    return state


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
