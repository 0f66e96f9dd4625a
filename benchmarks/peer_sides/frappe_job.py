# SPDX-License-Identifier: Apache-2.0
"""Inputs of every side of frappe_peers.py: the settings of DeepFM and the keys. It needs NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")
LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class FrappeJob:
    """Settings of DeepFM, of its training and of its data.

    Attributes:
        folder: Directory of ``<split>.npz``, each with int64[N] of keys for every field and float32[N] of labels.
        data: Prepared data set of the same rows.
        rows: Number of rows of each field's table.
        width: Length of an embedding vector.
        hidden: Widths of the MLP's hidden layers.
        dropout: Probability of zeroing a hidden unit.
        init_scale: Standard deviation of the initial weights of the tables.
        l2: Weight of w^2 / 2 of all tables.
        lr: Learning rate of Adam.
        batch_size: Samples in a step.
        threads: Number of compute threads.
    """

    folder: str
    data: str
    rows: Mapping[str, int]
    width: int
    hidden: tuple[int, ...]
    dropout: float
    init_scale: float
    l2: float
    lr: float
    batch_size: int
    threads: int

    def file(self, split: str) -> str:
        """Return the path of a split's arrays."""
        return str(Path(self.folder) / f"{split}.npz")

    def load(self, split: str) -> dict[str, NDArray[np.generic]]:
        """Return the arrays of a split by column."""
        with np.load(self.file(split)) as arrays:
            return {name: arrays[name] for name in arrays.files}


class Side(Protocol):
    """One library's DeepFM; built from a `FrappeJob`, with its data loaded."""

    version: str

    def train(self, *, seed: int, epochs: int) -> None:
        """Train a new model, with an evaluation on the validation split after each epoch. This call is timed."""

    def test(self) -> tuple[float, float]:
        """Return the AUC and logloss of the trained model on the test split."""
