"""Recommender models with embedding tables too large for one device: training, preparation and serving."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terarec.embedding import Embedding, EmbeddingBag, replace_embeddings

__version__ = "0.1.0"
__all__ = ["Embedding", "EmbeddingBag", "__version__", "replace_embeddings"]

_LAZY = dict.fromkeys(("Embedding", "EmbeddingBag", "replace_embeddings"), "terarec.embedding")


def __getattr__(name: str) -> Any:
    """The names that need torch, imported when first used: ``import terarec`` alone takes no time."""
    if name not in _LAZY:
        raise AttributeError(f"module 'terarec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
