# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from terarec.errors import ConfigError
from terarec.export import export_run
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.models.artifact import load_model
from terarec.models.registry import MODELS
from terarec.ragged import Ragged
from terarec.serve import InferenceSession
from terarec.spec import AdaGradSpec, AdamSpec, GraphModelSpec, RunSpec, ShardSpec, TrainingSpec, to_data
from terarec.train import build, evaluate, predict
from tests.errors import at
from tests.models import every
from tests.train.small_run import assert_same, weights

DATA = every.dataset()


def _with_draws(spec):
    """`spec` with dropout, whose random state a resumed run has to continue, and running statistics."""
    names = {field.name for field in dataclasses.fields(spec)}
    changes = {"dropout": 0.1, "batch_norm": True}
    return dataclasses.replace(spec, **{name: value for name, value in changes.items() if name in names})


SPECS = {kind: _with_draws(spec) for kind, spec in every.MODELS.items() if kind == spec.kind}
# A model takes some seconds, most of them for its export to ONNX; this one differs much from a DLRM, with which the
# tests of the commands do the same.
QUICK = {"two_tower"}
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in SPECS]


def write_samples(directory, columns):
    """600 train and 200 valid samples; the label depends on the first key and on the first dense column."""
    num_ids = columns.categorical[0].rows
    rng = np.random.default_rng(3)
    effects = rng.normal(0, 1.5, num_ids)
    splits = {}
    for split, rows in (("train", 600), ("valid", 200)):
        dense = rng.normal(size=(rows, len(columns.dense))).astype(np.float32)
        keys = []
        for column in columns.categorical:
            lengths = rng.integers(0, column.hotness + 1, rows) if column.hotness > 1 else np.ones(rows, np.int64)
            offsets = np.concatenate([[0], lengths.cumsum()])
            values = rng.integers(0, num_ids, offsets[-1])
            keys.append(Ragged(values, offsets) if column.hotness > 1 else values)
        logits = effects[keys[0]] + dense[:, 0]
        label = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        file = f"{split}/part-00000.parquet"
        writer = ParquetShardWriter(directory / file, columns, rows_per_group=100)
        writer.write(label[:, None], dense, keys)
        writer.close()
        splits[split] = (ShardSpec(file=file, rows=rows),)
    write_dataset(dataclasses.replace(columns, splits=splits), directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("every"), DATA)


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_trains_resumes_evaluates_exports_and_serves(kind, data, tmp_path):
    straight = build(run_spec(data, kind, epochs=3), tmp_path / "straight", allow_import=every.ALLOWED)
    report = straight.fit()
    assert report.loss < 5.0
    assert report.evaluation.rows == 200

    # Training N steps equals training k, saving, loading, and training N - k.
    build(run_spec(data, kind, epochs=3, max_steps=13), tmp_path / "resumed", allow_import=every.ALLOWED).fit()
    resumed = build(run_spec(data, kind, epochs=3), tmp_path / "resumed", allow_import=every.ALLOWED)
    again = resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))
    assert again.evaluation.auc == report.evaluation.auc

    loaded = load_model(str(tmp_path / "resumed"), allow_import=every.ALLOWED)
    assert (loaded.step, loaded.dataset.column_names) == (30, DATA.column_names)
    found = evaluate(loaded.model, resumed.reader("valid"))
    assert found.auc == report.evaluation.auc

    scores = tmp_path / "scores.parquet"
    predict(str(tmp_path / "resumed"), str(data), "valid", str(scores), allow_import=every.ALLOWED)
    table = pq.read_table(scores)
    assert table.column_names == ["score", *(label.name for label in DATA.labels)]

    exported = export_run(str(tmp_path / "resumed"), str(tmp_path / "exported"), allow_import=every.ALLOWED)
    assert exported.max_abs_difference < 1e-5
    assert (tmp_path / "exported/model.onnx").is_file()

    session = InferenceSession.open(str(tmp_path / "resumed"), allow_import=every.ALLOWED)
    rows = pq.read_table(data / "valid/part-00000.parquet")
    records = {column.name: rows[column.name].to_pylist() for column in session.inputs}
    np.testing.assert_allclose(session.predict(records)[:, 0], table["score"].to_numpy(), rtol=1e-5, atol=1e-6)


def test_code_is_imported_by_name_only_where_it_is_allowed(data, tmp_path):
    spec = run_spec(data, "python", epochs=1)
    with pytest.raises(ConfigError, check=at("model: factory 'tests.models.factories:small_model'")):
        build(spec, tmp_path / "rejected").fit()
    build(spec, tmp_path / "run", allow_import=every.ALLOWED).fit()
    for opening in (load_model, InferenceSession.open):
        with pytest.raises(ConfigError, check=at("model: factory 'tests.models.factories:small_model'")):
            opening(tmp_path / "run")


def test_a_run_is_whole_without_the_graph_file_it_was_described_by(data, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(to_data(every.GRAPH)))
    spec = dataclasses.replace(run_spec(data, "graph", epochs=1), model=GraphModelSpec(file=str(file)))
    build(spec, tmp_path / "run").fit()
    file.unlink()
    model = load_model(tmp_path / "run").model
    batch = next(iter(build(run_spec(data, "graph"), tmp_path / "other").reader("valid")))
    assert torch.isfinite(model.output_logits(model(batch))).all()
