"""Models without hidden layers: logistic regression and the factorization machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import ColumnVectors, LinearTerms
from terarec.spec import DatasetSpec, FMSpec, LRSpec


class LR(LinearTerms):
    """Logistic regression: a weight for each key and dense column, and a bias.

    Args:
        spec: Tables and first weights.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the first weights.
    """

    def __init__(self, spec: LRSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__(spec, dataset, num_outputs or len(dataset.labels), seed=seed)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float[B, C]."""
        return self.linear_terms(batch)


class PairProducts(nn.Module):
    """The dots of all pairs of vectors, summed (Rendle 2010): half of (sum of v)^2 - sum of v^2.

    With several outputs each of them weighs the D products by learned factors, which start at one.

    Args:
        width: Length D of a vector.
        num_outputs: Number of outputs C.
    """

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(num_outputs, width)) if num_outputs > 1 else None

    def forward(self, vectors: Tensor) -> Tensor:
        """float[B, m, D] -> float[B, C]."""
        products = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
        if self.factors is None:
            return products.sum(1, keepdim=True)
        return nn.functional.linear(products, self.factors)


class FM(LinearTerms):
    """Factorization machine (Rendle 2010): linear terms, and the dots of all pairs of columns' vectors.

    Args:
        spec: Width, tables and first weights.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the first weights.
    """

    def __init__(self, spec: FMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        self.vectors = ColumnVectors(spec, dataset, generator=torch.Generator().manual_seed(seed), seed=seed)
        self.products = PairProducts(spec.width, outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        logits: Tensor = self.linear_terms(batch) + self.products(vectors)
        return logits
