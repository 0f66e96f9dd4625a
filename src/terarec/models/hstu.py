# SPDX-License-Identifier: Apache-2.0
"""HSTU (Zhai et al. 2024, arXiv 2402.17152)."""

from __future__ import annotations

import torch

from terarec.models.sequences import SequenceModel
from terarec.nn import sequences
from terarec.spec import DatasetSpec, HSTUSpec


class HSTU(SequenceModel):
    """Hierarchical sequential transduction units over the history: gated layers of pointwise attention.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `SequenceModel`.
    """

    def __init__(self, spec: HSTUSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        encoder = sequences.HSTU(
            spec.max_length,
            spec.width,
            layers=spec.layers,
            heads=spec.heads,
            rate=spec.dropout,
            generator=torch.Generator().manual_seed(seed),
        )
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)
