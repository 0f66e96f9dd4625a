"""Embedding tables as one module: fused lookups forward, gradients of rows backward; and torch's modules on them."""

from terarec.embedding.bag import EmbeddingBag
from terarec.embedding.collection import EmbeddingCollection, EmbeddingOutput, Sequences
from terarec.embedding.replace import replace_embeddings
from terarec.embedding.table import Embedding

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "EmbeddingOutput",
    "Sequences",
    "replace_embeddings",
]
