# SPDX-License-Identifier: Apache-2.0
"""Field-aware factorization machine (Juan et al. 2016, "Field-aware factorization machines for CTR prediction")."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from terarec.batch import Batch
from terarec.models.columns import ColumnVectors, LinearTerms, OutputFactors
from terarec.nn.field_products import field_aware_products
from terarec.spec import DatasetSpec, FFMSpec


class FFM(LinearTerms):
    """Linear terms, and for each pair of columns the dot of the vectors that they have for each other.

    A row of a table holds the m vectors of its key, one for each column, side by side: it has m * D numbers.

    Args:
        spec: Width D, tables and initial weights.
        dataset: Columns, m in all; a dense one contributes its value times learned vectors.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: Rows wider than tables take.
    """

    def __init__(self, spec: FFMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        self.num_columns = len(dataset.categorical) + len(dataset.dense)
        by_column = dataclasses.replace(spec, width=spec.width * self.num_columns)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = ColumnVectors(by_column, dataset, generator=generator, seed=seed)
        self.products = OutputFactors(spec.width, outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        products = field_aware_products(vectors.unflatten(2, (self.num_columns, -1)))
        logits: Tensor = self.linear_terms(batch) + self.products(products)
        return logits
