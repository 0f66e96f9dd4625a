"""A model's scores from plain tensors, to be traced by `torch.export`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection, EmbeddingOutput, LookupCollection, PaddedKeys, PaddedSequences
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
from terarec.spec import DatasetSpec, Numbers

Scores = Callable[[Tensor], Tensor]
"""Logits float[B, C] -> scores float[B, C], such as `torch.sigmoid`."""


class Scoring(nn.Module):
    """Turns the values of `inputs` into the scores of each label. It can run inside the block of `exportable` alone.

    Attributes:
        inputs: Arguments of `forward`, in this order.
        outputs: The labels, in the order in which `forward` returns their scores.

    Args:
        model: Model that takes a `Batch`; in evaluation mode.
        dataset: The columns that it reads.
        tables: Whether the tables are part of the module; else the vectors that they give are inputs.
        key_inputs: Sources of the keys; by default an input for each column that the model reads.
        scores: Scores of logits.
        numbers: Numbers of the rows in the file, and of the layers' products.

    Raises:
        ConfigError: Key inputs that lack a column, or name one twice.
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
        super().__init__()
        self.model = model
        self.row_type = "fp32" if numbers is None else numbers.row_type
        is_half = numbers is not None and numbers.precision in ("bf16", "fp16")
        self._products = cast(Precision, numbers.precision) if numbers is not None and is_half else None
        self.outputs = tuple(column.name for column in dataset.labels)
        self._scores = scores
        self._has_dense = bool(dataset.dense)
        self._single = frozenset(column.name for column in dataset.categorical if column.hotness == 1)
        self._sources = _key_inputs(model, dataset, key_inputs) if tables else []
        found_collections = all_collections(model)
        self._paths = [] if tables else list(found_collections)
        found = [dense_input(dense_name(dataset), [column.name for column in dataset.dense])] if dataset.dense else []
        found += [key_input(source) for source in self._sources]
        for path in self._paths:
            found += vector_inputs(model, path, found_collections[path])
        self.inputs: tuple[ModelInput, ...] = tuple(found)
        self._features = {path: collection.features for path, collection in found_collections.items()}

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the scores float32[B, n] of each label: n is 1, or the number of classes of a single label."""
        rest = list(values)
        dense = rest.pop(0) if self._has_dense else rest[0].new_zeros(rest[0].shape[0], 0, dtype=torch.float32)
        # A batch has labels; the model reads none when it scores.
        label = dense.new_zeros(dense.shape[0], len(self.outputs))
        # The modules that replace collections take it as it is.
        sparse = cast(Jagged, self._vectors(rest) if self._paths else self._keys(rest))
        return self.scores_of(Batch(dense=dense, label=label, sparse=sparse))

    def scores_of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the scores float32[B, n] of each label by the unchanged model."""
        # No block of autocast where it would change nothing: an exported program keeps it as a graph of its own.
        with nullcontext() if self._products is None else autocast(self._products):
            output = self.model(batch)
        output_logits = getattr(self.model, "output_logits", None)
        scores = self._scores(output if output_logits is None else output_logits(output)).float()
        # A single label may have a score for each class, which stay one output.
        return (scores,) if len(self.outputs) == 1 else torch.split(scores, 1, dim=1)

    def _keys(self, values: Sequence[Tensor]) -> PaddedKeys:
        keys, masks = {}, {}
        for source, value in zip(self._sources, values, strict=True):
            for place, column in enumerate(source.columns):
                is_single = column in self._single  # its key may be any integer
                keys[column] = value[:, place, :1] if is_single else value[:, place]
                masks[column] = torch.ones_like(keys[column], dtype=torch.bool) if is_single else keys[column] != NO_KEY
        return PaddedKeys(keys, masks)

    def _vectors(self, values: Sequence[Tensor]) -> GivenOutputs:
        rest = iter(values)
        found: dict[str, EmbeddingOutput] = {}
        for path in self._paths:
            features = self._features[path]
            pools = any(feature.pooling != "none" for feature in features)
            pooled = next(rest) if pools else values[0].new_zeros(values[0].shape[0], 0)
            sequences = {
                feature.name: PaddedSequences(values=next(rest), mask=next(rest))
                for feature in features
                if feature.pooling == "none"
            }
            found[path] = padded_output(pooled, sequences)
        return GivenOutputs(found)


def without_lookups(scoring: Scoring) -> Scoring:
    """Return a copy whose vectors are inputs, which needs no block of `exportable`; rows are not copied.

    Args:
        scoring: Scoring without tables.
    """
    found = all_collections(scoring.model)
    # `deepcopy` uses the entries here as its copies of collections.
    memo: dict[int, object] = {id(collection): GivenVectors(path, collection) for path, collection in found.items()}
    return copy.deepcopy(scoring, memo)


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


def _key_inputs(model: nn.Module, dataset: DatasetSpec, given: Sequence[KeyInput]) -> list[KeyInput]:
    """Return `given`, or an input for each column that a collection reads, of length 1 for one key a sample."""
    read = {feature.name for collection in collections(model).values() for feature in collection.features}
    if not given:
        return [
            KeyInput(name=column.name, columns=(column.name,), max_keys=1 if column.hotness == 1 else None)
            for column in dataset.categorical
            if column.name in read
        ]
    known = {column.name for column in dataset.categorical}
    columns = [column for source in given for column in source.columns]
    for column in (*columns, *sorted(read)):
        if column not in known or columns.count(column) != 1:
            raise ConfigError(
                "key inputs",
                f"got column {column!r} {columns.count(column)} times, expected each of the columns that "
                f"the model reads once: {', '.join(sorted(read))}",
            )
    return list(given)


def dense_name(dataset: DatasetSpec) -> str:
    """Return the name of the input with the dense columns: "dense", unless a column has it."""
    name = "dense"
    # Inputs have the names of columns, among which this one must be free.
    while name in dataset.column_names:
        name += "_columns"
    return name
