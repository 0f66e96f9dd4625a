# SPDX-License-Identifier: Apache-2.0
"""A model's scores from plain tensors, to be traced by `torch.export`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection, EmbeddingOutput, PaddedSequences
from terarec.embedding.lookups import LookupCollection
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.export.inputs import (
    NO_KEY,
    AnyCollection,
    KeyInput,
    ModelInput,
    dense_input,
    key_input,
    vector_inputs,
)
from terarec.export.lookups import GivenOutputs, GivenVectors, padded_output
from terarec.nn.precision import Precision, autocast
from terarec.spec import CategoricalColumn, DatasetSpec, Numbers
from terarec.storage.store import TableRows

Scores = Callable[[Tensor], Tensor]
"""Logits float[B, C] -> scores float[B, C], such as `torch.sigmoid`."""


class BatchColumns(NamedTuple):
    """The columns of the batches that a model scores.

    Attributes:
        categorical: The columns of keys.
        tables: Name of such a column -> the tables that its keys are looked up in.
        num_dense: Number F of dense columns.
        num_labels: Number of label columns.
        beside: List column -> the one whose lists have its lengths, a value for each of their keys.
    """

    categorical: Sequence[CategoricalColumn]
    tables: Mapping[str, Sequence[TableRows]]
    num_dense: int
    num_labels: int
    beside: Mapping[str, str] = {}


class Scoring(nn.Module):
    """Base of the modules that turn the values of `inputs` into the scores of each label.

    With tables, or without them before `without_lookups`, it can run inside the block of `exportable` alone.

    Attributes:
        model: The model.
        inputs: Arguments of `forward`, in this order.
        outputs: The labels, in the order in which `forward` returns their scores.
        tables: Whether the tables are part of the module; else the vectors that they give are inputs.
        row_type: Numbers of the rows in the file.
        batch_size: Number of samples of every batch, for a model that takes no other; None for any number.

    Args:
        model: The model; in evaluation mode.
        numbers: Numbers of the rows in the file, and of the layers' products; None for fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        inputs: Sequence[ModelInput],
        outputs: Sequence[str],
        tables: bool,
        numbers: Numbers | None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        numbers = numbers or Numbers()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.tables = tables
        self.row_type = numbers.row_type
        self.batch_size = batch_size
        self._products = cast(Precision, numbers.precision) if numbers.precision in ("bf16", "fp16") else None

    def scores_of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the scores float32[B, n] of each label by the unchanged model."""
        raise NotImplementedError

    def columns(self) -> BatchColumns:
        """Return the columns of batches, with the tables of the unchanged model."""
        raise NotImplementedError

    def without_lookups(self) -> Scoring:
        """Return a copy of a scoring without tables, which needs no block of `exportable`; rows are not copied."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[None]:
        """Return the block in which the layers compute."""
        # No block of autocast where it would change nothing: an exported program keeps it as a graph of its own.
        return nullcontext() if self._products is None else autocast(self._products)


class BatchScoring(Scoring):
    """The scores of any model that takes a `Batch`.

    Args:
        model: The model; in evaluation mode.
        dataset: The columns that it reads.
        tables: Tables as in `Scoring`.
        key_inputs: Sources of the keys; by default an input for each column that the model reads.
        scores: Scores of logits.
        numbers: Numbers as in `Scoring`.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: DatasetSpec,
        *,
        tables: bool,
        key_inputs: Sequence[KeyInput],
        scores: Scores,
        numbers: Numbers | None = None,
    ) -> None:
        sources = _key_inputs(model, dataset, key_inputs) if tables else []
        of_model = all_collections(model)
        inputs = [dense_input(dense_name(dataset), [column.name for column in dataset.dense])] if dataset.dense else []
        inputs += [key_input(source) for source in sources]
        for path, collection in ({} if tables else of_model).items():
            inputs += vector_inputs(model, path, collection)
        outputs = [column.name for column in dataset.labels]
        super().__init__(model, inputs=inputs, outputs=outputs, tables=tables, numbers=numbers)
        self._dataset = dataset
        self._scores = scores
        self._single = frozenset(column.name for column in dataset.categorical if column.hotness == 1)
        self._sources = sources
        self._features = {path: collection.features for path, collection in of_model.items()}

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the scores float32[B, n] of each label: n is 1, or the number of classes of a single label."""
        rest = list(values)
        has_dense = bool(self._dataset.dense)
        dense = rest.pop(0) if has_dense else rest[0].new_zeros(rest[0].shape[0], 0, dtype=torch.float32)
        # A batch has labels; the model reads none when it scores.
        label = dense.new_zeros(dense.shape[0], len(self.outputs))
        # The modules that replace collections take it as it is.
        reads_vectors = not self.tables and self._features
        sparse = cast(Jagged, self._vectors(rest) if reads_vectors else self._keys(rest))
        return self.scores_of(Batch(dense=dense, label=label, sparse=sparse))

    @override
    def scores_of(self, batch: Batch) -> tuple[Tensor, ...]:
        with self.autocast():
            output = self.model(batch)
        output_logits = getattr(self.model, "output_logits", None)
        scores = self._scores(output if output_logits is None else output_logits(output)).float()
        # A single label may have a score for each class, which stay one output.
        return (scores,) if len(self.outputs) == 1 else torch.split(scores, 1, dim=1)

    @override
    def columns(self) -> BatchColumns:
        tables: dict[str, list[TableRows]] = {}
        for collection in collections(self.model).values():
            for feature in collection.features:
                tables.setdefault(feature.name, []).append(collection.tables[feature.table])
        dataset = self._dataset
        beside: Mapping[str, str] = getattr(self.model, "beside", {})
        return BatchColumns(dataset.categorical, tables, len(dataset.dense), len(dataset.labels), beside)

    @override
    def without_lookups(self) -> Scoring:
        # `deepcopy` uses the entries here as its copies of collections.
        memo: dict[int, object] = {
            id(collection): GivenVectors(path, collection) for path, collection in all_collections(self.model).items()
        }
        return copy.deepcopy(self, memo)

    def _keys(self, values: Sequence[Tensor]) -> PaddedKeys:
        keys, masks = padded_columns(self._sources, values)
        for column in self._single & keys.keys():  # its key may be any integer
            keys[column] = keys[column][:, :1]
            masks[column] = torch.ones_like(keys[column], dtype=torch.bool)
        return PaddedKeys(keys, masks)

    def _vectors(self, values: Sequence[Tensor]) -> GivenOutputs:
        rest = iter(values)
        outputs: dict[str, EmbeddingOutput] = {}
        for path, features in self._features.items():
            pools = any(feature.pooling != "none" for feature in features)
            pooled = next(rest) if pools else values[0].new_zeros(values[0].shape[0], 0)
            sequences = {
                feature.name: PaddedSequences(values=next(rest), mask=next(rest))
                for feature in features
                if feature.pooling == "none"
            }
            outputs[path] = padded_output(pooled, sequences)
        return GivenOutputs(outputs)


def padded_columns(
    sources: Sequence[KeyInput], values: Sequence[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the keys int64[B, K] of each column, and the places bool[B, K] that have one, of ``int64[B, n, K]``."""
    keys = {
        column: value[:, place]
        for source, value in zip(sources, values, strict=True)
        for place, column in enumerate(source.columns)
    }
    return keys, {column: keys_of_column != NO_KEY for column, keys_of_column in keys.items()}


def collections(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Return each path in `model` -> its collection that holds rows."""
    return {path: module for path, module in model.named_modules() if isinstance(module, EmbeddingCollection)}


def all_collections(model: nn.Module) -> dict[str, AnyCollection]:
    """Return each path in `model` -> its collection, wherever the rows are."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingCollection | LookupCollection)
    }


def _key_inputs(model: nn.Module, dataset: DatasetSpec, chosen: Sequence[KeyInput]) -> list[KeyInput]:
    """Return `chosen`, or an input for each column that the model reads, of length 1 for one key a sample."""
    read = {feature.name for collection in collections(model).values() for feature in collection.features}
    read.update(getattr(model, "key_columns", ()))
    if not chosen:
        return [
            KeyInput(name=column.name, columns=(column.name,), max_keys=1 if column.hotness == 1 else None)
            for column in dataset.categorical
            if column.name in read
        ]
    check_key_inputs(chosen, read, known=[column.name for column in dataset.categorical])
    return list(chosen)


def check_key_inputs(
    sources: Sequence[KeyInput], read: Collection[str], *, known: Collection[str] | None = None
) -> None:
    """Check that the inputs have each column that a model reads once, and no other than the known ones."""
    columns = [column for source in sources for column in source.columns]
    for column in (*columns, *sorted(read)):
        if columns.count(column) != 1 or (known is not None and column not in known):
            raise ConfigError(
                "key inputs",
                f"got column {column!r} {columns.count(column)} times, expected each of the columns that "
                f"the model reads once: {', '.join(sorted(read))}",
            )


def dense_name(dataset: DatasetSpec) -> str:
    """Return the name of the input with the dense columns: "dense", unless a column has it."""
    name = "dense"
    # Inputs have the names of columns, among which this one must be free.
    while name in dataset.column_names:
        name += "_columns"
    return name
