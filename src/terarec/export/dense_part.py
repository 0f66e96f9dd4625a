"""`DensePart`: the layers of a model as a function of tensors, for a runtime that does the lookups itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export.inputs import ModelInput, given_vectors
from terarec.export.scoring import Scores, Scoring, all_collections, without_lookups
from terarec.models import GraphModel
from terarec.spec import DatasetSpec

_LIST_LENGTH = 5
"""Vectors of a list among random values."""


class DensePart:
    """The layers of a model: dense columns and the vectors of its tables -> scores of each label.

    Attributes:
        inputs: Arguments, in order.
        module: Takes their values and returns the scores float32[B, n] of each label. It shares no weights with the
            model, and needs no tables.

    Args:
        model: Takes a `Batch`, on the CPU; in evaluation mode.
        dataset: The columns that it reads.
        scores: Scores of logits.

    Raises:
        ConfigError: A model whose lookups cannot be told from its layers.
    """

    def __init__(self, model: nn.Module, dataset: DatasetSpec, scores: Scores) -> None:
        if isinstance(model, GraphModel):
            raise ConfigError(type(model).__name__, "graph models are not split, expected another model")
        self._collections = all_collections(model)
        if not self._collections:
            raise ConfigError(type(model).__name__, "has no tables, expected a model that looks keys up")
        _check_lookups(model, dataset)
        scoring = Scoring(model, dataset, tables=False, key_inputs=(), scores=scores)
        self.inputs: tuple[ModelInput, ...] = scoring.inputs
        self.module = without_lookups(scoring).eval()
        self._has_dense = bool(dataset.dense)

    def look_up(self, batch: Batch) -> list[Tensor]:
        """Return the values of `inputs` for a batch."""
        values = [batch.dense] if self._has_dense else []
        for path, collection in self._collections.items():
            values += [value for _, value in given_vectors(path, collection, collection(batch.sparse))]
        return values

    def random_values(self, batch_size: int, seed: int = 0) -> list[Tensor]:
        """Return values of `inputs` for a batch of `batch_size` samples, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        found: list[Tensor] = []
        for given in self.inputs:
            shape = [batch_size, *(_LIST_LENGTH if dim is None else dim for dim in given.dims)]
            values = torch.randn(shape, generator=generator)
            if given.dtype == "bool":  # which vectors of the sequence before it are there; others are zeros
                values = values > 0
                found[-1] *= values.unsqueeze(-1)
            found.append(values)
        return found


def _check_lookups(model: nn.Module, dataset: DatasetSpec) -> None:
    """Check that the model gives each collection the keys of the batch, as they are, and once.

    Raises:
        ConfigError: One that does not.
    """
    num_columns = len(dataset.categorical)
    sparse = Jagged(
        names=tuple(column.name for column in dataset.categorical),
        keys=torch.zeros(num_columns, dtype=torch.int64),
        offsets=torch.arange(num_columns + 1),
    )
    batch = Batch(dense=torch.zeros(1, len(dataset.dense)), label=torch.zeros(1, len(dataset.labels)), sparse=sparse)
    given: list[object] = []
    found = all_collections(model)
    handles = [
        collection.register_forward_pre_hook(lambda module, arguments: given.append(arguments[0]))
        for collection in found.values()
    ]
    try:
        with torch.inference_mode():
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(given) != len(found) or any(keys is not sparse for keys in given):
        raise ConfigError(
            type(model).__name__,
            "looks up other keys than those of the batch, expected a model that takes them as given",
        )
