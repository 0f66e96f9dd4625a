# SPDX-License-Identifier: Apache-2.0
"""SASRec (Kang and McAuley 2018, arXiv 1808.09781)."""

from __future__ import annotations

import torch

from terarec.models.sequences import SequenceModel
from terarec.nn.sequences import Transformer
from terarec.spec import DatasetSpec, SASRecSpec


class SASRec(SequenceModel):
    """A causal transformer over the history.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `SequenceModel`.
    """

    def __init__(
        self, spec: SASRecSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        encoder = Transformer(
            spec.max_length,
            spec.width,
            layers=spec.layers,
            heads=spec.heads,
            inner=spec.inner,
            causal=True,
            rate=spec.dropout,
            generator=torch.Generator().manual_seed(seed),
        )
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)
