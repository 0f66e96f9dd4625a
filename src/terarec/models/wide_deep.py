"""Linear terms and an MLP over all columns, each alone and both together: LR, DNN and Wide & Deep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import LinearTerms, embeddings, input_width, mlp, side_by_side
from terarec.spec import DatasetSpec, DNNSpec, LRSpec, WideDeepSpec


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


class DNN(nn.Module):
    """An MLP over the dense columns and all embeddings (Covington et al. 2016).

    Args:
        spec: Widths and layers.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the first weights.
    """

    def __init__(self, spec: DNNSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.deep = mlp(spec, input_width(spec, dataset), spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float[B, C]."""
        logits: Tensor = self.deep(side_by_side(self.embedding, batch))
        return logits


class WideDeep(LinearTerms):
    """The sum of a linear model over all columns and an MLP over their embeddings (Cheng et al. 2016).

    Args:
        spec: Widths and layers.
        dataset: Columns; a categorical column ``c`` gets a table ``c`` for the deep part and a table ``c.wide`` with
            one weight a key and output for the wide part.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the first weights.
    """

    def __init__(
        self, spec: WideDeepSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.deep = mlp(spec, input_width(spec, dataset), spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float[B, C]."""
        logits: Tensor = self.linear_terms(batch) + self.deep(side_by_side(self.embedding, batch))
        return logits
