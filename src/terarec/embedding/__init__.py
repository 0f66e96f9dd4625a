"""Embedding tables as one module: fused lookups forward, gradients of rows backward; and torch's modules on them."""

from terarec.embedding.bag import EmbeddingBag
from terarec.embedding.collection import EmbeddingCollection
from terarec.embedding.output import EmbeddingOutput, Sequences
from terarec.embedding.padded import PaddedKeys, PaddedSequences, pad_sequences
from terarec.embedding.quantized import QuantizedCollection
from terarec.embedding.replace import replace_embeddings
from terarec.embedding.table import Embedding

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "EmbeddingOutput",
    "PaddedKeys",
    "PaddedSequences",
    "QuantizedCollection",
    "Sequences",
    "pad_sequences",
    "replace_embeddings",
]
