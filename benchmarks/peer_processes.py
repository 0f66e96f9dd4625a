# SPDX-License-Identifier: Apache-2.0
"""The sides of peers.py: the systems that it compares, and the processes that run them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from json_process import MEMORY_BYTES, PEERS_PYTHON, JsonProcess
from peer_sides.cell import Shape

OURS = "terarec"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One system. `copies`: by rule, the number of arrays of the weights' size (weights, dense state, gradients)."""

    title: str
    python: Path
    copies: dict[str, int]

    def needed_bytes(self, rule: str, shape: Shape) -> int:
        """Return the bytes of the tables, their state and their dense gradients."""
        return self.copies[rule] * shape.table_bytes

    def fits(self, rule: str, shape: Shape) -> bool:
        """Return whether this machine's memory holds these bytes and a batch."""
        return self.needed_bytes(rule, shape) < 0.9 * MEMORY_BYTES


SIDES = {
    OURS: Side(title="terarec", python=Path(sys.executable), copies={"sgd": 1, "rowwise_adagrad": 1, "adagrad": 2}),
    "fbgemm": Side(title="FBGEMM SplitTableBatchedEmbeddingBags on CPU", python=PEERS_PYTHON,
                   copies={"sgd": 1, "rowwise_adagrad": 1}),
    "torch-sparse": Side(title="nn.EmbeddingBag(sparse=True) a table and torch.optim", python=Path(sys.executable),
                         copies={"sgd": 1, "adagrad": 2}),
    "torch-dense": Side(title="nn.EmbeddingBag(sparse=False) a table and torch.optim", python=Path(sys.executable),
                        copies={"sgd": 2, "adagrad": 3}),
    "tensorflow": Side(title="tf.nn.embedding_lookup_sparse a table and tf.compat.v1.train", python=PEERS_PYTHON,
                       copies={"sgd": 1, "adagrad": 2}),
}  # fmt: skip


class Turns:
    """The processes of one comparison: all at once if their tables fit in memory, else one at a time, in turns."""

    def __init__(self, names: Sequence[str], rule: str, shape: Shape) -> None:
        self.names = names
        self.rule, self.shape = rule, shape
        needed = sum(SIDES[name].needed_bytes(rule, shape) for name in self.names)
        self.fit_together = needed < 0.5 * MEMORY_BYTES
        self.versions: dict[str, str] = {}
        self._open: dict[str, JsonProcess] = {}

    def __getitem__(self, name: str) -> JsonProcess:
        if name not in self._open:
            if not self.fit_together:
                self.close()
            shape = self.shape
            numbers = map(str, (shape.tables, shape.rows, shape.width, shape.hotness))
            self._open[name] = JsonProcess(SIDES[name].python, "peer_sides.worker", [name, self.rule, *numbers])
            self.versions[name] = self._open[name].version
        return self._open[name]

    def close(self) -> None:
        """End all processes."""
        while self._open:
            self._open.popitem()[1].close()
