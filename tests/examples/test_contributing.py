"""CONTRIBUTING.md shows what a layer, a model and a metric cost: at most three files, and they work as shown."""

from pathlib import Path

import pytest

from tests.examples.worked import edited_package, edits, run

LAYER = """
import torch
from terarec.models import GraphModel
from terarec.nn import LAYERS, TensorShape, build_layer
from terarec.spec import GraphLabel, GraphLayer, GraphSpec

layer = build_layer("swish", [TensorShape(1, (3,))], {"beta": 2.0}, generator=torch.Generator())
x = torch.tensor([[-1.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
assert torch.allclose(layer(x), x / (1 + torch.exp(-2.0 * x)))
assert torch.autograd.gradcheck(layer, x)
assert [option.name for option in LAYERS["swish"].options] == ["beta"]

spec = GraphSpec(
    labels=(GraphLabel(name="label"),),
    dense_name="dense",
    dense_dim=3,
    layers=(
        GraphLayer(kind="swish", bottoms=("dense",), tops=("hidden",)),
        GraphLayer(kind="inner_product", bottoms=("hidden",), tops=("logit",), options={"num_output": 1}),
        GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "label"), tops=("loss",)),
    ),
)
assert GraphModel(spec).shapes["hidden"] == TensorShape(1, (3,))
"""

MODEL = """
import torch
from terarec.batch import Batch, Jagged
from terarec.models import build_model
from terarec.spec import AdaGradSpec, AdamSpec, CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RunSpec
from terarec.spec import TrainingSpec, from_data, to_data
from terarec.train import Optimizers, Trainer

run = from_data(RunSpec, {"data": "DATA", "model": {"kind": "nfm", "width": 4, "hidden": [8]}})
assert to_data(run)["model"]["kind"] == "nfm"
dataset = DatasetSpec(
    name="clicks",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="age"),),
    categorical=(CategoricalColumn(name="user", rows=6), CategoricalColumn(name="item", rows=6)),
)
generator = torch.Generator().manual_seed(0)
keys = torch.randint(6, (2, 64), generator=generator)
batch = Batch(
    dense=torch.rand(64, 1, generator=generator),
    label=((keys[0] + keys[1]) % 2).float()[:, None],
    sparse=Jagged(names=("user", "item"), keys=keys.flatten(), offsets=torch.arange(129)),
)
model = build_model(run.model, dataset)
assert model(batch).shape == (64, 1)
trainer = Trainer(model, TrainingSpec(), Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1)))
first = float(trainer.train_step(batch))
for _ in range(200):
    last = float(trainer.train_step(batch))
assert last < first / 2, (first, last)
"""

METRIC = """
import math
import numpy as np
from terarec.metrics import MetricSet, find_metric

assert not find_metric("log_cosh").higher_is_better
scores, labels = np.array([0.5, 2.0, -1.0, 0.0]), np.array([1.0, 2.0, 3.0, np.nan])
errors = [math.log(math.cosh(p - y)) for p, y in zip(scores[:3], labels[:3])]
for slices in ((), ("country",)):
    metrics = MetricSet(["log_cosh"], ["value"], slices=slices)
    metrics.update(scores=scores, labels=labels, columns={"country": np.array([1, 1, 2, 2])})
    found = metrics.compute()
    assert math.isclose(found["log_cosh"], sum(errors) / 3, rel_tol=1e-6)
of_first = found.slices["country"].values[0].found.values["log_cosh"]
assert math.isclose(of_first, sum(errors[:2]) / 2, rel_tol=1e-6)
"""


@pytest.mark.parametrize(
    ("section", "script"),
    [("A dense layer", LAYER), ("A model", MODEL), ("A metric", METRIC)],
    ids=lambda text: text[:9],
)
def test_a_worked_example_takes_three_files_at_most_and_works(section: str, script: str, tmp_path: Path) -> None:
    assert 1 <= len({file for file, _, _ in edits(section)}) <= 3
    run(edited_package(section, tmp_path), script)
