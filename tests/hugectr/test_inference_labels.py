# SPDX-License-Identifier: Apache-2.0
"""Scores and labels of several losses meet by name: the script's order of losses is not that of the label columns."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import terarec.hugectr as hugectr
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference import InferenceModel, InferenceParams
from tests.hugectr.families import bare
from tests.hugectr.planted import Planted, write_norm
from tests.hugectr.scripts import ADAM, Layer, embed, layer

SAMPLES, BATCH = 400, 100
FILES = (hugectr.DataReaderType_t.Norm, hugectr.Check_t.Sum)


@pytest.fixture(scope="module")
def data() -> Planted:
    """Column 0 is of label a, 1 and 2 of b: the opposite of a, and partly unknown."""
    planted = Planted(SAMPLES, labels=3)
    planted.label[:, 1] = 1 - planted.label[:, 0]
    planted.label[::3, 2] = -1
    return planted


def area(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """The share of pairs of samples that the scores order as the labels do."""
    differences = scores[labels == 1][:, None] - scores[labels == 0]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)


def write_model(folder: Path, data: Planted) -> tuple[hugectr.Model, str, InferenceParams]:
    """A model whose first loss is that of the second label, and its files."""
    source = write_norm(folder / "data", data)
    made = bare(source, source, ADAM, batchsize=BATCH, batchsize_eval=BATCH, max_eval_batches=SAMPLES // BATCH)
    sparse = hugectr.DataReaderSparseParam("data", 1, True, 4)
    made.add(hugectr.Input([1, 2], ["a", "b"], 3, "dense", [sparse]))
    embed(made, "e", 8)
    layer(made, Layer.Reshape, "e", "f", leading_dim=32)
    layer(made, Layer.Concat, "f dense", "all")
    for name, kind in (("b", Layer.MultiCrossEntropyLoss), ("a", Layer.CrossEntropyLoss)):
        options = {"target_weight_vec": [1.0, 1.0]} if name == "b" else {}
        layer(made, Layer.InnerProduct, "all", f"logit_{name}", num_output=2)
        layer(made, kind, f"logit_{name} {name}", f"loss_{name}", **options)
    return made, source, files_of(made, folder)


def files_of(made: hugectr.Model, folder: Path) -> InferenceParams:
    """Train a model and write its files."""
    made.compile()
    made.fit(max_iter=60, display=0, eval_interval=0)
    made.graph_to_json(str(folder / "g.json"))
    made.save_params_to_files(str(folder / "m"), 60)
    return InferenceParams(
        "m", BATCH, 1.0, str(folder / "m_dense_60.model"), [str(folder / "m0_sparse_60.model")], 0, True, 1.0, True
    )


def test_every_score_meets_the_label_of_its_loss(data: Planted, tmp_path: Path) -> None:
    made, source, params = write_model(tmp_path, data)
    model = InferenceModel(str(tmp_path / "g.json"), params)
    # [n, 4]: the softmax of a, and both columns of b
    scores = model.predict(SAMPLES // BATCH, source, *FILES)
    truth, known = data.label, data.label[:, 2] >= 0
    expected = [
        area(truth[:, 0], scores[:, 1]),
        area(truth[:, 1], scores[:, 2]),
        area(truth[known, 2], scores[known, 3]),
    ]
    assert min(expected) > 0.6  # trained, so that scores of the wrong label show
    assert model.evaluate(SAMPLES // BATCH, source, *FILES) == pytest.approx(np.mean(expected), abs=1e-6)
    predictions, labels = str(tmp_path / "predictions"), str(tmp_path / "labels")
    for _ in range(SAMPLES // BATCH):
        made.eval()
        made.export_predictions(predictions, labels)
    assert dict(made.get_eval_metrics())["AUC"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert made._compiled("test").evaluation.class_aucs == pytest.approx(expected, abs=1e-5)
    assert np.allclose(np.loadtxt(predictions).reshape(SAMPLES, 4), scores, atol=1e-5)
    assert np.array_equal(np.loadtxt(labels).reshape(SAMPLES, 3), truth)
    model.close()


@pytest.mark.parametrize(("labels", "logits"), [(["y"], ["x1", "x2"]), (["y", "z"], ["x1"])])
def test_losses_share_labels_and_logits(data: Planted, tmp_path: Path, labels: list[str], logits: list[str]) -> None:
    shared = Planted(SAMPLES, labels=len(labels))
    shared.label[:] = data.label[:, :1]
    source = write_norm(tmp_path / "data", shared)
    made = bare(source, source, ADAM, batchsize=BATCH, batchsize_eval=BATCH, max_eval_batches=SAMPLES // BATCH)
    sparse = hugectr.DataReaderSparseParam("data", 1, True, 4)
    made.add(hugectr.Input([1] * len(labels), labels, 3, "dense", [sparse]))
    embed(made, "e", 8)
    layer(made, Layer.Reshape, "e", "f", leading_dim=32)
    for name in logits:
        layer(made, Layer.InnerProduct, "f", name, num_output=1)
    for label, name in itertools.product(labels, logits):
        layer(made, Layer.BinaryCrossEntropyLoss, f"{name} {label}", f"loss_{label}_{name}")
    model = InferenceModel(str(tmp_path / "g.json"), files_of(made, tmp_path))
    scores = model.predict(SAMPLES // BATCH, source, *FILES)
    assert scores.shape == (SAMPLES, len(labels))
    expected = area(data.label[:, 0], scores[:, 0])
    assert model.evaluate(SAMPLES // BATCH, source, *FILES) == pytest.approx(expected, abs=1e-6)
    model.close()


def test_labels_that_are_no_share_are_an_error_of_hugectr(data: Planted, tmp_path: Path) -> None:
    _, _, params = write_model(tmp_path, data)
    wrong = Planted(BATCH, labels=3)
    wrong.label[5, 0] = 2
    model = InferenceModel(str(tmp_path / "g.json"), params)
    with pytest.raises(WrongInputError):
        model.evaluate(1, write_norm(tmp_path / "wrong", wrong), *FILES)
    model.close()
