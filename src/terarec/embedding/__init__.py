"""Embedding tables as one module: fused lookups forward, gradients of rows backward; and torch's modules on them."""

from terarec.embedding.collection import EmbeddingCollection
from terarec.embedding.lookups import BagSource, FoundRows, LookupCollection, RowLookup
from terarec.embedding.modules import Embedding, EmbeddingBag, replace_embeddings
from terarec.embedding.output import EmbeddingOutput, PaddedKeys, PaddedSequences, pad_sequences
from terarec.embedding.quantized import QuantizedCollection
from terarec.embedding.tables import share_tiers

__all__ = [
    "BagSource",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "EmbeddingOutput",
    "FoundRows",
    "LookupCollection",
    "PaddedKeys",
    "PaddedSequences",
    "QuantizedCollection",
    "RowLookup",
    "pad_sequences",
    "replace_embeddings",
    "share_tiers",
]
