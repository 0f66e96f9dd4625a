"""Every registered model trains, resumes bit for bit, is evaluated, scored, exported and served in the same way."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.formats import ParquetShardWriter, write_dataset
from terarec.models.artifact import load_model
from terarec.models.registry import MODELS
from terarec.serve import InferenceSession
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AutoIntSpec,
    CategoricalColumn,
    DatasetSpec,
    DCNSpec,
    DCNV2Spec,
    DeepFMSpec,
    DenseColumn,
    DINSpec,
    DLRMSpec,
    DNNSpec,
    FMSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphModelSpec,
    GraphSpec,
    LabelColumn,
    LRSpec,
    PythonModelSpec,
    RunSpec,
    ShardSpec,
    TableSpec,
    TargetHistory,
    TrainingSpec,
    TwoTowerSpec,
    WideDeepSpec,
    XDeepFMSpec,
    to_data,
)
from terarec.train import build, evaluate, predict
from tests.train.small_run import assert_same, weights

ROWS = {"user": 60, "item": 40, "history": 40}
DATA = DatasetSpec(
    name="sequences",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="age"), DenseColumn(name="hour")),
    categorical=tuple(CategoricalColumn(name=n, rows=r, hotness=4 if n == "history" else 1) for n, r in ROWS.items()),
)
GRAPH = GraphSpec(
    labels=(GraphLabel(name="click"),),
    dense_dim=2,
    embeddings=(
        GraphEmbedding(
            name="vectors",
            tables=tuple(TableSpec(name=name, rows=rows, width=4) for name, rows in ROWS.items()),
            features=tuple(GraphFeature(name=name, table=name) for name in ROWS),
            output="flat",
        ),
    ),
    layers=(
        GraphLayer(kind="concat", bottoms=("dense", "vectors"), tops=("input",)),
        GraphLayer(kind="mlp", bottoms=("input",), tops=("hidden",), options={"num_outputs": [8]}),
        GraphLayer(kind="inner_product", bottoms=("hidden",), tops=("logit",), options={"num_output": 1}),
        GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "click"), tops=("loss",)),
    ),
)
DEEP = {"width": 4, "hidden": (8,), "dropout": 0.1, "batch_norm": True}
SPECS = {
    spec.kind: spec
    for spec in (
        LRSpec(),
        FMSpec(width=4),
        DNNSpec(**DEEP),
        WideDeepSpec(**DEEP),
        DeepFMSpec(**DEEP),
        XDeepFMSpec(**DEEP, cin=(4, 4)),
        DCNSpec(**DEEP, cross_layers=2),
        DCNV2Spec(**DEEP, cross_layers=2),
        AutoIntSpec(**DEEP, layers=2, attention_width=8),
        DLRMSpec(width=4, bottom=(8, 4), top=(8,)),
        DINSpec(**DEEP, sequences=(TargetHistory(target="item", history="history"),), attention=(8,)),
        TwoTowerSpec(**DEEP, user=("user", "history", "age"), item=("item", "hour"), vector_width=4),
        GraphModelSpec(graph=GRAPH),
        PythonModelSpec(factory="tests.train.own_model:make", options={"width": 4}),
    )
}
ALLOWED = ("tests",)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """600 train and 200 valid samples; the click depends on the item and on whether it is in the history."""
    directory = tmp_path_factory.mktemp("sequences")
    rng = np.random.default_rng(3)
    effects = rng.normal(0, 1.5, ROWS["item"])
    splits = {}
    for split, rows in (("train", 600), ("valid", 200)):
        dense = rng.normal(size=(rows, 2)).astype(np.float32)
        user, item = rng.integers(0, ROWS["user"], rows), rng.integers(0, ROWS["item"], rows)
        lengths = rng.integers(0, 5, rows)
        offsets = np.concatenate([[0], lengths.cumsum()])
        history = rng.integers(0, ROWS["history"], offsets[-1])
        logits = effects[item] + dense[:, 0]
        label = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        file = f"{split}/part-00000.parquet"
        writer = ParquetShardWriter(directory / file, DATA, rows_per_group=100)
        writer.write(label[:, None], dense, [user, item, (history, offsets)])
        writer.close()
        splits[split] = (ShardSpec(file=file, rows=rows),)
    write_dataset(dataclasses.replace(DATA, splits=splits), directory)
    return directory


def run_spec(data, kind, **training) -> RunSpec:
    return RunSpec(
        data=str(data),
        model=SPECS[kind],
        dense_optimizer=AdamSpec(lr=0.01),
        sparse_optimizer=AdaGradSpec(lr=0.1),
        training=TrainingSpec(batch_size=64, seed=7, **training),
    )


def test_there_is_a_case_for_every_model():
    assert set(SPECS) == {spec.kind for spec in MODELS}


@pytest.mark.parametrize("kind", SPECS)
def test_every_model_trains_resumes_evaluates_and_serves(kind, data, tmp_path):
    straight = build(run_spec(data, kind, epochs=3), tmp_path / "straight", allow_import=ALLOWED)
    report = straight.fit()
    assert report.loss < 5.0
    assert report.evaluation.rows == 200

    # Training N steps equals training k, saving, loading, and training N - k.
    build(run_spec(data, kind, epochs=3, max_steps=13), tmp_path / "resumed", allow_import=ALLOWED).fit()
    resumed = build(run_spec(data, kind, epochs=3), tmp_path / "resumed", allow_import=ALLOWED)
    again = resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))
    assert again.evaluation.auc == report.evaluation.auc

    loaded = load_model(tmp_path / "resumed", allow_import=ALLOWED)
    assert (loaded.step, loaded.dataset.column_names) == (30, DATA.column_names)
    found = evaluate(loaded.model, resumed.reader("valid"))
    assert found.auc == report.evaluation.auc

    scores = tmp_path / "scores.parquet"
    predict(tmp_path / "resumed", data, "valid", scores, allow_import=ALLOWED)
    table = pq.read_table(scores)
    assert table.column_names == ["score", "click"]

    session = InferenceSession.open(tmp_path / "resumed", allow_import=ALLOWED)
    rows = pq.read_table(data / "valid/part-00000.parquet")
    records = {column.name: rows[column.name].to_pylist() for column in session.inputs}
    np.testing.assert_allclose(session.predict(records)[:, 0], table["score"].to_numpy(), rtol=1e-5, atol=1e-6)


def test_code_is_imported_by_name_only_where_it_is_allowed(data, tmp_path):
    spec = run_spec(data, "python", epochs=1)
    with pytest.raises(ConfigError, match="allow"):
        build(spec, tmp_path / "refused").fit()
    build(spec, tmp_path / "run", allow_import=ALLOWED).fit()
    for opening in (load_model, InferenceSession.open):
        with pytest.raises(ConfigError, match="allow"):
            opening(tmp_path / "run")


def test_a_run_is_whole_without_the_graph_file_it_was_described_by(data, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(to_data(GRAPH)))
    spec = dataclasses.replace(run_spec(data, "graph", epochs=1), model=GraphModelSpec(file=str(file)))
    build(spec, tmp_path / "run").fit()
    file.unlink()
    model = load_model(tmp_path / "run").model
    batch = next(iter(build(run_spec(data, "graph"), tmp_path / "other").reader("valid")))
    assert isinstance(batch, Batch)
    assert torch.isfinite(model.output_logits(model(batch))).all()
