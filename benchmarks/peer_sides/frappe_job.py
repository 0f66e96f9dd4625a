"""Inputs of every side of frappe_peers.py: the settings of DeepFM and the keys. NumPy and standard library."""

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
    """DeepFM, how it is trained, and where its data lie.

    Attributes:
        folder: the directory of ``<split>.npz``, each with int64[N] of keys for every field and float32[N] of labels.
        data: the prepared data set of the same rows.
        rows: field -> number of rows of its table.
        width: length of an embedding vector.
        hidden: widths of the MLP's hidden layers.
        dropout: probability of zeroing a hidden unit.
        init_scale: deviation of the first weights of the tables.
        l2: weight of w^2 / 2 of all tables.
        lr: learning rate of Adam.
        batch_size: samples in a step.
        threads: threads of the compute.
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
        """Train a new model, with an evaluation on the validation split after each epoch. This is what is timed."""

    def test(self) -> tuple[float, float]:
        """Area under the ROC curve and logloss of the trained model on the test split."""
