# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch

from terarec.checkpoint import latest, load
from terarec.config import load_run
from terarec.data import Reader
from terarec.errors import ConfigError, DataNotFoundError, FormatError, TrainingError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.metrics import AUC
from terarec.models.artifact import load_model
from terarec.models.trained_columns import check_columns
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    MetadataColumn,
    RunSpec,
    SGDSpec,
    ShardSpec,
    TrainingSpec,
    WideDeepSpec,
)
from terarec.train import build, predict
from tests.errors import at
from tests.train.small_run import changed


@pytest.fixture(scope="module")
def odd_data(tmp_path_factory):
    """Two labels, no dense column, a workflow, no valid sample."""
    directory = tmp_path_factory.mktemp("odd")
    spec = DatasetSpec(
        name="odd",
        storage="parquet",
        labels=(LabelColumn(name="click"), LabelColumn(name="buy")),
        dense=(),
        categorical=(CategoricalColumn(name="city", rows=9),),
        splits={"train": (ShardSpec(file="train/part-00000.parquet", rows=90),), "valid": ()},
        workflow="workflow",
    )
    writer = ParquetShardWriter(directory / "train/part-00000.parquet", spec)
    keys = np.arange(90) % 9
    writer.write(np.stack([keys > 4, keys % 2], axis=1).astype(np.float32), np.zeros((90, 0), np.float32), [keys])
    writer.close()
    (directory / "workflow/states").mkdir(parents=True)
    (directory / "workflow/states/00-categorify-city.parquet").write_bytes(b"a vocabulary")
    write_dataset(spec, directory)
    return directory


def odd_run(odd_data, out, **training):
    training = TrainingSpec(**{"batch_size": 30, "epochs": 2, **training})
    spec = RunSpec(data=str(odd_data), model=WideDeepSpec(width=2, hidden=(4,)), training=training)
    return build(spec, out)


def test_a_run_directory_holds_what_serving_needs(tmp_path, odd_data):
    run = odd_run(odd_data, tmp_path / "RUN")
    report = run.fit()
    files = {path.relative_to(tmp_path / "RUN").as_posix() for path in (tmp_path / "RUN").iterdir()}
    assert files == {"run.json", "dataset", "checkpoints", "metrics.jsonl"}
    assert load_run(tmp_path / "RUN/run.json") == run.spec
    assert read_dataset(tmp_path / "RUN/dataset") == dataclasses.replace(run.dataset, splits={})
    kept = tmp_path / "RUN/dataset/workflow/states/00-categorify-city.parquet"
    assert kept.read_bytes() == b"a vocabulary"
    assert report.checkpoint == tmp_path / "RUN/checkpoints/step-00000006"
    assert report.evaluation is None


def test_a_loaded_model_scores_as_the_trained_one(tmp_path, spec):
    run = build(spec, tmp_path)
    run.fit()
    model, loaded_spec, dataset, state = load_model(tmp_path)
    assert not model.training
    assert loaded_spec == run.spec
    assert state == load(latest(run.directory.checkpoints)).state
    assert state.step == run.trainer.step
    assert dataset.column_names == run.dataset.column_names
    batch = next(iter(Reader(spec.data, "valid", batch_size=64)))
    run.model.eval()
    assert torch.equal(model(batch), run.model(batch))
    assert all(table.state_names == () for table in model.embedding.tables.values())


def test_scoring_after_the_training_leaves_its_curves_alone(tmp_path, spec):
    run = build(spec, tmp_path)
    report = run.fit()
    curves = (tmp_path / "metrics.jsonl").read_bytes()
    assert run.trainer.evaluate(run.reader("valid")).auc == report.evaluation.auc
    assert (tmp_path / "metrics.jsonl").read_bytes() == curves


def test_predictions_come_in_input_order(tmp_path, spec):
    run = build(spec, tmp_path / "RUN")
    evaluation = run.fit().evaluation
    seen = []
    report = predict(tmp_path / "RUN", run.spec.data, "valid", tmp_path / "scores.parquet", progress=seen.append)
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table.column_names == ["score", "click"]
    assert report.rows == table.num_rows == 300
    assert seen == [128, 256, 300]
    labels = np.concatenate([batch.label[:, 0] for batch in Reader(spec.data, "valid", batch_size=41)])
    np.testing.assert_array_equal(table["click"], labels)
    assert AUC().update(table["score"].to_numpy(), labels).compute() == pytest.approx(evaluation.auc, abs=1e-4)
    assert 0 < min(table["score"].to_pylist()) < max(table["score"].to_pylist()) < 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN", "scores.parquet"]


def test_predictions_of_several_labels(tmp_path, odd_data):
    odd_run(odd_data, tmp_path / "RUN").fit()
    predict(tmp_path / "RUN", odd_data, "train", tmp_path / "scores.parquet")
    assert pq.read_table(tmp_path / "scores.parquet").column_names == ["score_click", "score_buy", "click", "buy"]


def test_predictions_keep_columns_in_the_order_that_is_requested(tmp_path, odd_data):
    odd_run(odd_data, tmp_path / "RUN").fit()
    spec = read_dataset(odd_data)
    users = pa.array([None if row % 4 == 0 else f"u{row}" for row in range(90)], pa.large_string())
    days = pa.array(range(90), pa.int64())
    columns = (MetadataColumn(name="user", type="string"), MetadataColumn(name="day", type="int64"))
    splits = {"test": (ShardSpec(file="test/part-00000.parquet", rows=90),)}
    other = dataclasses.replace(spec, weight="w", metadata=columns, splits=splits)
    shard = ParquetShard(odd_data / "train/part-00000.parquet", spec).read_group(0)
    weight = np.linspace(0, 1, 90, dtype=np.float32)
    with ParquetShardWriter(tmp_path / "new/test/part-00000.parquet", other) as writer:
        writer.write_block(dataclasses.replace(shard, weight=weight, metadata=(users, days)))
        writer.close()
    (tmp_path / "new/workflow").symlink_to(odd_data / "workflow")
    write_dataset(other, tmp_path / "new")

    def scores(*keep, name="scores.parquet"):
        predict(tmp_path / "RUN", tmp_path / "new", "test", tmp_path / name, keep=keep, replace=True)
        return pq.read_table(tmp_path / name) if name.endswith(".parquet") else pacsv.read_csv(tmp_path / name)

    bare = scores()
    kept = scores("day", "city", "user", "w")
    assert kept.column_names == ["day", "city", "user", "w", *bare.column_names]
    assert kept.select(bare.column_names).equals(bare)
    assert kept["day"].to_pylist() == list(range(90))
    assert kept["user"].to_pylist() == users.to_pylist()
    assert kept["city"].to_pylist() == shard.keys[0].tolist()
    assert kept.schema.field("city").type == pa.int64()
    np.testing.assert_array_equal(kept["w"], weight)
    assert scores("user", name="scores.csv")["user"].to_pylist()[:2] == ["", "u1"]
    for keep, problem in (
        (["usr"], "data set 'odd' has no column 'usr' (did you mean 'user'?) to keep"),
        (["day", "day"], "got 'day'"),
        (["click"], "got 'click'"),
    ):
        with pytest.raises(ConfigError, check=at("keep", problem)):
            scores(*keep)


def test_lists_of_keys_are_not_kept(tmp_path, spec):
    build(changed(spec, max_steps=1), tmp_path / "RUN").fit()
    with pytest.raises(ConfigError, check=at("keep")):
        predict(tmp_path / "RUN", spec.data, "valid", tmp_path / "scores.parquet", keep=["tags"])


def test_data_may_have_other_weights_and_metadata_than_that_of_the_training(tmp_path):
    """Other steps are rejected all the same."""
    spec = DatasetSpec(
        name="odd",
        storage="parquet",
        labels=(LabelColumn(name="click"),),
        dense=(),
        categorical=(CategoricalColumn(name="city", rows=9),),
        workflow="workflow",
    )
    texts = {}
    for name, more in (("old", {}), ("new", {"weight": "w", "metadata": ["user"]})):
        texts[name] = {"format": "terarec.workflow", "version": 4, "workflow": {"steps": [], "split": None, **more}}
    texts["other"] = {**texts["new"], "workflow": {**texts["new"]["workflow"], "steps": [{"kind": "log_op"}]}}
    for name, text in texts.items():
        (tmp_path / name / "workflow").mkdir(parents=True)
        (tmp_path / name / "workflow/workflow.json").write_text(json.dumps(text))
    wider = dataclasses.replace(spec, weight="w", metadata=(MetadataColumn(name="user", type="string"),))
    check_columns(wider, tmp_path / "new", spec, tmp_path / "old")
    check_columns(spec, tmp_path / "old", wider, tmp_path / "new")
    with pytest.raises(ConfigError, check=at("data set 'odd'")):
        check_columns(wider, tmp_path / "other", spec, tmp_path / "old")


def test_predicting_other_data_or_a_damaged_file_leaves_nothing(tmp_path, spec, odd_data):
    build(changed(spec, max_steps=1), tmp_path / "RUN").fit()
    with pytest.raises(ConfigError, check=at("data set 'odd'")):
        predict(tmp_path / "RUN", odd_data, "train", tmp_path / "scores.parquet")
    with pytest.raises(ConfigError, check=at("data set 'planted'")):
        predict(tmp_path / "RUN", spec.data, "test", tmp_path / "scores.parquet")
    odd_run(odd_data, tmp_path / "ODD", max_steps=1).fit()
    grown = dataclasses.replace(read_dataset(odd_data), name="grown")
    column = dataclasses.replace(grown.categorical[0], rows=10)
    copy = tmp_path / "grown"
    (copy / "train").mkdir(parents=True)
    (copy / "train/part-00000.parquet").write_bytes((odd_data / "train/part-00000.parquet").read_bytes())
    write_dataset(dataclasses.replace(grown, categorical=(column,)), copy)
    with pytest.raises(ConfigError, check=at("data set 'grown', column 'city'")):
        predict(tmp_path / "ODD", copy, "train", tmp_path / "scores.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ODD", "RUN", "grown"]


def test_a_run_without_a_checkpoint_cannot_be_opened(tmp_path, spec):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/run.json")):
        load_model(tmp_path)
    run = build(spec, tmp_path)
    run.directory.begin(run.spec, run.dataset)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/checkpoints")):
        load_model(tmp_path)


def test_a_model_described_otherwise_is_rejected(tmp_path, spec):
    build(changed(spec, max_steps=1), tmp_path).fit()
    text = json.loads((tmp_path / "run.json").read_text())
    text["model"] |= {"top": [9]}
    (tmp_path / "run.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, check=at("weights 'top.layers.0.weight'")):
        load_model(tmp_path)


def test_a_nan_loss_keeps_the_last_checkpoint(tmp_path, spec):
    wild = dataclasses.replace(
        changed(spec, checkpoint_every=1, epochs=9), dense_optimizer=SGDSpec(lr=1e30), sparse_optimizer=SGDSpec(lr=1e30)
    )
    with pytest.raises(TrainingError, check=at("step 2 (epoch 1)")) as error:
        build(wild, tmp_path).fit()
    assert error.value.layer is not None
    assert error.value.layer in str(error.value)
    assert load_model(tmp_path).spec == wild


def test_training_on_a_damaged_shard_says_which(tmp_path, spec, odd_data):
    copy = tmp_path / "data"
    (copy / "train").mkdir(parents=True)
    content = (odd_data / "train/part-00000.parquet").read_bytes()
    (copy / "train/part-00000.parquet").write_bytes(content[:-20])
    (copy / "vocabularies").mkdir()
    (copy / "vocabularies/city.parquet").write_bytes(b"")
    write_dataset(read_dataset(odd_data), copy)
    with pytest.raises(FormatError, check=at(f"{copy}/train/part-00000.parquet")):
        odd_run(copy, tmp_path / "RUN").fit()
    assert not (tmp_path / "RUN").exists()


def test_a_data_set_of_numbers_alone(tmp_path):
    columns = DatasetSpec(
        name="numbers",
        storage="parquet",
        labels=(LabelColumn(name="y"),),
        dense=(DenseColumn(name="x"),),
        categorical=(),
        splits={"train": (ShardSpec(file="train/part-00000.parquet", rows=64),)},
    )
    writer = ParquetShardWriter(tmp_path / "data/train/part-00000.parquet", columns)
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    writer.write((x > 0).astype(np.float32), x, [])
    writer.close()
    write_dataset(columns, tmp_path / "data")
    spec = RunSpec(
        data=str(tmp_path / "data"),
        model=WideDeepSpec(hidden=(4,)),
        training=TrainingSpec(batch_size=16, epochs=5, eval_split="train", max_steps=7),
    )
    build(spec, tmp_path / "RUN").fit()
    assert build(changed(spec, max_steps=None), tmp_path / "RUN").fit(resume=True).evaluation.auc > 0.99


def test_threads_are_set(set_threads, tmp_path, spec):
    set_threads(2)
    build(changed(spec, threads=1, max_steps=1), tmp_path).fit()
    assert torch.get_num_threads() == 1


def test_a_table_is_evaluated_as_the_data_set(tmp_path, odd_data):
    """Finding P2: `Trainer.evaluate` takes tables in memory."""
    trainer = odd_run(odd_data, tmp_path / "RUN").trainer
    table = pl.from_arrow(pq.read_table(odd_data / "train/part-00000.parquet"))
    expected = trainer.evaluate(Reader(odd_data, "train", batch_size=30))
    assert trainer.evaluate(table).results.overall.values == expected.results.overall.values
    trainer.dataset = None
    with pytest.raises(ConfigError, check=at("data")):
        trainer.evaluate(table)
