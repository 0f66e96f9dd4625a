# SPDX-License-Identifier: Apache-2.0
"""AutoInt and AutoInt+ (Song et al. 2019, arXiv 1810.11921)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import ColumnVectors, LinearTerms, input_width, mlp
from terarec.nn.attention import SelfAttention
from terarec.nn.dense import new_linear
from terarec.nn.initializers import dense_distributions
from terarec.spec import AutoIntSpec, DatasetSpec


class AutoInt(nn.Module):
    """Self-attention among the vectors of all columns, a linear layer over them, and optionally an MLP in parallel.

    Args:
        spec: Widths and layers; with ``spec.hidden`` it is AutoInt+.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(
        self, spec: AutoIntSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        initial = dense_distributions(spec.init)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        widths = (spec.width, *(spec.attention_width,) * spec.layers)
        self.attention = nn.Sequential(
            *(
                SelfAttention(
                    before,
                    after,
                    spec.heads,
                    generator=generator,
                    initial=initial,
                    residual=spec.residual,
                    scale=spec.scale,
                    layer_norm=spec.layer_norm,
                    dropout=spec.dropout,
                )
                for before, after in pairwise(widths)
            )
        )
        # Attention keeps a vector for each column; the paper's last layer reads all of them side by side.
        last = self.vectors.num_vectors * spec.attention_width
        weight, bias = initial(last, outputs)
        self.output = new_linear(last, outputs, weight=weight, bias=bias, generator=generator)
        width = input_width(spec, dataset)
        # The MLP reads the columns themselves, without attention, and its logits are added: the paper's AutoInt+.
        self.deep = mlp(spec, width, spec.hidden, outputs, generator) if spec.hidden else None
        self.linear = LinearTerms(spec, dataset, outputs, seed=seed) if spec.wide else None

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, flat = self.vectors(batch)
        logits: Tensor = self.output(self.attention(vectors).flatten(1))
        if self.deep is not None:
            logits = logits + self.deep(flat)
        if self.linear is not None:
            logits = logits + self.linear.linear_terms(batch)
        return logits
