# SPDX-License-Identifier: Apache-2.0
"""Embedding tables as one module: fused lookups forward, gradients of rows backward; and torch's modules on them."""

from terarec.embedding.collection import EmbeddingCollection
from terarec.embedding.modules import Embedding, EmbeddingBag, replace_embeddings
from terarec.embedding.output import EmbeddingOutput, PaddedSequences
from terarec.embedding.quantized import QuantizedCollection

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "EmbeddingOutput",
    "PaddedSequences",
    "QuantizedCollection",
    "replace_embeddings",
]
