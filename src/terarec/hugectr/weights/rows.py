"""Rows of an embedding by the keys that files give them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.hugectr.weights.embedding_files import EmbeddingFile


def held_rows(embedding: EmbeddingFile, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Those of ``keys int64[n]``, distinct, that the embedding holds, and their vectors float32[m, D].

    A key that several slots hold is there several times.
    """
    found_keys, vectors = [np.empty(0, np.int64)], [np.empty((0, embedding.width), np.float32)]
    for table, base in zip(embedding.tables, embedding.bases, strict=True):
        own = np.intersect1d(keys - base, table.keys().cpu().numpy(), assume_unique=True)
        rows = table.export(torch.from_numpy(own).to(table.arena.device))
        found_keys.append(own + base)
        vectors.append(rows.weights.float().cpu().numpy())
    return np.concatenate(found_keys), np.concatenate(vectors)
