# SPDX-License-Identifier: Apache-2.0
"""`DensePart`: the layers of a model apart from its lookups, to compute them elsewhere than in eager torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export.graph_models import GraphScoring
from terarec.export.inputs import ModelInput, given_vectors
from terarec.export.scoring import BatchScoring, Scores, Scoring, all_collections
from terarec.models import GraphModel
from terarec.spec import DatasetSpec

_LIST_LENGTH = 5
"""Vectors of a list among random values."""


class DensePart:
    """The layers of a model: dense columns and the vectors of its tables -> scores of each label.

    Attributes:
        inputs: Arguments, in order.
        module: Layers: values of `inputs` -> scores float32[B, n] of each label. They share no weights with the model,
            and need no tables.
        look_up: Function that returns the values of `inputs` for a batch.
    """

    def __init__(self, module: Scoring, look_up: Callable[[Batch], list[Tensor]]) -> None:
        self.inputs: tuple[ModelInput, ...] = module.inputs
        self.module = module
        self.look_up = look_up

    @classmethod
    def of(cls, model: nn.Module, dataset: DatasetSpec, scores: Scores) -> DensePart:
        """Split a model.

        Args:
            model: Model that takes a `Batch`, on the CPU; in evaluation mode.
            dataset: The columns that it reads.
            scores: Scores of logits.
        """
        if isinstance(model, GraphModel):
            return cls.of_graph(model, scores)
        collections = all_collections(model)
        if not collections:
            raise ConfigError(type(model).__name__, "has no tables, expected a model that looks keys up")
        _check_lookups(model, dataset)
        scoring = BatchScoring(model, dataset, tables=False, key_inputs=(), scores=scores)
        # One sample would wait 2 us for checks of the poolings of its 26 features.
        pooled_alone = {
            path
            for path, collection in collections.items()
            if all(feature.pooling != "none" for feature in collection.features)
        }

        def look_up(batch: Batch) -> list[Tensor]:
            values = [batch.dense] if dataset.dense else []
            for path, collection in collections.items():
                output = collection(batch.sparse)
                if path in pooled_alone:
                    values.append(output.pooled)
                else:
                    values += [value for _, value in given_vectors(path, collection, output)]
            return values

        return cls(scoring.without_lookups().eval(), look_up)

    @classmethod
    def of_graph(cls, model: GraphModel, scores: Scores | None = None) -> DensePart:
        """Split a graph model.

        Args:
            model: The model, on the CPU; in evaluation mode.
            scores: Scores of the logits of its labels; None for the predictions of its losses.

        Raises:
            ConfigError: A model whose predictions depend on labels, or that takes batches of one size alone.
        """
        # A graph says by its spec what is looked up, so nothing needs to be found out by running it.
        scoring = GraphScoring(model, tables=False, scores=scores)
        if scoring.batch_size:
            raise ConfigError("graph", f"takes batches of {scoring.batch_size} samples alone, expected any number")
        names = [one.name for one in scoring.inputs]

        def look_up(batch: Batch) -> list[Tensor]:
            tensors = model.inputs(batch)
            return [tensors[name] for name in names]

        return cls(scoring.without_lookups().eval(), look_up)

    def random_values(self, batch_size: int, seed: int = 0) -> list[Tensor]:
        """Return values of `inputs` for a batch of `batch_size` samples, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        random: list[Tensor] = []
        for one in self.inputs:
            shape = [batch_size, *(_LIST_LENGTH if dim is None else dim for dim in one.dims)]
            values = torch.randn(shape, generator=generator)
            if one.dtype == "bool":  # which vectors of the sequence before it are there; others are zeros
                values = values > 0
                random[-1] *= values.unsqueeze(-1)
            random.append(values)
        return random


def _check_lookups(model: nn.Module, dataset: DatasetSpec) -> None:
    """Check that the model passes the unchanged keys of the batch to each collection, exactly once."""
    # Found by running the model once, on the key 0 in every column: no attribute says what its code does with keys.
    num_columns = len(dataset.categorical)
    sparse = Jagged(
        names=tuple(column.name for column in dataset.categorical),
        keys=torch.zeros(num_columns, dtype=torch.int64),
        offsets=torch.arange(num_columns + 1),
    )
    batch = Batch(dense=torch.zeros(1, len(dataset.dense)), label=torch.zeros(1, len(dataset.labels)), sparse=sparse)
    inputs: list[object] = []
    lookups = all_collections(model)
    handles = [
        collection.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
        for collection in lookups.values()
    ]
    try:
        with torch.inference_mode():
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(inputs) != len(lookups) or any(keys is not sparse for keys in inputs):
        raise ConfigError(
            type(model).__name__,
            "looks up other keys than those of the batch, expected a model that takes them as given",
        )
