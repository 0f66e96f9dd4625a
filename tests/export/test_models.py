"""Every registered model as an ONNX file and as a torch program, against the model itself."""

import json
import typing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, MissingDependencyError
from terarec.export import EXPORT_FILE, NO_KEY, KeyInput, export_model
from terarec.models import build_model
from terarec.spec import (
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
    DynamicTableSpec,
    DynamicTablesSpec,
    FeatureSpec,
    FMSpec,
    GraphModelSpec,
    LabelColumn,
    LRSpec,
    ModelSpec,
    Pooling,
    PythonModelSpec,
    StaticTablesSpec,
    TableSpec,
    TablesSpec,
    TargetHistory,
    TwoTowerSpec,
    WideDeepSpec,
    XDeepFMSpec,
)
from tests.export.samples import run as run_onnx

ROWS = 11
TOLERANCE = {"rtol": 0, "atol": 1e-5}
ONE_LABEL = {"two_tower"}


def specs(tables: TablesSpec) -> list[ModelSpec]:
    """A spec of every kind that describes its layers itself, and of those that matter here with other options."""
    hidden = {"hidden": (8, 6), "width": 4, "tables": tables}
    return [
        LRSpec(tables=tables),
        FMSpec(width=4, tables=tables),
        DNNSpec(**hidden, batch_norm=True, activation="gelu", dropout=0.2),
        WideDeepSpec(**hidden, dropout=0.5),
        DeepFMSpec(**hidden, batch_norm=True, pooling="mean"),
        XDeepFMSpec(**hidden, cin=(5, 3), activation="prelu"),
        DCNSpec(**hidden, activation="silu"),
        DCNV2Spec(**hidden),
        AutoIntSpec(**hidden),
        DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=tables),
        DINSpec(**hidden, sequences=(TargetHistory(target="item", history="seen"),), attention=(5,), softmax=True),
        TwoTowerSpec(**hidden, user=("user", "seen"), item=("item",), vector_width=3, similarity="cosine"),
    ]


def spec_of(kind: str, tables: TablesSpec) -> ModelSpec:
    return next(spec for spec in specs(tables) if spec.kind == kind)


KINDS = [kind.kind for kind in typing.get_args(ModelSpec) if kind not in (GraphModelSpec, PythonModelSpec)]
each_kind = pytest.mark.parametrize("kind", KINDS)


def dataset_of(*, dense: int = 2, labels: int = 1, rows: int | None = ROWS) -> DatasetSpec:
    return DatasetSpec(
        name="d",
        storage="parquet",
        labels=tuple(LabelColumn(name=f"y{index}") for index in range(labels)),
        dense=tuple(DenseColumn(name=f"d{index}") for index in range(dense)),
        categorical=(
            CategoricalColumn(name="user", rows=rows),
            CategoricalColumn(name="item", rows=rows),
            CategoricalColumn(name="seen", rows=rows, hotness=4),
        ),
    )


def batch_of(dataset: DatasetSpec, size: int, *, low: int = 0, high: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(size)
    lengths = [
        torch.ones(size, dtype=torch.int64)
        if column.hotness == 1
        else torch.randint(column.hotness + 1, (size,), generator=generator)
        for column in dataset.categorical
    ]
    total = int(torch.cat(lengths).sum())
    return Batch(
        dense=torch.randn(size, len(dataset.dense), generator=generator),
        label=torch.zeros(size, len(dataset.labels)),
        sparse=Jagged(
            names=tuple(column.name for column in dataset.categorical),
            keys=torch.randint(low, high, (total,), generator=generator),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0),
        ),
    )


def labels_of(kind: str) -> int:
    return 1 if kind in ONE_LABEL else 2


def trained(kind: str, dataset: DatasetSpec, *, tables: TablesSpec | None = None) -> nn.Module:
    """A model whose weights, rows and running statistics are random numbers."""
    model = build_model(spec_of(kind, tables or StaticTablesSpec()), dataset, seed=1)
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


def feed_of(description: dict, batch: Batch, model: nn.Module) -> dict[str, np.ndarray]:
    """The inputs that `description` asks for, made of `batch` independently of the library."""
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
        elif given["columns"] == [f"d{index}" for index in range(batch.dense.shape[1])]:
            value = batch.dense.numpy()
        else:
            value = vectors(model, given["name"], batch)
        feed[given["name"]] = value
    return feed


def vectors(model: nn.Module, name: str, batch: Batch) -> np.ndarray:
    """What the collection whose path `name` starts with gives."""
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
    feed = feed_of(description, batch, model)
    if description["file_format"] == "onnx":
        return run_onnx(out / "model.onnx", feed)
    program = torch.export.load(out / "model.pt2").module()
    found = program(*(torch.from_numpy(feed[given["name"]]) for given in description["inputs"]))
    return dict(zip(description["outputs"], (scores.detach().numpy() for scores in found), strict=True))


def check(out: Path, model: nn.Module, dataset: DatasetSpec, *batches: Batch) -> None:
    for batch in batches:
        found = scores_of(out, model, batch)
        assert list(found) == [column.name for column in dataset.labels]
        with torch.no_grad():
            output = model(batch)
            logits = model.output_logits(output) if hasattr(model, "output_logits") else output
            expected = torch.sigmoid(logits).numpy()
        np.testing.assert_allclose(np.concatenate(list(found.values()), axis=1), expected, **TOLERANCE)


@each_kind
@pytest.mark.parametrize(
    ("file_format", "tables"),
    [("onnx", True), ("onnx", False), ("torch", True), pytest.param("torch", False, marks=pytest.mark.slow)],
)
def test_scores_are_the_models(tmp_path: Path, kind: str, file_format: str, tables: bool) -> None:
    dataset = dataset_of(labels=labels_of(kind))
    model = trained(kind, dataset)
    report = export_model(model, tmp_path / "out", dataset=dataset, format=file_format, tables=tables)
    low = 0 if tables else 1  # DIN leaves the missing key 0 out before it looks keys up
    check(tmp_path / "out", model, dataset, batch_of(dataset, 1, low=low), batch_of(dataset, 13, low=low))
    described = json.loads((tmp_path / "out" / EXPORT_FILE).read_text())
    assert described["max_abs_difference"] == report.max_abs_difference < 1e-5
    assert described["tables"] is tables


@each_kind
def test_without_dense_columns(tmp_path: Path, kind: str) -> None:
    dataset = dataset_of(dense=0)
    model = trained(kind, dataset)
    export_model(model, tmp_path / "out", dataset=dataset)
    check(tmp_path / "out", model, dataset, batch_of(dataset, 1), batch_of(dataset, 9))


@pytest.mark.parametrize("kind", ["dlrm", "din"])
@pytest.mark.parametrize("file_format", ["onnx", "torch"])
def test_dynamic_tables(tmp_path: Path, kind: str, file_format: str) -> None:
    dataset = dataset_of(rows=None)
    model = trained(kind, dataset, tables=DynamicTablesSpec())
    low, high = -(2**40), 2**62
    model.train()(batch_of(dataset, 50, low=low, high=high))
    model.eval()
    export_model(model, tmp_path / "out", dataset=dataset, format=file_format)
    known, unknown = batch_of(dataset, 50, low=low, high=high), batch_of(dataset, 8, low=low, high=high)
    check(tmp_path / "out", model, dataset, known, unknown)


class Pooled(nn.Module):
    """The vectors of one feature as scores of as many labels."""

    def __init__(self, table: TableSpec | DynamicTableSpec, feature: FeatureSpec) -> None:
        super().__init__()
        self.embedding = EmbeddingCollection([table], [feature], seed=3)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.embedding(batch.sparse).pooled * 10


@pytest.mark.parametrize(("pooling", "max_keys"), [("sum", None), ("mean", 2), ("sqrtn", None), ("max", 2)])
@pytest.mark.parametrize("file_format", ["onnx", "torch"])
def test_every_pooling(tmp_path: Path, pooling: Pooling, max_keys: int | None, file_format: str) -> None:
    dataset = dataset_of(dense=0, labels=3)
    table = DynamicTableSpec(name="seen", width=3, default=(0.5, -0.25, 2.0))
    model = Pooled(table, FeatureSpec(name="seen", table="seen", pooling=pooling, max_keys=max_keys))
    model.embedding.tables["seen"].rows(torch.arange(0, ROWS, 2), train=True)
    export_model(model, tmp_path / "out", dataset=dataset, format=file_format)
    check(tmp_path / "out", model, dataset, batch_of(dataset, 1), batch_of(dataset, 20))


def test_the_lowest_key_of_a_scalar_column_is_a_key(tmp_path: Path) -> None:
    dataset = dataset_of(dense=0, labels=3, rows=None)
    model = Pooled(DynamicTableSpec(name="user", width=3), FeatureSpec(name="user", table="user"))
    model.embedding.tables["user"].rows(torch.tensor([NO_KEY, 4]), train=True)
    export_model(model, tmp_path / "out", dataset=dataset)
    keys = torch.tensor([NO_KEY, 4, 5])
    batch = Batch(
        dense=torch.empty(3, 0),
        label=torch.zeros(3, 3),
        sparse=Jagged(names=("user",), keys=keys, offsets=torch.arange(4)),
    )
    assert model(batch)[0].abs().sum() > 0
    check(tmp_path / "out", model, dataset, batch)


def test_keys_of_several_columns_in_one_input(tmp_path: Path) -> None:
    dataset = dataset_of()
    model = trained("wide_deep", dataset)
    keys = KeyInput(name="keys", columns=("item", "seen", "user"), max_keys=4)
    report = export_model(model, tmp_path / "out", dataset=dataset, key_inputs=[keys])
    assert report.inputs == ("dense", "keys")
    check(tmp_path / "out", model, dataset, batch_of(dataset, 13))


def test_a_column_named_as_the_dense_input(tmp_path: Path) -> None:
    dataset = DatasetSpec(
        name="d",
        storage="parquet",
        labels=(LabelColumn(name="y0"),),
        dense=(DenseColumn(name="d0"),),
        categorical=(CategoricalColumn(name="dense", rows=ROWS),),
    )
    model = trained("wide_deep", dataset)
    report = export_model(model, tmp_path / "out", dataset=dataset)
    assert report.inputs == ("dense_columns", "dense")
    check(tmp_path / "out", model, dataset, batch_of(dataset, 13))


def test_scores_are_what_is_asked_for(tmp_path: Path) -> None:
    dataset = dataset_of()
    model = trained("wide_deep", dataset)
    export_model(model, tmp_path / "out", dataset=dataset, scores=lambda logits: logits)
    batch = batch_of(dataset, 5)
    np.testing.assert_allclose(scores_of(tmp_path / "out", model, batch)["y0"], model(batch).detach(), **TOLERANCE)


def test_the_model_keeps_its_tables(tmp_path: Path) -> None:
    dataset = dataset_of()
    model = trained("dlrm", dataset)
    before = model.embedding
    export_model(model, tmp_path / "out", dataset=dataset)
    assert model.embedding is before


def test_files_hold_no_path_of_the_machine(tmp_path: Path) -> None:
    dataset = dataset_of()
    for file_format, name in (("onnx", "model.onnx"), ("torch", "model.pt2")):
        export_model(trained("dlrm", dataset), tmp_path / file_format, dataset=dataset, format=file_format)
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


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Branching(), r"cannot be exported in its layer '0' \(Branching\): "),
        (ReadsOffsets(), r"cannot be exported in its layer '0' \(ReadsOffsets\): .* no attribute 'offsets'"),
        (Eigenvalues(), "cannot be written as ONNX: operation aten.linalg_eig"),
        (Draws(), "off the model's, expected at most"),
    ],
    ids=["branching", "offsets", "operation", "random"],
)
def test_what_cannot_be_exported_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], inner: nn.Module, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        export_model(nn.Sequential(inner), tmp_path / "out", dataset=dataset_of())
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of()
    model = trained("wide_deep", dataset)
    with pytest.raises(ConfigError, match=r"format: got 'onx' \(did you mean 'onnx'\?\), expected one of onnx, torch"):
        export_model(model, tmp_path / "out", dataset=dataset, format="onx")
    with pytest.raises(ConfigError, match="got a WideDeep without dataset, expected"):
        export_model(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="key inputs: got column 'item' 0 times"):
        export_model(
            model, tmp_path / "out", dataset=dataset, key_inputs=[KeyInput(name="k", columns=("user", "seen"))]
        )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export_model(model, tmp_path / "full", dataset=dataset)
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(
        MissingDependencyError, match=r"onnxscript: not installed, expected pip install 'terarec\[onnx\]'"
    ):
        export_model(model, tmp_path / "out", dataset=dataset)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
