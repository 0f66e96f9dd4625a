# SPDX-License-Identifier: Apache-2.0
"""Inputs of both sides: the model's sizes, batches and initial weights, all from seeds. It needs NumPy only."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LR, BETA1, BETA2, EPSILON = 0.001, 0.9, 0.999, 1e-7
WIDTH, HIDDEN, CROSS_LAYERS, NUM_DENSE = 16, 1024, 6, 13
ZIPF_EXPONENT = 1.05
# The slot sizes that HugeCTR publishes for the Kaggle data set of Criteo with every category kept.
KAGGLE_ROWS = (1459, 583, 6373320, 1977439, 305, 24, 12513, 633, 3, 92719, 5681, 5666265, 3193, 27, 14986, 4209368, 10,
               5652, 2173, 4, 5058596, 18, 15, 282062, 105, 141594)  # fmt: skip
# Those of the two crossed columns of its Wide & Deep sample.
CROSSED_ROWS = (278899, 355877)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Wide & Deep or DCN with the layers of HugeCTR's samples: two of 1024, vectors of 16, and six cross layers in DCN.

    Attributes:
        model: "wdl" or "dcn".
        most_rows: Most rows of a table.
        dropout: Dropout rate after each of the two layers.
    """

    model: Literal["wdl", "dcn"]
    most_rows: int
    dropout: float = 0.5
    slot_rows: tuple[int, ...] = field(init=False)
    wide_rows: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        capped = [tuple(min(rows, self.most_rows) for rows in slots) for slots in (KAGGLE_ROWS, CROSSED_ROWS)]
        object.__setattr__(self, "slot_rows", capped[0])
        object.__setattr__(self, "wide_rows", capped[1] if self.model == "wdl" else ())

    @property
    def num_weights(self) -> int:
        """Number of weights of all tables."""
        return sum(self.slot_rows) * WIDTH + sum(self.wide_rows)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One batch.

    Attributes:
        dense: float32[B, 13].
        label: float32[B, 1].
        keys: int64[B, 26], each below its slot's rows.
        wide_keys: int64[B, 2], or [B, 0] without a wide part.
    """

    dense: Floats
    label: Floats
    keys: NDArray[np.int64]
    wide_keys: NDArray[np.int64]


class Side(Protocol):
    """One implementation, built from (workload, update mode of terarec)."""

    version: str

    def load(self, weights: dict[str, Floats]) -> None:
        """Set the weights of `initial_weights`."""

    def prepare(self, batches: list[Inputs]) -> None:
        """Convert batches to the input of the library; this is not timed."""

    def step(self, number: int) -> SupportsFloat:
        """Train on batch `number` and return the loss. Reading its value waits for the end of the step."""


def draw(workload: Workload, batch: int, count: int) -> list[Inputs]:
    """Return `count` batches, the same in every process; the keys of each slot follow a Zipf law."""
    random = np.random.default_rng(batch)
    columns = {"keys": workload.slot_rows, "wide_keys": workload.wide_rows}
    return [
        Inputs(
            dense=random.standard_normal((batch, NUM_DENSE), dtype=np.float32),
            label=random.integers(2, size=(batch, 1)).astype(np.float32),
            **{name: _zipf_keys(random, batch, rows) for name, rows in columns.items()},
        )
        for _ in range(count)
    ]


def _zipf_keys(random: np.random.Generator, batch: int, slot_rows: tuple[int, ...]) -> NDArray[np.int64]:
    """Return keys int64[batch, slots]; the most frequent ones of a slot are spread over its rows."""
    keys = np.empty((batch, len(slot_rows)), np.int64)
    for slot, rows in enumerate(slot_rows):
        cumulative = _cumulative_zipf(rows)
        ranks = np.searchsorted(cumulative, random.random(batch) * cumulative[-1])
        keys[:, slot] = (ranks * 7919 + 13) % rows if rows % 7919 else ranks
    return keys


@functools.cache
def _cumulative_zipf(rows: int) -> NDArray[np.float64]:
    return np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT)


def initial_weights(workload: Workload) -> dict[str, Floats]:
    """Return the weights by name, matrices as (inputs, outputs). It makes copies, so it is for small tables."""
    random = np.random.default_rng(1)
    in_width = NUM_DENSE + WIDTH * len(workload.slot_rows)
    last_width = HIDDEN + (in_width if workload.model == "dcn" else 0)
    shapes: dict[str, tuple[int, ...]] = {"table": (sum(workload.slot_rows), WIDTH)}
    if workload.wide_rows:
        shapes["wide"] = (sum(workload.wide_rows), 1)
    if workload.model == "dcn":
        shapes |= {"cross_kernels": (CROSS_LAYERS, in_width), "cross_biases": (CROSS_LAYERS, in_width)}
    for name, size in (("fc1", (in_width, HIDDEN)), ("fc2", (HIDDEN, HIDDEN)), ("fc3", (last_width, 1))):
        shapes |= {f"{name}_kernel": size, f"{name}_bias": size[1:]}
    return {name: 0.02 * random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
