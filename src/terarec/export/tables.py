"""Embedding tables in ONNX: the sorted keys and their rows as constants, and a search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terarec.export.key_input import NO_KEY
from terarec.export.onnx_graph import OnnxGraph
from terarec.storage import DynamicTable, Store

_FLOAT = 1  # element type, as an attribute of Cast


class OnnxTable:
    """A table in a graph.

    ONNX has no hash table. Keys 0 to n - 1 are their own rows; others are searched in the sorted keys by halving, which
    takes ceil(log2 n) steps for all keys of a batch together.

    Args:
        graph: where the constants go.
        table: what it holds now.
    """

    def __init__(self, graph: OnnxGraph, table: Store) -> None:
        pieces = list(table.export_chunks(max(1, len(table))))
        keys = np.concatenate([piece.keys.cpu().numpy() for piece in pieces])
        order = np.argsort(keys)
        self.width = table.width
        self._graph = graph
        self._count = len(keys)
        self._is_dense = bool((keys[order] == np.arange(self._count)).all())
        weights = np.concatenate([piece.weights.float().cpu().numpy() for piece in pieces])
        default = table.spec.default if isinstance(table, DynamicTable) else 0.0
        absent = np.zeros((2, self.width), np.float32)  # of no key, and of a key that is not there
        absent[1] = default
        self._has_default = bool(absent.any())
        self._rows = graph.constant(np.concatenate([absent, weights[order]]))
        if not self._is_dense:
            self._keys = graph.constant(_padded(keys[order]))

    def look_up(self, keys: str) -> str:
        """float32[..., D] for the keys ``int64[...]``; the default for one that the table does not hold.

        `NO_KEY` gives zeros.
        """
        graph = self._graph
        rows = graph.node("Sub", keys, keys)
        if self._has_default:
            rows = graph.node(
                "Where", graph.node("Equal", keys, graph.integers(NO_KEY)), graph.integers(0), graph.integers(1)
            )
        if self._count:
            found, places = self._dense_places(keys) if self._is_dense else self._search(keys)
            rows = graph.node("Where", found, graph.node("Add", places, graph.integers(2)), rows)
        return graph.node("Gather", self._rows, rows, axis=0)

    def _dense_places(self, keys: str) -> tuple[str, str]:
        graph = self._graph
        low = graph.node("GreaterOrEqual", keys, graph.integers(0))
        high = graph.node("Less", keys, graph.integers(self._count))
        return graph.node("And", low, high), keys

    def _search(self, keys: str) -> tuple[str, str]:
        """Whether each key is there, and the place of the last one that is not greater."""
        graph = self._graph
        places = graph.node("Sub", keys, keys)
        step = 1 << (self._count - 1).bit_length()
        while step > 1:
            step //= 2
            further = graph.node("Add", places, graph.integers(step))
            reached = graph.node("LessOrEqual", graph.node("Gather", self._keys, further, axis=0), keys)
            places = graph.node("Where", reached, further, places)
        places = graph.node("Min", places, graph.integers(self._count - 1))  # not into the padding
        return graph.node("Equal", graph.node("Gather", self._keys, places, axis=0), keys), places


def pool(graph: OnnxGraph, vectors: str, keys: str, *, is_mean: bool, no_key: int) -> str:
    """Sum or mean of ``vectors [B, n, K, D]`` over K; a mean counts the ``keys [B, n, K]`` other than `no_key`."""
    total = graph.node("ReduceSum", vectors, graph.integers(2), keepdims=0)
    if not is_mean:
        return total
    is_key = graph.node("Not", graph.node("Equal", keys, graph.integers(no_key)))
    counts = graph.node("ReduceSum", graph.node("Cast", is_key, to=_FLOAT), graph.integers(2), keepdims=1)
    return graph.node("Div", total, graph.node("Max", counts, graph.number(1.0)))


def _padded(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """`keys` up to a power of two, so that no step of the search leaves them."""
    size = 1 << (len(keys) - 1).bit_length() if len(keys) else 1
    return np.concatenate([keys, np.full(size - len(keys), np.iinfo(np.int64).max)])
