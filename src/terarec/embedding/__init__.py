"""Embedding tables as one module: fused lookups forward, gradients of rows backward."""

from terarec.embedding.collection import EmbeddingCollection, EmbeddingOutput, Sequences

__all__ = ["EmbeddingCollection", "EmbeddingOutput", "Sequences"]
