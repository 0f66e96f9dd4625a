# SPDX-License-Identifier: Apache-2.0
"""MaskNet (Wang et al. 2021, arXiv 2102.07619)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import ColumnVectors, mlp
from terarec.nn.gates import MaskBlock, VectorNorm
from terarec.nn.initializers import dense_distributions
from terarec.spec import DatasetSpec, MaskNetSpec


class MaskNet(nn.Module):
    """Blocks masked by the sample's vectors: in parallel with an MLP over all of them, or one after the other.

    Args:
        spec: Widths and layers.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(
        self, spec: MaskNetSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        self.norm = VectorNorm(self.vectors.num_vectors, spec.width)
        self.is_serial = spec.structure == "serial"
        width = self.vectors.num_vectors * spec.width
        in_widths = (width, *spec.blocks[:-1]) if self.is_serial else (width,) * len(spec.blocks)
        self.blocks = nn.ModuleList(
            MaskBlock(
                width,
                in_width,
                out_width,
                mask_width=max(1, round(spec.aggregation * in_width)),
                activation=spec.activation,
                dropout=spec.dropout,
                generator=generator,
                initial=dense_distributions(spec.init),
            )
            for in_width, out_width in zip(in_widths, spec.blocks, strict=True)
        )
        # Serial blocks are the deep part themselves.
        hidden = () if self.is_serial else spec.hidden
        last = spec.blocks[-1] if self.is_serial else sum(spec.blocks)
        self.deep = mlp(spec, last, hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        guide, x = vectors.flatten(1), self.norm(vectors).flatten(1)
        if self.is_serial:
            for block in self.blocks:
                x = block(x, guide)
        else:
            x = torch.cat([block(x, guide) for block in self.blocks], dim=1)
        logits: Tensor = self.deep(x)
        return logits
