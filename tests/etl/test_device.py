"""Rows on a device become what they become on the CPU. Devices are those of torch here; a GPU has the same code."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from terarec.errors import ConfigError, FormatError
from terarec.etl import fit
from terarec.etl.columns import (
    ColumnType,
    RowFaultError,
    Rows,
    from_arrow,
    is_missing,
    kind_of,
    list_offsets,
    numbers_of,
)
from terarec.etl.device import DeviceTransform
from terarec.etl.ops import (
    Bucketize,
    Categorify,
    Clip,
    FillMissing,
    GivenIds,
    HashBucket,
    JoinGroupby,
    LogOp,
    Normalize,
    NormalizeMinMax,
    Operator,
    Rename,
    State,
)
from terarec.etl.tensors import TensorBlock, TensorDevice, xxh64_int64
from terarec.etl.values import ValueIds
from terarec.etl.workflow import Workflow
from terarec.kernels.cpu import encoding
from terarec.ragged import Ragged, flat_values
from terarec.spec import LabelSpec, PrepareOptions, SourceColumn, SourceSpec
from tests.errors import at
from tests.etl.column_values import block_of
from tests.etl.ops.cases import CASES, Case
from tests.etl.ops.fitting import fit as fit_step
from tests.etl.ops.test_fitted_contract import STEPS, rows

CPU = TensorDevice("cpu")
STATELESS = [
    *(
        case
        for case in CASES
        if case.step.runs_on_tensors and not any(kind == "text" for kind, _ in case.inputs.values())
    ),
    Case(
        "swap names",
        Rename(names={"x": "y", "y": "x"}),
        {"x": ("number", [1.0, None]), "y": ("integer", [None, 2])},
        {"x": ("integer", [None, 2]), "y": ("number", [1.0, None])},
    ),
]
FITTED = [
    *(step for step in STEPS if step.runs_on_tensors and "t" not in step.columns),
    Categorify(columns=("i",), min_count=2, max_size=10),
]


def check_same(step: Operator, state: State | None, block: Rows, device: TensorDevice = CPU) -> None:
    """Check that the step does the same to tensors; logarithms may differ in the last place."""
    columns = dict(zip(step.reads, device.columns([block.columns[name] for name in step.reads]), strict=True))
    expected = step.transform(block, state)
    made = step.tensor_function(state, device)(TensorBlock(columns, block.num_rows))
    assert set(made) == set(step.writes)
    for name, result in made.items():
        column, found = expected.columns[name], flat_values(result)
        assert found.type == kind_of(column)
        offsets = list_offsets(column)
        assert isinstance(result, Ragged) is (offsets is not None)
        assert offsets is None or result.offsets.tolist() == offsets.tolist()
        assert found.is_missing().tolist() == is_missing(column).tolist()
        values, wanted = found.numbers().cpu().numpy(), numbers_of(column)
        if isinstance(step, LogOp):
            np.testing.assert_array_max_ulp(values, wanted, maxulp=2)
        else:
            np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize("case", STATELESS, ids=lambda case: case.name.replace(" ", "-"))
def test_steps_without_a_state_do_the_same(case: Case) -> None:
    check_same(case.step, None, block_of(**case.inputs))


@pytest.mark.parametrize("step", FITTED, ids=lambda step: f"{step.kind}-{'-'.join(step.columns)}")
def test_fitted_steps_do_the_same(step: Operator) -> None:
    check_same(step, fit_step(step, [rows(300)]), rows(200, seed=6))
    check_same(step, fit_step(step, [rows(0)]), rows(20))


def test_every_operator_on_tensors_is_compared() -> None:
    compared = {type(case.step) for case in STATELESS} | {type(step) for step in FITTED}
    assert {found for found in Operator.members().values() if getattr(found, "runs_on_tensors", False)} == compared


def test_hashes_are_those_of_the_core() -> None:
    generator = np.random.default_rng(3)
    values = np.array([0, 1, -1, 2**63 - 1, -(2**63), *generator.integers(-(2**63), 2**63 - 1, 200)])
    for seed in (0, 42, 2**63 - 1):
        assert xxh64_int64(torch.from_numpy(values), seed).tolist() == encoding.xxh64_int64(values, seed).tolist()


@pytest.mark.parametrize("implementation", ["ref", "cpu", "triton"])
@pytest.mark.parametrize("hash_buckets", [1, 3])
def test_every_hash_index_finds_the_ids(implementation: str, hash_buckets: int) -> None:
    ids = ValueIds("hex32", pa.array([7, 2**32 - 1, 0], type=pa.uint32()), hash_buckets)
    array = pa.array([0, None, 5, 2**32 - 1, 7, 123_456], type=pa.uint32())
    (column,) = CPU.columns([from_arrow(array, "hex32")])
    found = TensorDevice("cpu", implementation).ids(ids).find(column)
    assert found.values.tolist() == ids.find(from_arrow(array, "hex32")).tolist()


COLUMNS = {
    "y": ["1", "0", "1", "2", "0", "1"],
    "w": [1.0, 0.5, 0.0, 2.0, 1.5, 1.0],
    "x": [3, None, -7, 10, 4, 4],
    "p": [0.5, 2.0, None, 1e-3, 7.0, 1.0],
    "h": ["a1", "a1", None, "ff", "a1", "ff"],
    "items": [[1, 2], [], None, [2, 9, 2], [1], [3]],
    "user": [10, 11, 12, None, 10, 10],
    "name": ["a", "b", "c", "d", "e", "f"],
}


def workflow() -> Workflow:
    spec = Workflow(
        [
            FillMissing(columns=("x",), median=True, indicator=True),
            Clip(columns=("x",), low=-5.0),
            LogOp(columns=("x",), shift=6.0),
            FillMissing(columns=("p",), value=0.25),
            Bucketize(columns=("p",), boundaries=(0.5, 1.0), outputs=("p_range",)),
            Normalize(columns=("p",)),
            Categorify(columns=("h",), hash_buckets=2, min_count=2),
            GivenIds(columns=("items",), rows=(10,), max_length=3),
            HashBucket(columns=("user",), buckets=5, outputs=("user_bucket",)),
            Rename(names={"user": "who"}),
            JoinGroupby(columns=("name",)),
        ],
        source=SourceSpec(
            format="parquet",
            columns=(
                SourceColumn(name="y", type="integer"),
                SourceColumn(name="w", type="number"),
                SourceColumn(name="x", type="integer"),
                SourceColumn(name="p", type="number"),
                SourceColumn(name="h", type="hex32"),
                SourceColumn(name="items", type="integer", separator=","),
                SourceColumn(name="user", type="integer"),
                SourceColumn(name="name", type="text"),
            ),
        ),
        labels=[LabelSpec(name="is_one", column="y", positives=("1",)), LabelSpec(name="many", column="y", at_least=1)],
        dense=["x", "x_missing", "p"],
        categorical=["p_range", "h", "items", "user_bucket"],
        keys=["who"],
    )
    return spec.with_sample_columns(weight="w", metadata=("name",))


def raw_batch(**changes: list[Any]) -> pa.RecordBatch:
    columns: Mapping[str, list[Any]] = {**COLUMNS, **changes}
    typed = {name: pa.array(values) for name, values in columns.items()}
    typed["y"] = pa.array([int(value) for value in columns["y"]], type=pa.int32())
    typed["h"] = pa.array([None if value is None else int(value, 16) for value in columns["h"]], type=pa.uint32())
    return pa.record_batch(typed)


def fitted_in(directory: Path) -> Workflow:
    path = directory / "log.parquet"
    pq.write_table(pa.Table.from_batches([raw_batch()]), path)
    return fit(workflow(), [path], PrepareOptions(threads=1))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    return fitted_in(tmp_path_factory.mktemp("raw"))


def test_a_workflow_gives_the_batches_of_its_data_set(fitted: Workflow) -> None:
    check_batches(fitted, torch.device("cpu"))


def check_batches(fitted: Workflow, device: torch.device) -> None:
    """Check that rows become on the device the batch of the data set."""
    batch = raw_batch()
    kinds = {name: found.kind for name, found in fitted.plan.types[0].items()}
    columns = {name: from_arrow(batch.column(name), kind) for name, kind in kinds.items()}
    block = fitted.encode_rows(fitted.apply(Rows(columns, np.arange(batch.num_rows))))
    made = DeviceTransform(fitted, device)(batch)
    assert {part.device.type for part in (made.dense, made.label, made.sparse.keys)} == {device.type}
    names = [column.name for column in fitted.dataset_spec().categorical]
    assert made.sparse.names == tuple(names)
    np.testing.assert_array_equal(made.label.cpu().numpy(), block.label)
    np.testing.assert_allclose(made.dense.cpu().numpy(), block.dense, rtol=2**-22)  # two units in the last place
    assert made.weight is not None
    assert made.weight.tolist() == COLUMNS["w"]
    assert made.metadata["name"].to_pylist() == COLUMNS["name"]
    offsets, size = made.sparse.offsets.tolist(), batch.num_rows
    for index, keys in enumerate(block.keys):
        values, starts = keys if isinstance(keys, tuple) else (keys, np.arange(size + 1))
        first, last = offsets[index * size], offsets[(index + 1) * size]
        assert made.sparse.keys[first:last].tolist() == values.tolist(), names[index]
        assert [offset - first for offset in offsets[index * size : (index + 1) * size + 1]] == starts.tolist()


def test_only_columns_that_results_need_are_read(fitted: Workflow) -> None:
    transform = DeviceTransform(fitted, "cpu")
    assert list(transform.columns) == ["y", "w", "x", "p", "h", "items", "user"]
    assert transform.columns["items"] == ColumnType("integer", is_list=True)
    with pytest.raises(FormatError, check=at("column 'w'")):
        transform(raw_batch().drop_columns(["w"]))
    with pytest.raises(FormatError, check=at("column 'p'")):
        transform(raw_batch().set_column(3, "p", pa.array(["a"] * 6)))


@pytest.mark.parametrize(
    ("change", "column", "positions"),
    [
        ({"items": [[1], [2, 10], [], [10, -1], [], []]}, "items", [1, 3]),
        ({"items": [[1] * 4, [], [], [], [], []]}, "items", [0]),
        ({"w": [1.0, -1.0, 0.0, 2.0, 1.5, 1.0]}, "w", [1]),
        ({"p": [1.0, 1.0, 1.0, 1.0, 1.0, 1e300]}, "p", [5]),
    ],
)
def test_values_that_a_step_rejects_are_reported_with_their_rows(
    fitted: Workflow, change: dict[str, list[Any]], column: str, positions: list[int]
) -> None:
    with pytest.raises(RowFaultError) as error:
        DeviceTransform(fitted, "cpu")(raw_batch(**change))
    assert error.value.column == column
    assert error.value.rows.tolist() == positions


def small(step: Operator, column: SourceColumn, **results: Any) -> Workflow:
    source = SourceSpec(format="parquet", columns=(SourceColumn(name="y", type="number"), column))
    return Workflow([step], source=source, labels=[LabelSpec(name="y")], **results)


def test_what_does_not_run_there_is_named() -> None:
    number = SourceColumn(name="x", type="integer")
    grouped = Workflow.of(small(JoinGroupby(columns=("x",)), number, dense=["x_count"]).spec, {})
    with pytest.raises(ConfigError, check=at("workflow 'workflow'")):
        DeviceTransform(grouped, "cpu")
    state = fit_step(JoinGroupby(columns=("x",)), [block_of(x=("integer", [1, 2]))])
    with pytest.raises(ConfigError, check=at("steps[0] JoinGroupby")):
        DeviceTransform(Workflow.of(grouped.spec, {0: state}), "cpu")
    text = small(HashBucket(columns=("x",), buckets=3), SourceColumn(name="x", type="text"), categorical=["x"])
    with pytest.raises(ConfigError, check=at("column 'x'")):
        DeviceTransform(text, "cpu")


def test_normalize_min_max_of_one_value_is_zero() -> None:
    step = NormalizeMinMax(columns=("x",))
    block = block_of(x=("number", [4.0, 4.0]))
    check_same(step, fit_step(step, [block]), block_of(x=("number", [4.0, 5.0, None])))


def test_a_transform_that_cannot_be_recorded_runs_step_by_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, where a step that waits for the device ends the recording; torch for CPUs records nothing."""
    step = Clip(columns=("x",), low=0.0)
    transform = DeviceTransform(small(step, SourceColumn(name="x", type="number"), dense=["x"]), "cpu")
    block = transform.load(pa.record_batch({"y": [1.0, 0.0], "x": [-1.0, 2.0]}))
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "own stream")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    for _ in range(4):
        assert transform._recordings.repeat(block).dense.tolist() == [[0.0], [2.0]]
    assert streams == ["own stream"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
