# SPDX-License-Identifier: Apache-2.0
"""Models that add linear terms, products of pairs and an MLP: LR, DNN, Wide & Deep, FM, DeepFM and xDeepFM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import (
    ColumnVectors,
    LinearTerms,
    OutputFactors,
    embeddings,
    input_width,
    mlp,
    side_by_side,
)
from terarec.nn.dense import new_linear
from terarec.nn.initializers import dense_distributions
from terarec.nn.interaction import CompressedInteraction, pair_products
from terarec.spec import DatasetSpec, DeepFMSpec, DNNSpec, FMSpec, LRSpec, WideDeepSpec, XDeepFMSpec


class LR(LinearTerms):
    """Logistic regression: a weight for each key and dense column, and a bias.

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(self, spec: LRSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__(spec, dataset, num_outputs or len(dataset.labels), seed=seed)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        return self.linear_terms(batch)


class DNN(nn.Module):
    """An MLP over the dense columns and all embeddings (Covington et al. 2016).

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(self, spec: DNNSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.deep = mlp(spec, input_width(spec, dataset), spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        logits: Tensor = self.deep(side_by_side(self.embedding, batch))
        return logits


class WideDeep(LinearTerms):
    """The sum of a linear model over all columns and an MLP over their embeddings (Cheng et al. 2016).

    Args:
        spec: Widths and layers.
        dataset: Columns; a categorical column ``c`` gets a table ``c`` for the deep part and a table ``c.wide`` with
            one weight a key and output for the wide part.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
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
        """Return the logits float[B, C]."""
        logits: Tensor = self.linear_terms(batch) + self.deep(side_by_side(self.embedding, batch))
        return logits


class FactorizationTerms(LinearTerms):
    """Linear terms, and the dots of all pairs of columns' vectors.

    Args:
        spec: Width, tables and initial weights.
        dataset: Columns.
        num_outputs: Number of outputs C.
        generator: Source of the first vectors of the dense columns.
        seed: Seed of the tables' initial weights.
    """

    def __init__(
        self,
        spec: FMSpec | DeepFMSpec,
        dataset: DatasetSpec,
        num_outputs: int,
        *,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        super().__init__(spec, dataset, num_outputs, seed=seed)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        self.products = OutputFactors(spec.width, num_outputs)

    def factorization_terms(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of all terms float[B, C], and the vectors for an MLP (see `ColumnVectors`)."""
        vectors, flat = self.vectors(batch)
        return self.linear_terms(batch) + self.products(pair_products(vectors)), flat


class FM(FactorizationTerms):
    """Factorization machine (Rendle 2010): linear terms, and the dots of all pairs of columns' vectors.

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(self, spec: FMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__(spec, dataset, num_outputs or len(dataset.labels), generator=generator, seed=seed)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        logits, _ = self.factorization_terms(batch)
        return logits


class DeepFM(FactorizationTerms):
    """The sum of a factorization machine and an MLP over the same vectors.

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(
        self, spec: DeepFMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        super().__init__(spec, dataset, outputs, generator=generator, seed=seed)
        self.deep = mlp(spec, input_width(spec, dataset), spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        terms, flat = self.factorization_terms(batch)
        logits: Tensor = terms + self.deep(flat)
        return logits


class XDeepFM(LinearTerms):
    """The sum of linear terms, a compressed interaction network with a linear layer, and an MLP.

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(
        self, spec: XDeepFMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        initial = dense_distributions(spec.init)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        self.cin = CompressedInteraction(self.vectors.num_vectors, spec.cin, generator=generator, initial=initial)
        weight, bias = initial(self.cin.out_width, outputs)
        # Drawn between the interaction network and the MLP: another order would change the initial weights of a seed.
        self.cin_output = new_linear(self.cin.out_width, outputs, weight=weight, bias=bias, generator=generator)
        width = input_width(spec, dataset)
        self.deep = mlp(spec, width, spec.hidden, outputs, generator) if spec.hidden else None

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, flat = self.vectors(batch)
        logits: Tensor = self.linear_terms(batch) + self.cin_output(self.cin(vectors))
        return logits if self.deep is None else logits + self.deep(flat)
