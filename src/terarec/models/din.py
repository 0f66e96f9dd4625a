# SPDX-License-Identifier: Apache-2.0
"""Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978)."""

from __future__ import annotations

import torch

from terarec.models.histories import HistoryModel
from terarec.nn import MLP
from terarec.nn.attention import TargetAttention
from terarec.nn.initializers import dense_distributions
from terarec.spec import DatasetSpec, DINSpec


class DIN(HistoryModel):
    """Histories pooled by attention to a target, and an MLP over them and all other columns.

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `HistoryModel`.
    """

    def __init__(self, spec: DINSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        def new_attention(generator: torch.Generator) -> TargetAttention:
            mlp = MLP(
                4 * spec.width,
                (*spec.attention, 1),
                generator=generator,
                initial=dense_distributions(spec.init),
                activation=spec.attention_activation,
            )
            return TargetAttention(mlp, spec.width, softmax=spec.softmax)

        super().__init__(spec, dataset, new_attention, kind=spec.kind, num_outputs=num_outputs, seed=seed)
