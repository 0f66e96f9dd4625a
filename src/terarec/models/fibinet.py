# SPDX-License-Identifier: Apache-2.0
"""FiBiNET (Huang et al. 2019, arXiv 1905.09433)."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.batch import Batch
from terarec.models.columns import ColumnVectors, LinearTerms, check_pairs, mlp
from terarec.nn.field_products import BilinearProducts
from terarec.nn.gates import SqueezeExcitation
from terarec.nn.initializers import dense_distributions
from terarec.spec import DatasetSpec, FiBiNETSpec


class FiBiNET(LinearTerms):
    """Linear terms, and an MLP over the bilinear products of all pairs of vectors, gated and not.

    The products of both kinds share their kernels. The MLP reads the dense columns, too.

    Args:
        spec: Widths, layers and kernels.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: One column alone.
    """

    def __init__(
        self, spec: FiBiNETSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        initial = dense_distributions(spec.init)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        count = self.vectors.num_vectors
        check_pairs("fibinet", dataset, count)
        self.senet = SqueezeExcitation(count, spec.reduction, generator=generator, initial=initial)
        self.bilinear = BilinearProducts(count, spec.width, spec.bilinear, generator=generator, initial=initial)
        width = 2 * self.bilinear.out_width + len(dataset.dense)
        self.deep = mlp(spec, width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        products = [self.bilinear(vectors), self.bilinear(self.senet(vectors))]
        logits: Tensor = self.linear_terms(batch) + self.deep(torch.cat([*products, batch.dense], dim=1))
        return logits
