# SPDX-License-Identifier: Apache-2.0
"""Every model over columns equals its formula in float64, on data sets of every shape, and so do all gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from terarec.batch import Batch, Jagged
from terarec.models import build_model, contract
from terarec.models.artifact import dense_state, tables
from terarec.nn.objectives import BinaryObjective
from terarec.spec import DatasetSpec
from terarec.spec.model import ModelSpec
from tests.models.every import (
    BST_MODELS,
    COLUMN_MODELS,
    CONTEXT_MODELS,
    DIEN_MODELS,
    DIN_MODELS,
    NEXT_ITEM_MODELS,
    PAIR_MODELS,
    RANKER_MODELS,
    TWO_TOWER_MODELS,
    dataset,
    random_batch,
)
from tests.models.formulas import Array, Sample, Weights, logits
from tests.models.gradients import check_gradients, rows_of

SHAPES = {
    "all": dataset(),
    "without dense": dataset(dense=0),
    "without categorical": dataset(categorical=()),
    "several labels": dataset(labels=3),
    "one category": dataset(categorical=("a",)),
}


def random_model(spec: ModelSpec, columns: DatasetSpec) -> nn.Module:
    """A model in evaluation mode and float64, none of whose weights or statistics is at its first value."""
    model = build_model(spec, columns, seed=1).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.endswith("rows"):  # which marks tables
                tensor.normal_(0, 0.7, generator=generator)
        for name, tensor in model.named_buffers():
            if "running" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
        for table in tables(model).values():
            table.weights.normal_(0, 0.7, generator=generator)
    return model.double()


def weights_of(model: nn.Module) -> Weights:
    dense = {name: tensor.detach().numpy() for name, tensor in dense_state(model).items()}
    return Weights(dense, rows_of(model))


def samples_of(batch: Batch) -> list[Sample]:
    def bag(index: int) -> list[int]:
        return batch.sparse.keys[batch.sparse.offsets[index] : batch.sparse.offsets[index + 1]].tolist()

    size = batch.batch_size
    return [
        Sample(
            batch.dense[row].double().numpy(),
            {name: bag(index * size + row) for index, name in enumerate(batch.sparse.names)},
        )
        for row in range(size)
    ]


def check(spec: ModelSpec, columns: DatasetSpec, batch: Batch | None = None) -> None:
    """Compare the logits, the loss and the gradients of a model with those of its formula."""
    model = random_model(spec, columns)
    batch = batch or random_batch(columns, seed=5)
    weight = torch.linspace(0.5, 2.0, batch.batch_size)
    batch = replace(batch, dense=batch.dense.double(), weight=weight)
    samples, weights = samples_of(batch), weights_of(model)
    label, factors = batch.label.double().numpy(), weight.double().numpy()[:, None]

    def of_formula(weights: Weights) -> Array:
        return np.stack([logits(spec, weights, sample, columns) for sample in samples])

    def loss(weights: Weights) -> float:
        found = of_formula(weights)
        return float(np.mean((np.logaddexp(0, found) - label * found) * factors))

    found = contract.logits_of(model, model(batch))
    assert found.shape == (batch.batch_size, len(columns.labels))
    np.testing.assert_allclose(found.detach().numpy(), of_formula(weights), rtol=2e-5, atol=2e-5)  # rows are float32
    check_gradients(model, weights, BinaryObjective().loss(found, batch), loss)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COLUMN_MODELS)
def test_a_model_equals_its_formula(name: str, shape: str) -> None:
    spec, columns = COLUMN_MODELS[name], SHAPES[shape]
    check(spec, columns)


@pytest.mark.parametrize("shape", ["all", "without dense", "several labels"])
@pytest.mark.parametrize("name", [*DIN_MODELS, *BST_MODELS, *DIEN_MODELS, *RANKER_MODELS])
def test_models_of_histories_equal_their_formulas(name: str, shape: str) -> None:
    check({**DIN_MODELS, **BST_MODELS, **DIEN_MODELS, **RANKER_MODELS}[name], SHAPES[shape])


@pytest.mark.parametrize("shape", ["all", "without dense", "several labels"])
@pytest.mark.parametrize("name", CONTEXT_MODELS)
def test_gates_of_named_columns_equal_their_formula(name: str, shape: str) -> None:
    check(CONTEXT_MODELS[name], SHAPES[shape])


RETRIEVAL_MODELS = {**TWO_TOWER_MODELS, **PAIR_MODELS, **NEXT_ITEM_MODELS}


@pytest.mark.parametrize("name", RETRIEVAL_MODELS)
def test_models_of_retrieval_equal_their_formulas(name: str) -> None:
    check(RETRIEVAL_MODELS[name], SHAPES["all"])


@pytest.mark.parametrize("name", ["din", "din-softmax"])
@pytest.mark.parametrize("training", [False, True])
def test_din_does_not_see_padding(name: str, training: bool) -> None:
    """The same histories with zeros behind them give the same logits, in training too."""
    columns = dataset()
    model = random_model(DIN_MODELS[name], columns).train(training)
    size, lengths = 3, [2, 0, 1]
    plain = [[1], [2], [3], [4], [5], [6], [], [1, 2], [3], [5, 2], [], [4]]
    padded = [*plain[:9], *([*keys, *[0] * (4 - length)] for keys, length in zip(plain[9:], lengths, strict=True))]
    found = []
    for bags in (plain, padded):
        offsets = np.cumsum([0, *map(len, bags)])
        jagged = Jagged(
            names=("a", "b", "tags", "past"),
            keys=torch.tensor([key for keys in bags for key in keys]),
            offsets=torch.from_numpy(offsets),
        )
        dense = torch.linspace(-1, 1, size * 2, dtype=torch.float64).view(size, 2)
        torch.manual_seed(0)
        found.append(model(Batch(dense=dense, label=torch.zeros(size, 1), sparse=jagged)))
    torch.testing.assert_close(found[0], found[1])
