# SPDX-License-Identifier: Apache-2.0
"""Deep & Cross Networks: DCN (Wang et al. 2017, arXiv 1708.05123) and DCN V2 (Wang et al. 2021, arXiv 2008.13535)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import embeddings, input_width, mlp, multi_cross, side_by_side
from terarec.nn.dense import new_linear
from terarec.nn.initializers import dense_distributions
from terarec.nn.interaction import CrossMixture, CrossV2
from terarec.spec import DatasetSpec, DCNSpec, DCNV2Spec


class DCN(nn.Module):
    """Cross layers and an MLP over the dense columns and all embeddings, and a linear layer over the outputs of both.

    Args:
        spec: Widths and layers.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(
        self, spec: DCNSpec | DCNV2Spec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        structure = "parallel" if isinstance(spec, DCNSpec) else spec.structure
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.cross = _cross_layers(spec, width, generator)
        is_stacked = structure in ("stacked", "stacked_parallel")
        is_parallel = structure in ("parallel", "stacked_parallel") and bool(spec.hidden)
        self.stacked = mlp(spec, width, spec.hidden, None, generator) if is_stacked else None
        self.parallel = mlp(spec, width, spec.hidden, None, generator) if is_parallel else None
        # Stacked: the MLP replaces the cross layers' output; parallel: it is joined to that.
        last = (spec.hidden[-1] if is_stacked else width) + (spec.hidden[-1] if is_parallel else 0)
        weight, bias = dense_distributions(spec.init)(last, outputs)
        self.output = new_linear(last, outputs, weight=weight, bias=bias, generator=generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        x = side_by_side(self.embedding, batch)
        out = self.cross(x)
        if self.stacked is not None:
            out = self.stacked(out)
        if self.parallel is not None:
            out = torch.cat([out, self.parallel(x)], dim=1)
        logits: Tensor = self.output(out)
        return logits


def _cross_layers(spec: DCNSpec | DCNV2Spec, width: int, generator: torch.Generator) -> nn.Module:
    rank = 0 if isinstance(spec, DCNSpec) else spec.rank
    if rank is None:
        return CrossV2(width, spec.cross_layers, generator=generator, initial=dense_distributions(spec.init))
    if isinstance(spec, DCNV2Spec) and spec.experts > 1:
        return CrossMixture(width, spec.cross_layers, rank=rank, experts=spec.experts, generator=generator)
    return multi_cross(spec, width, spec.cross_layers, rank, generator)
