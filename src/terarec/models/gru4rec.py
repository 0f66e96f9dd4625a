# SPDX-License-Identifier: Apache-2.0
"""GRU4Rec (Hidasi et al. 2016, arXiv 1511.06939)."""

from __future__ import annotations

import torch

from terarec.models.sequences import SequenceModel
from terarec.nn.sequences import RecurrentEncoder
from terarec.spec import DatasetSpec, GRU4RecSpec


class GRU4Rec(SequenceModel):
    """Gated recurrent units over the history.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `SequenceModel`.
    """

    def __init__(
        self, spec: GRU4RecSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        encoder = RecurrentEncoder(spec.width, spec.state, spec.layers, rate=spec.dropout, generator=generator)
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)
