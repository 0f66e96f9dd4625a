# SPDX-License-Identifier: Apache-2.0
"""Parts that models share: embeddings of columns, linear terms, and an MLP as a spec describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from terarec.batch import Batch, Jagged, feature_ends, select
from terarec.embedding import EmbeddingCollection
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.nn import MLP, Layer, TensorShape, build_layer
from terarec.nn.initializers import Distribution, dense_distributions, normal, uniform
from terarec.spec import CategoricalColumn, DatasetSpec, DynamicTableSpec, FeatureSpec, Initializer, TableSpec
from terarec.spec.checks import did_you_mean
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
        own_tables(columns, tables, width=width, suffix=suffix, initializer=initializer),
        [FeatureSpec(name=c.name, table=owner(c.name, tables) + suffix, pooling=pooling) for c in columns],
        seed=seed,
    )


def own_tables(
    columns: Sequence[CategoricalColumn],
    tables: TablesSpec,
    *,
    width: int,
    suffix: str = "",
    initializer: Initializer | None = None,
) -> list[TableSpec | DynamicTableSpec]:
    """Return the tables of a collection for `columns`: one for each that does not share another's.

    The other arguments are those of `collection`.

    Raises:
        ConfigError: A column that shares the table of one that is not among them, or has other ids.
    """
    named = {column.name: column for column in columns}
    for name, column in named.items():
        other = owner(name, tables)
        if other not in named:
            raise ConfigError(
                "tables.shared",
                f"got {other!r} for {name!r}, expected a column that is looked up with it: "
                f"{', '.join(other for other in named if other != name) or 'none'}",
            )
        check_same_ids("tables", "shared", column, named[other])
    return [
        tables.table(column.name + suffix, rows=column.rows, width=width, initializer=initializer)
        for column in columns
        if column.name not in tables.shared
    ]


def owner(column: str, tables: TablesSpec) -> str:
    """Return the column after which the tables of `column` are named: itself, or the one whose tables it shares."""
    return tables.shared.get(column, column)


def check_shared(kind: str, tables: TablesSpec, dataset: DatasetSpec) -> None:
    """Raise `ConfigError` unless a data set has all columns that share tables, of the same ids."""
    for name, other in tables.shared.items():
        of_name, of_other = (
            categorical_column(kind, "tables.shared", column, dataset, one_key=False) for column in (name, other)
        )
        check_same_ids(kind, "tables.shared", of_name, of_other)


def check_same_ids(kind: str, place: str, column: CategoricalColumn, other: CategoricalColumn) -> None:
    """Raise `ConfigError` unless `column`, which looks up the table of `other`, has the same ids.

    Args:
        kind: Kind of the model.
        place: Field of the model's spec that names the column.
        column: Column that has no table of its own.
        other: Column that has one.
    """
    if column.rows != other.rows:
        raise ConfigError(
            kind,
            f"{place}: {column.name!r} has {_ids(column)}, {other.name!r} has {_ids(other)}, expected both to have "
            "the same ids (one vocabulary for both columns)",
        )
    if None not in (column.vocabulary, other.vocabulary) and column.vocabulary != other.vocabulary:
        raise ConfigError(
            f"column {column.name!r}",
            f"shares the table of {other.name!r}, whose ids are those of another vocabulary; expected one Categorify "
            "of both with joint, and the data prepared again",
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


def check_one_label(kind: str, dataset: DatasetSpec, num_outputs: int | None) -> None:
    """Raise `ConfigError` unless a model of one output has one label."""
    labels = len(dataset.labels)
    if labels != 1:
        names = ", ".join(label.name for label in dataset.labels)
        raise ConfigError(
            kind,
            f"got {labels} labels ({names}) in data set {dataset.name!r}, expected 1, above 0 for the items "
            "that users took; choose one of them in the workflow's labels, and prepare again",
        )
    if num_outputs not in (None, 1):
        raise ConfigError(kind, f"got an objective of {num_outputs} outputs, expected one of a single output")


def check_known(kind: str, role: str, names: Sequence[str], dataset: DatasetSpec) -> None:
    """Raise `ConfigError` unless a data set has the columns `names`, dense or categorical, of the field `role`."""
    known = [*(column.name for column in dataset.dense), *(column.name for column in dataset.categorical)]
    for name in names:
        if name not in known:
            raise ConfigError(
                kind,
                f"{role}: data set {dataset.name!r} has no column {name!r}{did_you_mean(name, known)}, "
                f"expected some of {', '.join(known)}",
            )


def categorical_column(kind: str, role: str, name: str, dataset: DatasetSpec, *, one_key: bool) -> CategoricalColumn:
    """Return a categorical column of a data set.

    Args:
        kind: Kind of the model.
        role: Field of its spec.
        name: Name of the column.
        dataset: The columns.
        one_key: Whether it is to have one key a sample.

    Raises:
        ConfigError: It is not there, or has lists.
    """
    columns = {column.name: column for column in dataset.categorical}
    if name not in columns:
        raise ConfigError(
            kind,
            f"{role}: data set {dataset.name!r} has no categorical column {name!r}"
            f"{did_you_mean(name, columns)}, expected one of {', '.join(columns) or 'some'}",
        )
    if one_key and columns[name].hotness > 1:
        raise ConfigError(
            kind,
            f"{role}: {name!r} is a list of up to {columns[name].hotness} keys, expected a column of one key a sample",
        )
    return columns[name]


def item_ids(kind: str, item: CategoricalColumn, dataset: DatasetSpec) -> tuple[int, int]:
    """Return the lowest id of an item, a column of `dataset`, and one more than the highest.

    Raises:
        ConfigError: A column of any keys, or of fewer than two items.
    """
    if item.rows is None:
        raise ConfigError(
            kind,
            f"column {item.name!r} has any keys, expected ids: items to compare with are drawn from all of them",
        )
    first = dataset.first_id(item.name)
    # A vocabulary has ids of rare values, which are no items, in front of those of its values.
    count = item.rows - first - (item.rare_ids or int(item.vocabulary is not None))
    if count < 2:
        raise ConfigError(kind, f"column {item.name!r} has {max(0, count)} items, expected at least 2")
    return first, item.rows


def check_history(kind: str, place: str, target: str, history: str, dataset: DatasetSpec) -> None:
    """Check that a data set has a column of one key a sample, and one of lists of the same keys.

    Args:
        kind: Kind of the model.
        place: Field of the model's spec that names both; empty for fields of the spec itself.
        target: Name of the column of one key.
        history: Name of the column of lists.
        dataset: The columns.

    Raises:
        ConfigError: It does not.
    """
    at = f"{place}." if place else ""
    role = f"{at}target" if place else "item"
    categorical_column(kind, role, target, dataset, one_key=False)  # first whether both are there
    of_history = categorical_column(kind, f"{at}history", history, dataset, one_key=False)
    of_target = categorical_column(kind, role, target, dataset, one_key=True)
    check_same_ids(kind, place or "history", of_history, of_target)


def check_times(kind: str, role: str, name: str, dataset: DatasetSpec, *, one_key: bool) -> None:
    """Raise `ConfigError` unless a data set has a column of times, keys of any integers; see `categorical_column`."""
    column = categorical_column(kind, role, name, dataset, one_key=one_key)
    if column.rows is not None:
        raise ConfigError(kind, f"{role}: {name!r} has {column.rows} ids, expected times: keys of any integers")


def _ids(column: CategoricalColumn) -> str:
    return "any keys" if column.rows is None else f"{column.rows} ids"


def without_keys(
    jagged: Jagged | PaddedKeys, missing: Mapping[str, int], beside: Mapping[str, Sequence[str]] | None = None
) -> Jagged | PaddedKeys:
    """Return `jagged` without the keys `missing` of the features that this names.

    Args:
        jagged: Keys of a batch.
        missing: Feature -> its key that is left out.
        beside: Feature -> others with a value for each of its keys, of which those of left out keys go, too; not of
            padded keys.

    Raises:
        ConfigError: A list of one of these is of another length than that of the feature.
    """
    if not missing and not beside:
        return jagged
    if isinstance(jagged, PaddedKeys):
        return jagged.without(missing)
    keys = jagged.keys
    # Bags are feature-major: the feature of each bag, then the one of each key.
    features = torch.arange(len(jagged.names), device=keys.device).repeat_interleave(jagged.batch_size)
    feature = features.repeat_interleave(jagged.offsets.diff())
    is_named = torch.tensor([name in missing for name in jagged.names], device=keys.device)
    # 0 for a feature that is not named only fills the place; `is_named` is False there.
    dropped_key = torch.tensor([missing.get(name, 0) for name in jagged.names], device=keys.device)
    kept = ~(is_named[feature] & (keys == dropped_key[feature]))
    if beside:
        _keep_beside(kept, jagged, beside)
    # The number of kept keys before an old offset is the new one.
    ends = torch.cat([jagged.offsets[:1], kept.cumsum(0)])
    weights = None if jagged.weights is None else jagged.weights[kept]
    return dataclasses.replace(
        jagged, keys=keys[kept], offsets=ends[jagged.offsets], weights=weights, ends=None, ready=None
    )


def _keep_beside(kept: Tensor, jagged: Jagged, beside: Mapping[str, Sequence[str]]) -> None:
    """Let `kept` bool[N] be for the keys of the lists beside a feature what it is for those of the feature."""
    names, ends = jagged.names, feature_ends(jagged)
    pairs = [(names.index(name), names.index(other)) for name, others in beside.items() for other in others]
    lengths = jagged.offsets.diff().view(len(names), jagged.batch_size)
    # Of all lists at once: each answer makes the host wait for a device.
    wrong = torch.stack([lengths[own] != lengths[other] for own, other in pairs])
    if bool(wrong.any()):
        pair, row = wrong.nonzero()[0].tolist()
        own, other = pairs[pair]
        raise ConfigError(
            f"column {names[other]!r}, row {row}",
            f"got a list of {int(lengths[other, row])} for {int(lengths[own, row])} items of {names[own]!r}, "
            "expected as many",
        )
    for own, other in pairs:
        kept[ends[other] : ends[other + 1]] = kept[ends[own] : ends[own + 1]]


def at_places(values: Tensor, mask: Tensor) -> Tensor:
    """Return what a padded list beside another one has at the places of that one, in an exported program.

    The inputs have paddings of their own: to the longest of the lists of each.

    Args:
        values: [B, L, ...], the values beside the keys of the other list.
        mask: bool[B, K], the places of the other list that have a key.

    Returns:
        [B, K, ...]; any values where there is no key.
    """
    places = torch.arange(mask.shape[1], device=values.device)
    return values.index_select(1, places.clamp(max=values.shape[1] - 1))


def padded_keys_of(kind: str, name: str, jagged: PaddedKeys) -> Tensor:
    """Return the keys int64[B, K] of a column that a model reads itself, in an exported program.

    Raises:
        ConfigError: A program whose inputs are rows and no keys.
    """
    if name not in jagged.keys:
        raise ConfigError(kind, f"reads the times {name!r}, which are rows of no table, expected a file with tables")
    return jagged.keys[name]


def samples_of_keys(jagged: Jagged) -> Tensor:
    """Return the sample of each key: int64[N]."""
    samples = torch.arange(jagged.batch_size, device=jagged.keys.device).repeat(len(jagged.names))
    return samples.repeat_interleave(jagged.offsets.diff(), output_size=len(jagged.keys))


def one_key_bags(names: Sequence[str], name: str, keys: Tensor) -> Jagged:
    """Return a sample with the features `names` for each of keys int64[n], which `name` has; the others have none."""
    count = len(keys)
    offsets = torch.arange(len(names) * count + 1, device=keys.device) - list(names).index(name) * count
    return Jagged(names=tuple(names), keys=keys, offsets=offsets.clamp(0, count))


def with_empty_bags(jagged: Jagged, names: Sequence[str], every: Sequence[str]) -> Jagged:
    """Return the features `names`, with empty bags of the others of `every`, in which `names` are side by side."""
    chosen, size = select(jagged, names), jagged.batch_size
    before = list(every).index(names[0])
    after = len(every) - len(names) - before
    offsets = torch.cat(
        [chosen.offsets[:1].expand(before * size), chosen.offsets, chosen.offsets[-1:].expand(after * size)]
    )
    return dataclasses.replace(chosen, names=tuple(every), offsets=offsets, ends=None)


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
