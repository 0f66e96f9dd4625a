# SPDX-License-Identifier: Apache-2.0
"""Every kind of raw column over the protocol: numbers, intervals, texts, integers, lists; several labels."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.datasets import identity_workflow
from terarec.models import build_model
from terarec.serve import InferenceSession, InputColumn, ServedModel
from terarec.serve.columns import ColumnReader, RecordColumns
from terarec.serve.protocol import InferRequest, RequestTooLargeError, Tensor
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    RunSpec,
    SplitByFiles,
    TrainingSpec,
    WideDeepSpec,
)
from terarec.spec.serving_options import ServedModelOptions
from terarec.train.predict import predict
from terarec.train.run import build
from tests.errors import at
from tests.waiting import PATIENCE

CITIES = ["Oslo", "Z\u00fcrich", "", "Lagos", "\u6771\u4eac"]


def people(count: int) -> list[dict[str, Any]]:
    """Rows of a table with every kind of column; None is missing."""
    generator = np.random.default_rng(3)
    return [
        {
            "age": None if index % 11 == 0 else int(generator.integers(18, 90)),
            "hours": None if index % 7 == 0 else round(float(generator.gamma(2.0, 10.0)), 2),
            "city": CITIES[index % len(CITIES)] or None,
            "user": None if index % 13 == 0 else int(generator.integers(0, 40)) - 2**40,
            "bought": int(generator.random() < 0.1 + 0.15 * (index % 5)),
        }
        for index in range(count)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prepared table of people and a Wide & Deep run on it."""
    root = tmp_path_factory.mktemp("shop")
    rows = people(600)
    options = CsvOptions(
        label="bought",
        dense=("age",),
        log=("hours",),
        categorical=("city",),
        ids=("user",),
        buckets={"age": 5},
        split=SplitByFiles(valid=1),
    )
    files = [write_csv(root / "train.csv", rows[:500]), write_csv(root / "valid.csv", rows[500:])]
    prepare(Workflow.of(csv_workflow(options)), files, root / "data")
    training = TrainingSpec(batch_size=50, epochs=2)
    build(
        RunSpec(data=str(root / "data"), model=WideDeepSpec(width=4, hidden=(8,)), training=training), root / "run"
    ).fit()
    return root


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0] if name != "bought"}


def test_a_table_of_every_kind_scores_as_when_prepared(shop: Path) -> None:
    predict(shop / "run", shop / "data", "valid", shop / "scores.parquet")
    predicted = pq.read_table(shop / "scores.parquet")["score"].to_numpy()
    session = InferenceSession.open(shop / "run")
    scores = session.predict(columns(people(600)[500:]))
    assert np.abs(scores[:, 0] - predicted).max() <= 1e-6
    assert predicted.std() > 0.01


def test_a_column_read_twice_is_requested_once(shop: Path) -> None:
    session = InferenceSession.open(shop / "run")
    assert session.inputs == (
        InputColumn(name="age", kind="number"),
        InputColumn(name="hours", kind="number"),
        InputColumn(name="city", kind="string"),
        InputColumn(name="user", kind="integer"),
    )
    metadata = ServedModel(session).metadata
    assert metadata.platform == "terarec_wide_deep"
    assert [item.datatype for item in metadata.inputs] == ["FP32", "FP32", "BYTES", "INT64"]


def test_an_integer_column_takes_no_fraction(shop: Path) -> None:
    service = ServedModel(InferenceSession.open(shop / "run"))
    datatypes = {"age": "INT32", "hours": "FP64", "city": "BYTES", "user": "FP32"}
    inputs = tuple(
        Tensor(name=name, datatype=datatypes[name], shape=(1,), data=values)
        for name, values in columns(people(2)[1:]).items()
    )
    with pytest.raises(ConfigError, check=at("inputs[3].datatype")):
        service.submit(InferRequest(inputs=inputs))


DATASET = DatasetSpec(
    name="lists",
    storage="parquet",
    labels=(LabelColumn(name="click"), LabelColumn(name="like")),
    dense=(DenseColumn(name="price"),),
    categorical=(CategoricalColumn(name="tags", rows=9, hotness=3), CategoricalColumn(name="shop", rows=4)),
)


@pytest.fixture
def lists() -> tuple[torch.nn.Module, ServedModel]:
    """A model with initial weights over a column of lists, and its service."""
    run = RunSpec(data="data", model=WideDeepSpec(width=4, hidden=(8,)))
    model = build_model(run.model, DATASET, seed=1)
    session = InferenceSession(model, identity_workflow(DATASET), run, DATASET, step=0)
    return model, ServedModel(session)


def request(tags: list[int | None], shape: tuple[int, ...]) -> InferRequest:
    return InferRequest(
        inputs=(
            Tensor(name="price", datatype="FP32", shape=(3,), data=[0.5, 1, -2]),
            Tensor(name="tags", datatype="INT64", shape=shape, data=tags),
            Tensor(name="shop", datatype="INT64", shape=(3, 1), data=[0, 3, 1]),
        )
    )


def test_lists_are_tensors_filled_up_with_null(lists: tuple[torch.nn.Module, ServedModel]) -> None:
    model, service = lists
    answer = service.submit(request([5, 5, 1, None, None, None], (3, 2))).result().outputs[0]
    batch = Batch(
        dense=torch.tensor([[0.5], [1.0], [-2.0]]),
        label=torch.zeros(3, 2),
        sparse=Jagged(
            names=("tags", "shop"), keys=torch.tensor([5, 5, 1, 0, 3, 1]), offsets=torch.tensor([0, 2, 3, 3, 4, 5, 6])
        ),
    )
    expected = model(batch).sigmoid().detach().numpy()
    assert answer.shape == (3, 2)
    assert np.array_equal(np.array(answer.data, dtype=np.float32).reshape(3, 2), expected)
    assert [item.shape for item in service.metadata.inputs] == [(-1,), (-1, 3), (-1,)]
    assert service.metadata.outputs[0].shape == (-1, 2)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 1, 1)])
def test_a_list_column_keeps_to_its_shape(lists: tuple[torch.nn.Module, ServedModel], shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, check=at("inputs[1].shape")):
        lists[1].submit(request([None] * int(np.prod(shape)), shape))


def test_a_model_trained_in_bfloat16_scores_in_it(lists: tuple[torch.nn.Module, ServedModel]) -> None:
    model = lists[0]
    columns = {"price": [0.5, 1.25], "tags": [[1, 2, 3], []], "shop": [3, 0]}
    scores = {
        precision: InferenceSession(
            model,
            identity_workflow(DATASET),
            RunSpec(data="data", model=WideDeepSpec(), training=TrainingSpec(precision=precision)),
            DATASET,
            step=0,
        ).predict(columns)
        for precision in ("fp32", "bf16")
    }
    assert scores["bf16"].dtype == np.float32
    assert not np.array_equal(scores["bf16"], scores["fp32"])
    assert np.abs(scores["bf16"] - scores["fp32"]).max() < 0.01


def test_an_id_outside_its_table_is_named(lists: tuple[torch.nn.Module, ServedModel]) -> None:
    with pytest.raises(ConfigError, check=at("column 'tags', row 1")):
        lists[1].submit(request([5, 1, 9, None, None, None], (3, 2))).result()


class ScoreIsFirstColumn(torch.nn.Module):
    """Its logit is the key of the first categorical column."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.sparse.keys[: len(batch.dense), None].double()


def test_keys_stay_before_the_ids_that_a_workflow_puts_first() -> None:
    dataset = dataclasses.replace(DATASET, categorical=(CategoricalColumn(name="user"), *DATASET.categorical))
    run = RunSpec(data="data", model=WideDeepSpec())
    session = InferenceSession(ScoreIsFirstColumn(), identity_workflow(dataset), run, dataset, step=0)
    scores = session.predict({"price": [0.5, 1.25], "tags": [[1, 2, 3], []], "shop": [3, 0], "user": [-2, None]})
    assert scores[:, 0].tolist() == [torch.tensor(-2.0).sigmoid().item(), 0.0]


SHOP = (
    InputColumn(name="price", kind="number"),
    InputColumn(name="city", kind="string"),
    InputColumn(name="tags", kind="integer", hotness=None),
)


def columns_of(*tensors: tuple[str, str, tuple[int, ...], Any], **options: bool) -> RecordColumns:
    inputs = tuple(
        Tensor(name=name, datatype=datatype, shape=shape, data=data) for name, datatype, shape, data in tensors
    )
    return ColumnReader(SHOP, max_batch=100_000, **options)(InferRequest(inputs=inputs))


@pytest.mark.parametrize("num_records", [0, 1, 3])
def test_one_value_counts_for_all_records(num_records: int) -> None:
    prices = np.arange(num_records, dtype=np.float32)
    read = columns_of(
        ("city", "BYTES", (1,), ["Ulm"]),
        ("tags", "INT64", (1, 2), [7, None]),
        ("price", "FP32", (num_records, 1), prices),
    )
    assert list(read.columns) == ["price", "city", "tags"]
    assert read.num_records == num_records
    assert np.array_equal(read.columns["price"], prices)
    assert read.columns["city"] == ["Ulm"] * num_records
    assert read.columns["tags"] == [[7]] * num_records


def test_one_value_may_be_of_any_form() -> None:
    read = columns_of(
        ("price", "FP32", (1,), np.array([0.5], dtype=np.float32)),
        ("city", "BYTES", (1,), pa.array(["Ulm"], type=pa.large_string())),
        ("tags", "INT64", (2, 1), [7, 8]),
    )
    assert read.columns["price"].tolist() == [0.5, 0.5]  # type: ignore[union-attr]
    assert read.columns["city"] == ["Ulm", "Ulm"]


def test_a_long_value_is_not_repeated_without_bound() -> None:
    """One value of 1 MB for 65,536 records would be 64 GB for the workflow."""
    prices = np.zeros(65536, dtype=np.float32)
    few = ("tags", "INT64", (1, 1), [1])
    with pytest.raises(RequestTooLargeError, check=at("column 'city'", "1000000 characters")):
        columns_of(("price", "FP32", (65536,), prices), ("city", "BYTES", (1,), ["x" * 10**6]), few)
    many = ("tags", "INT64", (1, 10**4), np.ones(10**4, dtype=np.int64))
    with pytest.raises(RequestTooLargeError, check=at("column 'tags'")):
        columns_of(("price", "FP32", (65536,), prices), ("city", "BYTES", (1,), ["x"]), many)


def test_an_absent_column_is_missing_where_this_is_wanted() -> None:
    price = ("price", "FP32", (2,), [0.5, 1.0])
    with pytest.raises(ConfigError, check=at("column 'city'", "missing")):
        columns_of(price)
    read = columns_of(price, absent_is_missing=True)
    assert read.columns == {"price": [0.5, 1.0], "city": [None, None], "tags": [None, None]}
    with pytest.raises(ConfigError, check=at("column 'price'", "missing")):  # how many records?
        columns_of(absent_is_missing=True)


def test_absent_columns_are_scored_as_missing_ones(lists: tuple[torch.nn.Module, ServedModel]) -> None:
    session = lists[1].session
    model = ServedModel(session, ServedModelOptions(absent_is_missing=True))
    shop = Tensor(name="shop", datatype="INT64", shape=(2,), data=[0, 3])
    price = Tensor(name="price", datatype="FP32", shape=(1,), data=[0.25])
    scores = model.submit(InferRequest(inputs=(shop, price))).result(timeout=PATIENCE).outputs[0]
    expected = session.predict({"price": [0.25, 0.25], "tags": [[], []], "shop": [0, 3]})
    assert np.array_equal(np.reshape(scores.data, scores.shape), expected)
    model.close()
