# SPDX-License-Identifier: Apache-2.0
"""Behavior Sequence Transformer (Chen et al. 2019, arXiv 1905.06874)."""

from __future__ import annotations

import torch

from terarec.models.histories import HistoryModel
from terarec.nn.history_transformer import HistoryTransformer
from terarec.spec import BSTSpec, DatasetSpec


class BST(HistoryModel):
    """A transformer over each history with its target behind it, and an MLP over its output and all other columns.

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `HistoryModel`.
    """

    def __init__(self, spec: BSTSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        def new_transformer(generator: torch.Generator) -> HistoryTransformer:
            return HistoryTransformer(
                spec.max_length,
                spec.width,
                layers=spec.layers,
                heads=spec.heads,
                inner=spec.inner,
                output=spec.output,
                rate=spec.dropout,
                generator=generator,
            )

        super().__init__(spec, dataset, new_transformer, kind=spec.kind, num_outputs=num_outputs, seed=seed)
