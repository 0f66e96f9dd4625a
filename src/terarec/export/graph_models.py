# SPDX-License-Identifier: Apache-2.0
"""Graph models in the formats of other runtimes: their scores from plain tensors, and `export_onnx`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from terarec.batch import Batch
from terarec.embedding import EmbeddingOutput, PaddedSequences
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.export.files import trace
from terarec.export.inputs import KeyInput, ModelInput, dense_input, key_input
from terarec.export.onnx_file import save_onnx
from terarec.export.scoring import BatchColumns, Scores, Scoring, check_key_inputs, padded_columns
from terarec.io.directories import atomic_entries
from terarec.models.graph import Embeddings, GraphModel, embedding_tops, run_layers
from terarec.nn.layer import Layer
from terarec.nn.registry import LAYERS
from terarec.spec import CategoricalColumn, GraphEmbedding, GraphLayer, Numbers
from terarec.storage.store import TableRows

_LIST_LENGTH = 4
"""Most keys of the random bags for columns of a graph, which does not say how long bags are."""


def export_onnx(
    model: GraphModel,
    path: Path,
    *,
    embeddings: bool = True,
    key_inputs: Sequence[KeyInput] = (),
    name: str = "terarec",
    has_empty_dense: bool = False,
) -> None:
    """Write the predictions of `model` in evaluation as an ONNX file, in float32.

    Inputs, in this order: the dense tensor float32[batch, F] if F > 0 or `has_empty_dense`; with `embeddings` the key
    inputs int64[batch, n, K], else the embeddings' tops float32[batch, ...], each under its own name. A bag of fewer
    than K keys is filled up with `NO_KEY`. Outputs: the predictions of each label under its name. The length of the
    batch is open, unless a layer fixes it (docs/export.md). Constants of more than 1.5 GiB are in a file next to it,
    ``<path>.data``.

    Args:
        model: The model, with its weights as they are now; put into evaluation mode.
        path: The file.
        embeddings: Whether the tables are in the file.
        key_inputs: Sources of the keys; by default an input for each column that an embedding reads.
        name: Name of the graph.
        has_empty_dense: Whether a model without dense numbers has an input float32[batch, 0] for them, too.

    Raises:
        ConfigError: A model that is not a graph, predictions that depend on labels, or key inputs that lack a column.
        MissingDependencyError: ``onnxscript`` is not installed.
        StorageError: The disk is full; nothing is left behind.
    """
    if not isinstance(model, GraphModel):
        raise ConfigError(
            "export_onnx",
            f"got a {type(model).__name__}, expected a GraphModel; terarec.export.export_model takes any model",
        )
    model.eval()
    scoring = GraphScoring(model, tables=embeddings, key_inputs=key_inputs, has_empty_dense=has_empty_dense)
    with atomic_entries(path.parent) as folder:
        save_onnx(trace(scoring), scoring, folder / path.name, name=name)


class GraphScoring(Scoring):
    """The scores of a graph model, without the layers that no prediction needs.

    Without tables the vectors are the tops of the embeddings under their names.

    Args:
        model: The model; in evaluation mode.
        tables: Tables as in `Scoring`.
        key_inputs: Sources of the keys; by default an input of open length for each column.
        dense: Names of the dense columns, where they are known.
        has_empty_dense: Whether a model without dense columns has an input of length 0 for them, too.
        scores: Scores of the logits of its labels; None for the predictions of its losses.
        numbers: Numbers as in `Scoring`.

    Raises:
        ConfigError: A model whose predictions depend on labels, or key inputs that lack a column, or name one twice.
    """

    model: GraphModel

    def __init__(
        self,
        model: GraphModel,
        *,
        tables: bool,
        key_inputs: Sequence[KeyInput] = (),
        dense: Sequence[str] = (),
        has_empty_dense: bool = False,
        scores: Scores | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        spec = model.spec
        steps, read = _needed_layers(model)
        embeddings = [embedding for embedding in spec.embeddings if not read.isdisjoint(embedding.tops)]
        columns = list(dict.fromkeys(feature.read_column for one in embeddings for feature in one.features))
        sources = list(key_inputs or (KeyInput(name=column, columns=(column,)) for column in columns)) if tables else []
        check_key_inputs(sources, columns if tables else ())
        inputs = []
        if spec.dense_dim or has_empty_dense:
            inputs.append(dense_input(spec.dense_name, dense, width=spec.dense_dim))
        inputs += [key_input(source) for source in sources]
        for embedding in () if tables else embeddings:
            inputs += [_top_input(model, embedding, top) for top in embedding.tops if top in read]
        outputs = [label.name for label in spec.labels] if scores else list(model.logits())
        size = next((module.batch_size for _, module in steps if module.batch_size), None)
        super().__init__(model, inputs=inputs, outputs=outputs, tables=tables, numbers=numbers, batch_size=size)
        self._names = [one.name for one in inputs]
        self._sources = sources
        self._embeddings = embeddings if tables else []
        self._steps = steps
        self._scores = scores

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the scores float32[B, n] of each label."""
        tensors = dict(zip(self._names, values, strict=True))
        with self.autocast():
            keys, masks = padded_columns(self._sources, [tensors[source.name] for source in self._sources])
            for embedding in self._embeddings:
                tensors |= self._looked_up(embedding, keys, masks)
            return self._scored(run_layers(self._steps, tensors))

    @override
    def scores_of(self, batch: Batch) -> tuple[Tensor, ...]:
        with self.autocast():
            return self._scored(self.model(batch))

    @override
    def columns(self) -> BatchColumns:
        # The graph does not say how long bags are.
        spec = self.model.spec
        most: dict[str, int] = {}
        tables: dict[str, list[TableRows]] = {}
        for embedding in spec.embeddings:
            for feature in embedding.features:
                most.setdefault(feature.read_column, _LIST_LENGTH)
                stores = self.model.collection(embedding.name).tables
                tables.setdefault(feature.read_column, []).append(stores[feature.table])
        for source in self._sources:  # the file reads no more keys than its inputs have
            most |= {column: min(_LIST_LENGTH, source.max_keys or _LIST_LENGTH) for column in source.columns}
        columns = [CategoricalColumn(name=column, hotness=length) for column, length in most.items()]
        return BatchColumns(columns, tables, spec.dense_dim, sum(label.dim for label in spec.labels))

    @override
    def without_lookups(self) -> Scoring:
        # `deepcopy` uses the entries here as its copies of the tables.
        return copy.deepcopy(self, {id(self.model.embeddings): Embeddings({})})

    def _looked_up(
        self, embedding: GraphEmbedding, keys: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the tops of `embedding`, whose collection is replaced by one for a program."""
        read = {feature.name: feature.read_column for feature in embedding.features}
        padded = PaddedKeys(
            {name: keys[column] for name, column in read.items()},
            {name: masks[column] for name, column in read.items()},
        )
        output: EmbeddingOutput = self.model.embeddings[embedding.name](padded)
        sequences = cast(Mapping[str, PaddedSequences], output.sequences)
        return embedding_tops(embedding, output.pooled, {name: sequence.values for name, sequence in sequences.items()})

    def _scored(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the scores of each label, of the tensors that losses read."""
        if self._scores is None:
            return tuple(scores.float() for scores in self.model.predictions(tensors).values())
        scores = self._scores(self.model.label_logits(tensors)).float()
        widths = [label.dim for label in self.model.spec.labels]
        return (scores,) if len(widths) == 1 else torch.split(scores, widths, dim=1)


def _needed_layers(model: GraphModel) -> tuple[list[tuple[GraphLayer, Layer]], set[str]]:
    """Return the layers that predictions depend on, without the losses, and the tensors that are read."""
    labels = {label.name for label in model.spec.labels}
    read = set(model.logits().values())
    needed = []
    # Layers are in an order in which each reads what came before: one backward pass finds all that is needed.
    for layer, module in zip(reversed(model.spec.layers), reversed(model.layers), strict=True):
        if LAYERS[layer.kind].is_loss or read.isdisjoint(layer.tops):
            continue
        if not labels.isdisjoint(layer.bottoms):
            raise ConfigError(f"layer {layer.tops[0]!r}", "reads a label, expected predictions that depend on none")
        read.update(layer.bottoms)
        needed.append((layer, cast(Layer, module)))
    return needed[::-1], read


def _top_input(model: GraphModel, embedding: GraphEmbedding, top: str) -> ModelInput:
    def read(batch: Batch) -> NDArray[np.generic]:
        # Contiguous, as runtimes read the array by its address: the top may be a part of a wider tensor.
        return model.tensor(batch, top).detach().cpu().contiguous().numpy()

    columns = tuple(feature.read_column for feature in embedding.features)
    return ModelInput(name=top, dtype="float32", dims=model.shapes[top].dims, columns=columns, read=read)
