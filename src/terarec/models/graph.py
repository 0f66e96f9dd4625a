# SPDX-License-Identifier: Apache-2.0
"""A model made of named tensors, as a `GraphSpec` describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, select
from terarec.config.files import read_graph
from terarec.embedding import EmbeddingCollection
from terarec.embedding.output import pad_sequences
from terarec.errors import ConfigError
from terarec.nn.batch_ranks import BatchRanks, sum_over
from terarec.nn.layer import Layer, TensorShape
from terarec.nn.losses import Loss
from terarec.nn.registry import build_layer
from terarec.spec import (
    DatasetSpec,
    FeatureSpec,
    GraphEmbedding,
    GraphLabel,
    GraphLayer,
    GraphModelSpec,
    GraphSpec,
    TableSpec,
)
from terarec.spec.checks import did_you_mean
from terarec.spec.registry import unknown_name
from terarec.spec.tables import DEFAULT_OPTIMIZER


class GraphModel(nn.Module):
    """Inputs, embeddings, layers and losses, connected by named tensors.

    An ordinary module: train it with `terarec.train.Trainer` or in a loop of your own, by `loss`, ``backward()``,
    a `torch.optim` optimizer over ``parameters()`` and a `terarec.optim.RowOptimizer` over the tables. ``to(device)``
    takes layers and tables to where they are to train, before optimizers are made for them.

    Attributes:
        spec: Description of the graph.
        shapes: Shape of every tensor but the losses.
        embeddings: Name -> tables with their features.
        layers: Modules in the order of ``spec.layers``, the losses among them.

    Args:
        spec: The graph.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: Shapes or options that do not fit, with both shapes; no loss; a loss of no label.
        StorageError: Not enough memory for the tables.
    """

    _place: Tensor
    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch, whose samples a penalty is divided by; None for this one alone."""

    def __init__(self, spec: GraphSpec, *, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        # Moves with the model: a graph of tables alone has no parameter to take the device from.
        self.register_buffer("_place", torch.empty(0), persistent=False)
        self.shapes, built = _build(spec, torch.Generator().manual_seed(seed))
        self.layers = nn.ModuleList(module for _, module in built)
        self._losses = [(layer, module) for layer, module in built if isinstance(module, Loss)]
        self._steps = [(layer, module) for layer, module in built if not isinstance(module, Loss)]
        self._weight_of = _loss_weights(spec, [layer for layer, _ in self._losses])
        # A batch has the columns of its labels in this order, which that of the losses need not be.
        order = {label.name: place for place, label in enumerate(spec.labels)}
        in_order = sorted(self._losses, key=lambda loss: order[loss[0].bottoms[1]])
        # Of several losses over one label the last predicts it.
        self._by_label = {layer.bottoms[1]: (layer.bottoms[0], module) for layer, module in in_order}
        self.embeddings = Embeddings(
            {embedding.name: build_collection(embedding, seed=seed) for embedding in spec.embeddings}
        )

    @property
    def device(self) -> torch.device:
        """Device of the weights and the tables, and of batches."""
        return self._place.device

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return every tensor of the graph by name, except for the losses.

        Raises:
            ConfigError: A batch without the columns that the graph reads.
            KeyOutOfRangeError: A key outside its static table.
        """
        return self.compute(self.inputs(batch))

    def compute(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the result of `forward`, from the result of `inputs`."""
        return run_layers(self._steps, inputs)

    def losses(self, tensors: Mapping[str, Tensor], weight: Tensor | None = None) -> dict[str, Tensor]:
        """Return each loss by name: its mean over the batch, without the label's weight, from the output of `forward`.

        Args:
            tensors: Output of `forward`.
            weight: float32[B], factors of the samples' losses.
        """
        return {
            layer.tops[0]: module(tensors[layer.bottoms[0]], tensors[layer.bottoms[1]], weight)
            for layer, module in self._losses
        }

    def total_loss(self, tensors: Mapping[str, Tensor], weight: Tensor | None = None) -> Tensor:
        """Return the scalar that training minimises: the sum of weight times loss, plus the losses' penalties.

        Args:
            tensors: Output of `forward`.
            weight: float32[B], factors of the samples' losses; penalties have none.
        """
        total: Tensor | None = None
        for name, loss in self.losses(tensors, weight).items():
            # A product with 1 is one more node of the graph in each step.
            weighted = loss if self._weight_of[name] == 1.0 else loss * self._weight_of[name]
            total = weighted if total is None else total + weighted
        assert total is not None  # a graph has losses
        for layer, module in self._losses:
            if module.regularizer is not None:
                batch_size = tensors[layer.bottoms[1]].shape[0]
                if self.batch_ranks is not None:  # the penalty of a step is one, and not one a rank
                    of_all = sum_over(self.batch_ranks, "samples of a penalty", torch.tensor(batch_size))
                    batch_size = int(of_all)
                # Over all layers, once for each loss that has one: in HugeCTR a penalty belongs to a loss.
                total = total + module.regularizer.penalty(self.layers.parameters(), batch_size)
        return total

    def predictions(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the probabilities [B, n] of each label under the loss that reads it, from the output of `forward`.

        In the order of ``spec.labels``; of several losses over one label the last counts.
        """
        return {label: module.predict(tensors[name]) for label, (name, module) in self._by_label.items()}

    def logits(self) -> dict[str, str]:
        """Return the labels -> the tensors that `predictions` takes for them, in the order of ``spec.labels``."""
        return {label: name for label, (name, _) in self._by_label.items()}

    def probabilities(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the probabilities [B, n] of each tensor that a loss reads, from the output of `forward`."""
        return {layer.bottoms[0]: module.predict(tensors[layer.bottoms[0]]) for layer, module in self._losses}

    def label_logits(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B, L] of all labels, in the order of ``spec.labels``, from the output of `forward`.

        The logit of a softmax over two classes is their difference, whose sigmoid is the probability of the second.

        Raises:
            ConfigError: A label that no loss reads.
        """
        columns = []
        for label in self.spec.labels:
            if label.name not in self._by_label:
                raise ConfigError(f"label {label.name!r}", "no loss reads it, expected one for logits of all labels")
            logits = tensors[self._by_label[label.name][0]]
            # Two logits for a label of one column are those of a softmax over two classes.
            columns.append(logits if logits.shape[1] == label.dim else logits[:, 1:] - logits[:, :1])
        return torch.cat(columns, dim=1)

    def training_loss(self, output: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return `total_loss` of the output of `forward` for `batch`, with the weights of its samples."""
        return self.total_loss(output, batch.weight)

    def output_logits(self, output: Mapping[str, Tensor]) -> Tensor:
        """Return `label_logits` of the output of `forward`."""
        return self.label_logits(output)

    def loss(self, batch: Batch) -> Tensor:
        """Return `training_loss` of `batch`."""
        return self.training_loss(self(batch), batch)

    def predict(self, batch: Batch) -> Tensor:
        """Return the probabilities [B, n] of all labels side by side, in the order of ``spec.labels``."""
        return torch.cat(list(self.predictions(self(batch)).values()), dim=1)

    def tensor(self, batch: Batch, name: str) -> Tensor:
        """Return the tensor `name` for `batch`; losses are scalars.

        Raises:
            ConfigError: No tensor of that name.
        """
        losses = list(self._weight_of)
        if name not in self.shapes and name not in losses:
            raise unknown_name("tensor", name, (*self.shapes, *losses))
        tensors = self(batch)
        return tensors[name] if name in tensors else self.losses(tensors)[name]

    def collection(self, name: str) -> EmbeddingCollection:
        """Return the embedding `name`.

        Raises:
            ConfigError: No embedding of that name.
        """
        if name not in self.embeddings:
            raise unknown_name("embedding", name, tuple(self.embeddings))
        return cast(EmbeddingCollection, self.embeddings[name])

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the inputs of the layers by name: labels, dense inputs and the outputs of the embeddings.

        Raises:
            ConfigError: A batch without the columns that the graph reads.
            KeyOutOfRangeError: A key outside its static table.
        """
        spec = self.spec
        dims = [label.dim for label in spec.labels]
        if batch.label.shape[1] != sum(dims) or (spec.dense_dim and batch.dense.shape[1] != spec.dense_dim):
            raise ConfigError(
                "batch",
                f"got {batch.label.shape[1]} label and {batch.dense.shape[1]} dense columns, expected "
                f"{sum(dims)} ({', '.join(label.name for label in spec.labels)}) and {spec.dense_dim}",
            )
        tensors = dict(zip((label.name for label in spec.labels), torch.split(batch.label, dims, dim=1), strict=True))
        if spec.dense_dim:
            tensors[spec.dense_name] = batch.dense
        for embedding in spec.embeddings:
            tensors |= embed(embedding, self.collection(embedding.name), batch.sparse)
        return tensors


def run_layers(steps: Sequence[tuple[GraphLayer, Layer]], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs and the outputs of the layers by name."""
    tensors = dict(inputs)
    for layer, module in steps:
        tops = module(*(tensors[name] for name in layer.bottoms))
        tensors.update(zip(layer.tops, (tops,) if isinstance(tops, Tensor) else tops, strict=True))
    return tensors


def graph_model(
    spec: GraphModelSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
) -> GraphModel:
    """Return the model of a graph that reads the columns of a data set.

    Args:
        spec: The graph, or its file.
        dataset: Columns; the graph's labels and dense inputs are these in their order.
        num_outputs: Number of the graph's label columns, or None.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: The graph reads columns that the data set does not have, or does not fit together itself.
        DataNotFoundError: There is no such file.
    """
    graph = spec.graph if spec.file is None else read_graph(Path(spec.file))
    assert graph is not None  # the spec has one of them
    _check_dataset(graph, dataset, num_outputs)
    return GraphModel(graph, seed=seed)


def tensor_shapes(spec: GraphSpec) -> dict[str, TensorShape]:
    """Return the shape of every tensor of a graph but the losses; no table is made."""
    return _build(spec, torch.Generator())[0]


def _check_dataset(graph: GraphSpec, dataset: DatasetSpec, num_outputs: int | None) -> None:
    outputs = sum(label.dim for label in graph.labels)
    expected = len(dataset.labels) if num_outputs is None else num_outputs
    for what, got, wanted in (
        ("label columns", outputs, expected),
        ("dense columns", graph.dense_dim, len(dataset.dense)),
    ):
        # A graph may ignore all dense columns, but no label.
        if got != wanted and (what == "label columns" or got):
            raise ConfigError(
                "graph", f"reads {got} {what}, data set {dataset.name!r} gives {wanted}, expected as many"
            )
    columns = {column.name: column for column in dataset.categorical}
    for embedding in graph.embeddings:
        rows = {table.name: table.rows for table in embedding.tables if isinstance(table, TableSpec)}
        for feature in embedding.features:
            column = columns.get(feature.read_column)
            if column is None:
                raise ConfigError(
                    "graph",
                    f"feature {feature.name!r} reads {feature.read_column!r}, which data set {dataset.name!r} "
                    f"does not have{did_you_mean(feature.read_column, columns)}, expected one of "
                    f"{', '.join(columns) or 'its categorical columns, which are none'}",
                )
            num_rows = rows.get(feature.table)
            if num_rows is not None and (column.rows is None or column.rows > num_rows):
                ids = "any keys" if column.rows is None else f"{column.rows} ids"
                raise ConfigError(
                    "graph",
                    f"table {feature.table!r} has {num_rows} rows, column {column.name!r} {ids}, expected a row for "
                    "each id",
                )


def _loss_weights(spec: GraphSpec, losses: list[GraphLayer]) -> dict[str, float]:
    """Return the top of each loss -> weight of the label that it reads."""
    if not losses:
        raise ConfigError("graph", "got no loss layer, expected at least one, such as binary_cross_entropy")
    labels: dict[str, GraphLabel] = {label.name: label for label in spec.labels}
    for loss in losses:
        if len(loss.bottoms) != 2 or loss.bottoms[1] not in labels:
            raise ConfigError(
                f"{loss.kind} {loss.tops[0]!r}",
                f"got bottoms {list(loss.bottoms)}, expected logits and one of the labels {', '.join(labels)}",
            )
    return {loss.tops[0]: labels[loss.bottoms[1]].weight for loss in losses}


def _build(
    spec: GraphSpec, generator: torch.Generator
) -> tuple[dict[str, TensorShape], list[tuple[GraphLayer, Layer]]]:
    """Return the shapes of all tensors, and the layers with their modules."""
    shapes = _input_shapes(spec)
    return shapes, [(layer, _build_layer(layer, shapes, generator)) for layer in spec.layers]


def _input_shapes(spec: GraphSpec) -> dict[str, TensorShape]:
    shapes = {label.name: TensorShape(1, (label.dim,)) for label in spec.labels}
    if spec.dense_dim:
        shapes[spec.dense_name] = TensorShape(1, (spec.dense_dim,))
    for embedding in spec.embeddings:
        shapes |= embedding_shapes(embedding)
    return shapes


def _build_layer(layer: GraphLayer, shapes: dict[str, TensorShape], generator: torch.Generator) -> Layer:
    """Return the module of `layer`, whose tops' shapes are added to `shapes`; a loss has none."""
    for name in layer.bottoms:
        if name not in shapes:
            raise ConfigError(f"{layer.kind} {layer.tops[0]!r}", f"reads {name!r}, which is a loss, expected a tensor")
    bottoms = [shapes[name] for name in layer.bottoms]
    try:
        module = build_layer(layer.kind, bottoms, layer.options, generator=generator)
    except ConfigError as error:
        raise ConfigError(
            f"layer {layer.tops[0]!r} (bottoms {', '.join(layer.bottoms)})", error.where, error.problem
        ) from None
    tops = module.output_shapes
    if len(layer.tops) != max(1, len(tops)):
        raise ConfigError(layer.kind, f"got tops {', '.join(layer.tops)}, expected {max(1, len(tops))} of them")
    # Not strict: a loss has a top, by which its value is named, and no output shape.
    shapes.update(zip(layer.tops, tops, strict=False))
    return module


class Embeddings(nn.ModuleDict):
    """Embeddings by name; a name may also be that of a method, such as "keys", which a plain ModuleDict rejects.

    Raises:
        ConfigError: A name under which every module keeps something of its own, such as "training".
    """

    def __setitem__(self, key: str, module: nn.Module) -> None:
        if key in self.__dict__:
            raise ConfigError("embedding name", f"got {key!r}, expected another, which no torch.nn.Module uses itself")
        self._modules[key] = module  # `add_module` would look for attributes of that name


def build_collection(spec: GraphEmbedding, *, seed: int) -> EmbeddingCollection:
    """Build the tables of `spec`, each with the name of its rule, and the features that read them."""
    features = [
        FeatureSpec(
            name=feature.name,
            table=feature.table,
            pooling="none" if feature.pooling == "concat" else feature.pooling,
            max_keys=feature.max_keys,
        )
        for feature in spec.features
    ]
    tables = [
        # A rule that a table names itself stays.
        dataclasses.replace(table, optimizer=spec.optimizer) if table.optimizer == DEFAULT_OPTIMIZER else table
        for table in spec.tables
    ]
    collection = EmbeddingCollection(tables, features, seed=seed)
    collection.columns = {feature.name: feature.column for feature in spec.features if feature.column is not None}
    return collection


def embedding_shapes(spec: GraphEmbedding) -> dict[str, TensorShape]:
    """Return the shape of each top of `spec`."""
    widths = [spec.width_of(feature) for feature in spec.features]
    if spec.output == "apart":
        return {top: TensorShape(1, (1, width)) for top, width in zip(spec.tops, widths, strict=True)}
    dims = (len(widths), widths[0]) if spec.output == "stacked" else (sum(widths),)
    return {spec.name: TensorShape(1, dims)}


def embed(spec: GraphEmbedding, collection: EmbeddingCollection, jagged: Jagged) -> dict[str, Tensor]:
    """Return the tops of `spec` for the keys of a batch."""
    output = collection(_renamed(jagged, spec))
    padded = {
        feature.name: pad_sequences(output.sequences[feature.name], feature.vectors).values
        for feature in spec.features
        if feature.pooling == "concat"
    }
    return embedding_tops(spec, output.pooled, padded)


def embedding_tops(spec: GraphEmbedding, pooled: Tensor, sequences: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tops of `spec`.

    Args:
        spec: The embedding.
        pooled: float32[B, sum of widths], the pooled features side by side.
        sequences: Other features -> their vectors float32[B, K, D], zeros where there is none.
    """
    vectors = _side_by_side(spec, pooled, sequences)
    if spec.output == "flat":
        return {spec.name: vectors}
    if spec.output == "stacked":
        # A view of [B, S * D], so stacked outputs cost no copy.
        return {spec.name: vectors.view(-1, len(spec.features), spec.width_of(spec.features[0]))}
    widths = [spec.width_of(feature) for feature in spec.features]
    parts = torch.split(vectors, widths, dim=1)
    return {top: part.unsqueeze(1) for top, part in zip(spec.tops, parts, strict=True)}


def _renamed(jagged: Jagged, spec: GraphEmbedding) -> Jagged:
    """Return the bags under the features' own names, where these differ from those of the batch's columns."""
    if all(feature.column is None for feature in spec.features):
        return jagged
    part = select(jagged, [feature.read_column for feature in spec.features])
    return dataclasses.replace(part, names=tuple(feature.name for feature in spec.features))


def _side_by_side(spec: GraphEmbedding, pooled: Tensor, sequences: Mapping[str, Tensor]) -> Tensor:
    """Return the vectors [B, sum of widths] in the order of the features."""
    if not sequences:
        return pooled
    widths = [spec.width_of(feature) for feature in spec.features if feature.name not in sequences]
    parts = iter(torch.split(pooled, widths, dim=1) if widths else ())
    columns = [
        sequences[feature.name].flatten(1) if feature.name in sequences else next(parts) for feature in spec.features
    ]
    return torch.cat(columns, dim=1)
