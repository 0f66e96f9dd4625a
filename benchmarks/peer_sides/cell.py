# SPDX-License-Identifier: Apache-2.0
"""Inputs of every side: tables of one size, keys and a gradient from a seed. It needs NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LR = 0.01
INITIAL_ACCUMULATOR = 0.1  # of AdaGrad; TensorFlow does not accept zero
SCALE = 0.01  # first weights are this, terarec's uniform up to it: drawing them all takes some peers a minute
ZIPF_EXPONENT = 1.05


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables of one size, each looked up by one feature with `hotness` keys a sample, summed."""

    tables: int
    rows: int
    width: int
    hotness: int

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.tables} x {self.rows} x {self.width}, {self.hotness} key{'s' * (self.hotness > 1)}"

    @property
    def table_bytes(self) -> int:
        """Bytes of all weights."""
        return 4 * self.tables * self.rows * self.width


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One batch.

    Attributes:
        keys: int64[T, B * H].
        offsets: int64[T * B + 1], feature-major.
        grad: float32[B, T * D], of the pooled vectors.
    """

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    grad: NDArray[np.float32]


class Side(Protocol):
    """One implementation of a shape's tables and their optimizer; built from (shape, rule).

    The rules are "sgd", "adagrad" (from `INITIAL_ACCUMULATOR`) and "rowwise_adagrad" (from zero), at the rate `LR`.
    """

    version: str

    def load(self, tables: NDArray[np.float32]) -> None:
        """Take the weights float32[T, V, D]."""

    def prepare(self, inputs: Inputs) -> None:
        """Convert a batch to the input of the library; this is not timed."""

    def forward(self) -> object:
        """Look up as in evaluation."""

    def step(self) -> object:
        """Lookup, backward with the prepared gradient, and update."""

    def pooled(self) -> NDArray[np.float32]:
        """Return the result of `forward` as float32[B, T * D]."""

    def tables(self) -> NDArray[np.float32]:
        """Return the weights float32[T, V, D]."""


def draw(shape: Shape, batch: int, distribution: str, seed: int = 0) -> Inputs:
    """Return the batch of a cell; the same in every process. `distribution` is "uniform" or "zipf"."""
    random = np.random.default_rng(seed)
    count = (shape.tables, batch * shape.hotness)
    if distribution == "uniform":
        keys = random.integers(shape.rows, size=count)
    else:
        cumulative = np.cumsum(np.arange(1, shape.rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
        keys = np.searchsorted(cumulative, random.random(count) * cumulative[-1]).astype(np.int64)
    grad = random.standard_normal((batch, shape.tables * shape.width), dtype=np.float32)
    offsets = np.arange(0, keys.size + 1, shape.hotness)
    return Inputs(keys=keys, offsets=offsets, grad=grad)
