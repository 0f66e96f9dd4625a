# SPDX-License-Identifier: Apache-2.0
"""Parts that models share: embeddings of columns, linear terms, and an MLP as a spec describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.nn import MLP, Layer, TensorShape, build_layer
from terarec.nn.initializers import Distribution, dense_distributions, normal, uniform
from terarec.spec import CategoricalColumn, DatasetSpec, FeatureSpec, Initializer
from terarec.spec.network import ColumnPooling, EmbeddedSpec, NetworkSpec
from terarec.spec.tables import TablesSpec

WIDE_SUFFIX = ".wide"


class LinearSpec(Protocol):
    """The fields of a model's spec that describe its linear terms."""

    @property
    def pooling(self) -> ColumnPooling:
        """Pooling of the weights of a list."""

    @property
    def tables(self) -> TablesSpec:
        """Static or dynamic tables."""

    @property
    def wide_initializer(self) -> Initializer | None:
        """Initial weights of the keys; None for those of `tables`."""


def collection(
    columns: Sequence[CategoricalColumn],
    tables: TablesSpec,
    *,
    width: int,
    pooling: ColumnPooling,
    seed: int,
    suffix: str = "",
    initializer: Initializer | None = None,
) -> EmbeddingCollection | None:
    """Return a table for each column, pooled; None where there is no column.

    Args:
        columns: The columns, in the order of the output.
        tables: The kind of the tables.
        width: Length of a vector.
        pooling: Pooling of the vectors of a list.
        seed: Seed of the initial weights.
        suffix: Suffix of the tables' names after those of the columns.
        initializer: Initial weights; None for those of `tables`.
    """
    # A collection has at least one table, and a data set may have dense columns alone.
    if not columns:
        return None
    return EmbeddingCollection(
        [tables.table(c.name + suffix, rows=c.rows, width=width, initializer=initializer) for c in columns],
        [FeatureSpec(name=c.name, table=c.name + suffix, pooling=pooling) for c in columns],
        seed=seed,
    )


def embeddings(spec: EmbeddedSpec, dataset: DatasetSpec, *, seed: int) -> EmbeddingCollection | None:
    """Return a table of `spec.width` for each categorical column, of its name."""
    return collection(dataset.categorical, spec.tables, width=spec.width, pooling=spec.pooling, seed=seed)


def side_by_side(embedding: EmbeddingCollection | None, batch: Batch) -> Tensor:
    """Return the dense columns and the pooled vectors: float[B, F + S * D]."""
    if embedding is None:
        return batch.dense
    pooled: Tensor = embedding(batch.sparse).pooled
    return join(batch.dense, pooled)


def join(dense: Tensor, pooled: Tensor) -> Tensor:
    """Return the dense columns and `pooled` side by side, without a copy where there are no dense columns."""
    return torch.cat([dense, pooled], dim=1) if dense.shape[1] else pooled


def input_width(spec: NetworkSpec, dataset: DatasetSpec) -> int:
    """Return the width of the result of `side_by_side`."""
    return len(dataset.dense) + spec.width * len(dataset.categorical)


def mlp(
    spec: NetworkSpec, in_width: int, hidden: Sequence[int], outputs: int | None, generator: torch.Generator
) -> MLP:
    """Return hidden layers as `spec` describes them, and a linear layer to the outputs; without it for None."""
    widths = tuple(hidden) if outputs is None else (*hidden, outputs)
    return MLP(
        in_width,
        widths,
        generator=generator,
        relus=(True,) * len(hidden) + (False,) * (len(widths) - len(hidden)),
        dropout=spec.dropout,
        initial=dense_distributions(spec.init),
        activation=spec.activation,
        batch_norm=spec.batch_norm,
    )


def multi_cross(spec: NetworkSpec, width: int, layers: int, rank: int, generator: torch.Generator) -> Layer:
    """Return cross layers with kernels of a low rank, or rank-one ones for `rank` 0, with initial weights of `spec`."""
    options = {"num_layers": layers, "projection_dim": rank}
    layer = build_layer("multi_cross", [TensorShape(1, (width,))], options, generator=generator)
    if spec.init != "default":
        # The layer of the registry knows HugeCTR's schemes only, so those of models are drawn over its weights.
        for kernels in layer.parameters():
            # [layers, out, in] for low-rank kernels, [layers, n] for vectors.
            fan_in, fan_out = (kernels.shape[-1], kernels.shape[-2]) if kernels.dim() == 3 else (width, 1)
            weight, _ = dense_distributions(spec.init)(fan_in, fan_out)
            if kernels is not layer.bias:
                weight.fill_(kernels, generator)
    return layer


def check_pairs(kind: str, dataset: DatasetSpec, num_vectors: int) -> None:
    """Raise `ConfigError` if a model over pairs of columns' vectors has one vector alone.

    Args:
        kind: Kind of the model.
        dataset: The columns.
        num_vectors: Number of vectors a sample.
    """
    if num_vectors < 2:
        raise ConfigError(
            kind, f"data set {dataset.name!r} has one column, whose vector has no pair, expected two columns"
        )


class LinearTerms(nn.Module):
    """Weights of keys and of dense columns, and a bias, for each output.

    A categorical column ``c`` has a table ``c.wide`` with one weight a key and output.

    Args:
        spec: Pooling, tables and initial weights.
        dataset: Columns.
        num_outputs: Number of outputs C.
        seed: Seed of the initial weights.
    """

    def __init__(self, spec: LinearSpec, dataset: DatasetSpec, num_outputs: int, *, seed: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.wide = collection(
            dataset.categorical,
            spec.tables,
            width=num_outputs,
            pooling=spec.pooling,
            seed=seed,
            suffix=WIDE_SUFFIX,
            initializer=spec.wide_initializer,
        )
        # Zeros, as in a logistic regression: the loss is convex in them, so there is no symmetry to break.
        self.linear_weight = nn.Parameter(torch.zeros(num_outputs, len(dataset.dense)))
        self.linear_bias = nn.Parameter(torch.zeros(num_outputs))

    def linear_terms(self, batch: Batch) -> Tensor:
        """Return the sum of all weights: float[B, C]."""
        logits = linear(batch.dense, self.linear_weight, self.linear_bias)
        if self.wide is not None:
            # A table of width C for each column, so that pooling gives C numbers a column, which are added up.
            logits = logits + self.wide(batch.sparse).pooled.unflatten(1, (-1, self.num_outputs)).sum(dim=1)
        return logits


class ColumnVectors(nn.Module):
    """One vector a column: that of its keys, and for a dense column its value times a learned vector.

    So dense columns are in interactions, too (Rendle 2010; Song et al. 2019, eq. 3). These vectors start as a table's
    rows do.

    Args:
        spec: Width, pooling, tables.
        dataset: Columns.
        generator: Source of the first vectors of the dense columns.
        seed: Seed of the tables' initial weights.
    """

    def __init__(self, spec: EmbeddedSpec, dataset: DatasetSpec, *, generator: torch.Generator, seed: int) -> None:
        super().__init__()
        self.width = spec.width
        self.num_vectors = len(dataset.categorical) + len(dataset.dense)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.dense_vectors = nn.Parameter(torch.empty(len(dataset.dense), spec.width))
        _first_vectors(spec.tables).fill_(self.dense_vectors, generator)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the vectors and the input of an MLP.

        Returns:
            The vectors float[B, S + F, D], and the dense columns with the pooled vectors float[B, F + S * D].
        """
        # [B, F, 1] times [F, D] gives [B, F, D]
        scaled = batch.dense.unsqueeze(2) * self.dense_vectors
        if self.embedding is None:
            return scaled, batch.dense
        pooled = self.embedding(batch.sparse).pooled
        vectors = pooled.unflatten(1, (-1, self.width))
        if not self.dense_vectors.shape[0]:
            return vectors, pooled
        return torch.cat([vectors, scaled.to(vectors.dtype)], dim=1), join(batch.dense, pooled)


class OutputFactors(nn.Module):
    """The sum of D products; with several outputs each of them weights the products by learned factors.

    Args:
        width: Number D of products.
        num_outputs: Number of outputs C.
    """

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        # Ones, so that several outputs start as the plain machine does.
        self.factors = nn.Parameter(torch.ones(num_outputs, width)) if num_outputs > 1 else None

    def forward(self, products: Tensor) -> Tensor:
        """Return the sum for each output: float[B, D] -> float[B, C]."""
        return products.sum(1, keepdim=True) if self.factors is None else linear(products, self.factors)


# A static table's default follows from its rows, of which a dense column has none: it gets that of dynamic tables.
def _first_vectors(tables: TablesSpec) -> Distribution:
    scale = tables.init_scale or 0.05
    return normal(scale) if tables.initializer == "normal" else uniform(scale)
