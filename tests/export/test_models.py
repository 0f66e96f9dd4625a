# SPDX-License-Identifier: Apache-2.0
"""Every registered model as an ONNX file and as a torch program, against the model itself."""

import itertools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, MissingDependencyError
from terarec.export import NO_KEY, KeyInput, export_model
from terarec.export.artifact import EXPORT_FILE
from terarec.models import GraphModel, build_model
from terarec.models.columns import without_keys
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTableSpec,
    DynamicTablesSpec,
    FeatureSpec,
    LabelColumn,
    Pooling,
    TableSpec,
)
from terarec.spec.tables import TablesSpec
from tests.errors import at
from tests.export.samples import run_export
from tests.models.every import (
    ALLOWED,
    BST_MODELS,
    COLUMN_MODELS,
    DIEN_MODELS,
    DIN_MODELS,
    MODELS,
    NEXT_ITEM_MODELS,
    PAIR_MODELS,
    ROWS,
    SEQUENCE_MODELS,
    TWO_TOWER_MODELS,
    dataset,
    random_batch,
)
from tests.params import in_every_run

TOLERANCE = {"rtol": 0, "atol": 1e-5}
RETRIEVING = {**TWO_TOWER_MODELS, **SEQUENCE_MODELS, **PAIR_MODELS, **NEXT_ITEM_MODELS}
ONE_LABEL = {*RETRIEVING, "graph", "python"}
LEAVING_OUT = {*DIN_MODELS, *BST_MODELS, *DIEN_MODELS, "hstu_ranker", *SEQUENCE_MODELS, *NEXT_ITEM_MODELS}
"""Models that leave the missing key 0 of a history out before they look keys up."""


def trained(name: str, columns: DatasetSpec, *, tables: TablesSpec | None = None) -> nn.Module:
    """A model whose weights, rows and running statistics are random numbers."""
    spec = MODELS[name] if tables is None else replace(MODELS[name], tables=tables)
    model = build_model(spec, columns, seed=1, allow_import=ALLOWED)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and tensor.numel():
                drawn = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(drawn + 0.5 if "running_var" in name else drawn - 0.5)
        for module in model.modules():
            if isinstance(module, EmbeddingCollection):
                for table in module.tables.values():
                    if not table.is_dynamic:
                        table.weights.copy_(torch.rand(table.weights.shape, generator=generator) - 0.5)
    return model.eval()


def other_keys(batch: Batch, keys: torch.Tensor) -> Batch:
    """`batch` with ``keys[k]`` in the place of each key k."""
    return replace(batch, sparse=replace(batch.sparse, keys=keys[batch.sparse.keys]))


def feed_of(description: dict, batch: Batch, model: nn.Module) -> dict[str, np.ndarray]:
    """The inputs that `description` names, made of `batch` independently of the library."""
    feed = {}
    jagged, size = batch.sparse, batch.batch_size
    for given in description["inputs"]:
        if given["dtype"] == "int64":
            bags = []
            for column in given["columns"]:
                first = jagged.names.index(column) * size
                ends = jagged.offsets[first : first + size + 1].tolist()
                bags.append([jagged.keys[a:b].tolist() for a, b in pairwise(ends)])
            most = given["shape"][2] or max(1, *(len(bag) for column in bags for bag in column), 1)
            padded = [[bag + [NO_KEY] * (most - len(bag)) for bag in column] for column in bags]
            value = np.array(padded, np.int64).reshape(len(bags), size, most).transpose(1, 0, 2)
        elif given["columns"] == [f"x{index}" for index in range(batch.dense.shape[1])]:
            value = batch.dense.numpy()
        else:
            value = vectors(model, given["name"], batch)
        feed[given["name"]] = value
    return feed


def vectors(model: nn.Module, name: str, batch: Batch) -> np.ndarray:
    """What the collection whose path `name` starts with gives, or the graph's tensor `name`."""
    if isinstance(model, GraphModel):
        return model.tensor(batch, name).detach().numpy()
    paths = {path: part for path, part in model.named_modules() if isinstance(part, EmbeddingCollection)}
    path = max((path for path in paths if name.startswith(path)), key=len)
    output = paths[path](batch.sparse)
    if name == path:
        return output.pooled.detach().numpy()
    held = output.sequences[name.removeprefix(f"{path}.").removesuffix(".mask")]
    parts = [held.values[a:b] for a, b in zip(held.offsets[:-1].tolist(), held.offsets[1:].tolist(), strict=True)]
    padded = nn.utils.rnn.pad_sequence([*parts, held.values.new_zeros(1, held.values.shape[1])], batch_first=True)[:-1]
    if not name.endswith(".mask"):
        return padded.detach().numpy()
    return np.arange(padded.shape[1])[None] < held.offsets.diff().numpy()[:, None]


def scores_of(out: Path, model: nn.Module, batch: Batch) -> dict[str, np.ndarray]:
    description = json.loads((out / EXPORT_FILE).read_text())
    return run_export(out, feed_of(description, batch, model))


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        output = model(batch)
        return model.output_logits(output) if hasattr(model, "output_logits") else output


def check(out: Path, model: nn.Module, *batches: Batch) -> None:
    for batch in batches:
        found = np.concatenate(list(scores_of(out, model, batch).values()), axis=1)
        np.testing.assert_allclose(found, logits_of(model, batch).sigmoid().numpy(), **TOLERANCE)


ALWAYS = {("lr", "torch", True), ("graph", "onnx", False), ("two_tower-shared", "torch", False)}
"""Tried in each run of the suite; the long run tries all."""


def case(name: str, file_format: str, *, tables: bool) -> Any:
    words = [name, file_format, "tables" if tables else "no_tables"]
    is_quick = (name, file_format, tables) in ALWAYS
    return pytest.param(name, file_format, tables, id="-".join(words), marks=() if is_quick else pytest.mark.slow)


CASES = [
    case(name, file_format, tables=tables)
    for name in MODELS
    for file_format in ("onnx", "torch")
    for tables in (True, False)
]


@pytest.mark.parametrize(("name", "file_format", "tables"), CASES)
def test_scores_are_the_models(tmp_path: Path, name: str, file_format: str, tables: bool) -> None:
    columns = dataset(labels=1 if name in ONE_LABEL else 2)
    model = trained(name, columns)
    report = export_model(model, tmp_path / "out", dataset=columns, format=file_format, tables=tables)
    batches = [random_batch(columns, 1), random_batch(columns, 13)]
    if name in LEAVING_OUT and not tables:
        batches = [other_keys(batch, torch.arange(ROWS).clamp(min=1)) for batch in batches]
    check(tmp_path / "out", model, *batches)
    described = json.loads((tmp_path / "out" / EXPORT_FILE).read_text())
    assert described["max_abs_difference"] == report.max_abs_difference < 1e-5
    assert (described["tables"], len(described["outputs"])) == (tables, len(columns.labels))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "lr" else pytest.mark.slow) for name in COLUMN_MODELS if "-" not in name],
)
def test_without_dense_columns(tmp_path: Path, name: str) -> None:
    columns = dataset(dense=0)
    model = trained(name, columns)
    export_model(model, tmp_path / "out", dataset=columns)
    check(tmp_path / "out", model, random_batch(columns, 1), random_batch(columns, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file_format"),
    in_every_run([("lr", "torch")], itertools.product(["lr", "dlrm", "din"], ["onnx", "torch"])),
)
def test_dynamic_tables(tmp_path: Path, name: str, file_format: str) -> None:
    columns = dataset(rows=None)
    model = trained(name, columns, tables=DynamicTablesSpec())
    keys = torch.tensor([-(2**62), -1, 0, 5, 2**40, 2**40 + 1, 2**62])
    model.train()(other_keys(random_batch(columns, 50), keys))
    model.eval()
    export_model(model, tmp_path / "out", dataset=columns, format=file_format)
    for shift in (0, 1):  # known keys, and some that the tables do not hold
        check(tmp_path / "out", model, other_keys(random_batch(columns, 20), keys + shift))


class Pooled(nn.Module):
    """The vectors of features of one table as scores of as many labels."""

    def __init__(self, table: TableSpec | DynamicTableSpec, *features: FeatureSpec) -> None:
        super().__init__()
        self.embedding = EmbeddingCollection([table], features, seed=3)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.embedding(batch.sparse).pooled * 10


POOLINGS: list[tuple[Pooling, int | None]] = [("sum", None), ("mean", 2), ("sqrtn", None), ("max", 2)]


@pytest.mark.parametrize("file_format", in_every_run([], ["onnx", "torch"]))
def test_every_pooling(tmp_path: Path, file_format: str) -> None:
    lists = tuple(CategoricalColumn(name=pooling, rows=ROWS, hotness=3) for pooling, _ in POOLINGS)
    columns = replace(dataset(dense=0, labels=12), categorical=lists)
    features = [
        FeatureSpec(name=pooling, table="tags", pooling=pooling, max_keys=max_keys) for pooling, max_keys in POOLINGS
    ]
    model = Pooled(DynamicTableSpec(name="tags", width=3, default=(0.5, -0.25, 2.0)), *features)
    model.embedding.tables["tags"].rows(torch.arange(0, ROWS, 2), train=True)
    export_model(model, tmp_path / "out", dataset=columns, format=file_format)
    check(tmp_path / "out", model, random_batch(columns, 1), random_batch(columns, 20))


@pytest.mark.slow
def test_the_lowest_key_of_a_scalar_column_is_a_key(tmp_path: Path) -> None:
    columns = dataset(dense=0, labels=3, rows=None)
    model = Pooled(DynamicTableSpec(name="a", width=3), FeatureSpec(name="a", table="a"))
    model.embedding.tables["a"].rows(torch.tensor([NO_KEY, 4]), train=True)
    export_model(model, tmp_path / "out", dataset=columns)
    keys = torch.tensor([NO_KEY, 4, 5])
    batch = Batch(
        dense=torch.empty(3, 0),
        label=torch.zeros(3, 3),
        sparse=Jagged(names=("a",), keys=keys, offsets=torch.arange(4)),
    )
    assert model(batch)[0].abs().sum() > 0
    check(tmp_path / "out", model, batch)


@pytest.mark.slow
def test_keys_of_several_columns_in_one_input(tmp_path: Path) -> None:
    columns = dataset()
    model = trained("lr", columns)
    keys = KeyInput(name="keys", columns=("b", "past", "a", "tags"), max_keys=4)
    report = export_model(model, tmp_path / "out", dataset=columns, key_inputs=[keys])
    assert report.inputs == ("dense", "keys")
    check(tmp_path / "out", model, random_batch(columns, 13))


@pytest.mark.slow
def test_a_column_named_as_the_dense_input(tmp_path: Path) -> None:
    columns = DatasetSpec(
        name="d",
        storage="parquet",
        labels=(LabelColumn(name="y0"),),
        dense=(DenseColumn(name="x0"),),
        categorical=(CategoricalColumn(name="dense", rows=ROWS),),
    )
    model = trained("lr", columns)
    report = export_model(model, tmp_path / "out", dataset=columns)
    assert report.inputs == ("dense_columns", "dense")
    check(tmp_path / "out", model, random_batch(columns, 13))


@pytest.mark.slow
def test_scores_are_what_is_requested(tmp_path: Path) -> None:
    columns = dataset(dense=0, labels=3, rows=7)
    model = Pooled(TableSpec(name="a", rows=7, width=3), FeatureSpec(name="a", table="a"))
    export_model(model, tmp_path / "out", dataset=columns, scores=lambda logits: logits)
    batch = random_batch(columns, 5)
    found = np.concatenate(list(scores_of(tmp_path / "out", model, batch).values()), axis=1)
    np.testing.assert_allclose(found, model(batch).detach(), **TOLERANCE)


@pytest.mark.slow
def test_the_model_keeps_its_tables_and_files_hold_no_path_of_the_machine(tmp_path: Path) -> None:
    columns = dataset(dense=0, labels=3, rows=7)
    model = Pooled(TableSpec(name="a", rows=7, width=3), FeatureSpec(name="a", table="a"))
    before = model.embedding
    for file_format, name in (("onnx", "model.onnx"), ("torch", "model.pt2")):
        export_model(model, tmp_path / file_format, dataset=columns, format=file_format)
        assert model.embedding is before
        content = (tmp_path / file_format / name).read_bytes()
        assert str(Path(__file__).parents[2]).encode() not in content
        assert b".py" not in content


class Branching(nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.dense if batch.dense.sum() > 0 else -batch.dense


class Eigenvalues(nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.dense[:, :1] + torch.linalg.eigvals(batch.dense.T @ batch.dense).real.sum()


class ReadsOffsets(nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.dense + batch.sparse.offsets.float()


class Draws(nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.dense[:, :1] + torch.rand_like(batch.dense[:, :1])


class LooksUpTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection([TableSpec(name="a", rows=ROWS, width=1)], [FeatureSpec(name="a", table="a")])

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.tables(batch.sparse).pooled - self.tables(without_keys(batch.sparse, {"a": 0})).pooled


def test_vectors_of_several_lookups_are_no_input(tmp_path: Path) -> None:
    """That of the last one was given, and the file compared with a model that reads the first one, too."""
    with pytest.raises(ConfigError, check=at("tables", "got 2 lookups")):
        export_model(LooksUpTwice(), tmp_path / "out", dataset=dataset(), format="torch", tables=False)


@pytest.mark.parametrize(
    ("inner", "place"),
    [
        (Branching(), ("Sequential", "cannot be exported in its layer '0' (Branching): ")),
        (
            ReadsOffsets(),
            (
                "Sequential",
                "cannot be exported in its layer '0' (ReadsOffsets): 'PaddedKeys' object has no attribute 'offsets'",
            ),
        ),
        (Eigenvalues(), ("Sequential", "cannot be written as ONNX: operation aten.linalg_eig")),
        pytest.param(Draws(), ("export",), marks=pytest.mark.slow),
    ],
    ids=["branching", "offsets", "operation", "random"],
)
def test_what_cannot_be_exported_is_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], inner: nn.Module, place: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, check=at(*place)) as raised:
        export_model(nn.Sequential(inner), tmp_path / "out", dataset=dataset())
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = dataset()
    model = trained("wide_deep", columns)
    with pytest.raises(ConfigError, check=at("format")):
        export_model(model, tmp_path / "out", dataset=columns, format="onx")
    with pytest.raises(ConfigError, check=at("export")):
        export_model(model, tmp_path / "out")
    with pytest.raises(ConfigError, check=at("key inputs")):
        export_model(model, tmp_path / "out", dataset=columns, key_inputs=[KeyInput(name="k", columns=("a", "tags"))])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, check=at("out")):
        export_model(model, tmp_path / "full", dataset=columns)
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(MissingDependencyError, check=at("onnxscript")):
        export_model(model, tmp_path / "out", dataset=columns)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.slow
def test_columns_may_have_the_names_of_operations(tmp_path: Path) -> None:
    """Finding Q3: two nodes had the name of a column "cat"."""
    columns = dataset()
    names = ("cat", "mul", "sigmoid", "val_0")
    renamed = [replace(column, name=name) for column, name in zip(columns.categorical, names, strict=True)]
    columns = replace(columns, categorical=tuple(renamed))
    model = build_model(DLRMSpec(width=4, bottom=(4,), top=(4,)), columns, seed=1).eval()
    export_model(model, tmp_path / "out", dataset=columns, format="onnx", tables=True)
    check(tmp_path / "out", model, random_batch(columns, 3))
    read = {given["name"] for given in json.loads((tmp_path / "out" / EXPORT_FILE).read_text())["inputs"]}
    assert read == {"dense", *names}
