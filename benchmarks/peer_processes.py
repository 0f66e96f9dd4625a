"""The sides of peers.py: what there is to compare with, and the processes that run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_sides.cell import Shape, threads

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
OURS = "terarec"
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One system. `copies` counts by rule what it holds as large as its weights: these, dense state and gradients."""

    title: str
    python: Path
    copies: dict[str, int]

    def needed_bytes(self, rule: str, shape: Shape) -> int:
        """Memory of the tables, their state and their dense gradients."""
        return self.copies[rule] * shape.table_bytes

    def fits(self, rule: str, shape: Shape) -> bool:
        """Whether this machine can hold that and a batch."""
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


class Process:
    """One side in a process of its own."""

    def __init__(self, side: str, rule: str, shape: Shape) -> None:
        python = SIDES[side].python
        if not python.exists():
            raise SystemExit(f"peers: got no interpreter {python}, expected the one that `make peers` makes")
        numbers = map(str, (shape.tables, shape.rows, shape.width, shape.hotness))
        self._process = subprocess.Popen(
            [str(python), "-m", "peer_sides.worker", side, rule, *numbers],
            cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        self.version: str = self._answer()

    def ask(self, do: str, **arguments: object) -> Any:
        """What the side answers to a command of `peer_sides.worker.Worker`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"peers: a side ended with status {self._process.wait()}: {self._process.args}")
        return json.loads(line)


class Turns:
    """The processes of one comparison: all at once if their tables fit, else the one whose turn it is."""

    def __init__(self, peer: str, rule: str, shape: Shape) -> None:
        self.names = (OURS, peer)
        self.rule, self.shape = rule, shape
        needed = sum(SIDES[name].needed_bytes(rule, shape) for name in self.names)
        self.fit_together = needed < 0.5 * MEMORY_BYTES
        self.versions: dict[str, str] = {}
        self._open: dict[str, Process] = {}

    def __getitem__(self, name: str) -> Process:
        if name not in self._open:
            if not self.fit_together:
                self.close()
            self._open[name] = Process(name, self.rule, self.shape)
            self.versions[name] = self._open[name].version
        return self._open[name]

    def close(self) -> None:
        """End all processes."""
        while self._open:
            self._open.popitem()[1].close()


def _environment() -> dict[str, str]:
    """The same for every side: one thread a core, and a C allocator that keeps what a step frees for the next."""
    count = str(threads())
    kept = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **kept, **quiet, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
