# SPDX-License-Identifier: Apache-2.0
"""Product-based neural network (Qu et al. 2016, arXiv 1611.00144)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import ColumnVectors, check_pairs, input_width, mlp
from terarec.nn import DotInteraction
from terarec.spec import DatasetSpec, PNNSpec


class PNN(nn.Module):
    """An MLP over all columns, and the inner or outer products of their vectors.

    Args:
        spec: Widths, layers and products.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: One column alone for inner products.
    """

    def __init__(self, spec: PNNSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        self.width = spec.width
        self.has_outer = spec.products != "inner"
        self.dots: DotInteraction | None = None
        if spec.products != "outer":
            check_pairs("pnn", dataset, self.vectors.num_vectors)
            self.dots = DotInteraction(self.vectors.num_vectors, spec.width)
            width += self.dots.out_width - spec.width
        if self.has_outer:
            width += spec.width * spec.width
        self.deep = mlp(spec, width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, flat = self.vectors(batch)
        parts = [flat]
        if self.dots is not None:
            # Without the first vector, which the interaction puts before the dots and `flat` has.
            parts.append(self.dots(vectors[:, 0], vectors[:, 1:].flatten(1))[:, self.width :])
        if self.has_outer:
            # The outer products of all pairs add up to that of the sum with itself (sec. III-D), D^2 numbers.
            total = vectors.sum(1)
            parts.append((total.unsqueeze(2) * total.unsqueeze(1)).flatten(1))
        logits: Tensor = self.deep(torch.cat(parts, dim=1))
        return logits
