# SPDX-License-Identifier: Apache-2.0
"""``terarec export``: the file gives the scores that ``terarec predict`` writes."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from terarec.errors import DataNotFoundError
from terarec.export.artifact import FORMATS
from terarec.export.table_rows import TABLE_FORMATS
from terarec.formats import read_dataset
from tests.cli.conftest import Workshop, commands, figures, rejected
from tests.cli.test_docs import unnamed
from tests.cli.test_train import prepare

runtime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data set of one table and a DLRM trained on it."""
    root = tmp_path_factory.mktemp("export")
    data, run = prepare(root), root / "run"
    shape = ["--model", "dlrm", "--width", 4, "--bottom", "8-4", "--top", "8", "--batch-size", 50]
    figures("train", *shape, "--data", data, "--out", run)
    return data, run


def samples(data: Path) -> pa.Table:
    """The samples of the split "valid", in order."""
    shards = read_dataset(data).shards("valid")
    return pa.concat_tables([pq.read_table(data / shard.file) for shard in shards])


def feed_of(description: dict, table: pa.Table) -> dict[str, np.ndarray]:
    feed = {}
    for given in description["inputs"]:
        columns = [table[name].to_numpy() for name in given["columns"]]
        if given["dtype"] == "float32":
            feed[given["name"]] = np.stack(columns, axis=1).astype(np.float32)
        else:
            feed[given["name"]] = np.stack(columns, axis=1).astype(np.int64)[:, :, None]
    return feed


@pytest.fixture(params=["one table", pytest.param("26 tables", marks=pytest.mark.slow)])
def exported(request: pytest.FixtureRequest, small: tuple[Path, Path]) -> tuple[Path, Path]:
    """A data set and a DLRM trained on it; the export of Criteo's 26 tables takes 5 s longer."""
    if request.param == "one table":
        return small
    workshop = request.getfixturevalue("workshop")
    return workshop.data, workshop.run


@pytest.mark.parametrize("file_format", [pytest.param("onnx", marks=pytest.mark.slow), "torch"])
def test_scores_are_those_of_predict(exported: tuple[Path, Path], tmp_path: Path, file_format: str) -> None:
    (data, run), out = exported, tmp_path / "exported"
    reported = figures("export", run, "--out", out, "--format", file_format)
    assert unnamed(reported, "export") == set()
    description = json.loads((out / "export.json").read_text())
    assert (description["step"], description["run"]) == (reported["step"], str(run))
    assert reported["max_abs_difference"] == description["max_abs_difference"] < 1e-5
    feed = feed_of(description, samples(data))
    if file_format == "onnx":
        session = runtime.InferenceSession(reported["file"], providers=["CPUExecutionProvider"])
        (found,) = session.run(None, feed)
    else:
        program = torch.export.load(reported["file"]).module()
        found = program(*(torch.from_numpy(feed[name]) for name in reported["inputs"]))[0].detach().numpy()
    figures("predict", run, "--data", data, "--out", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(found[:, 0], scores, rtol=0, atol=1e-5)
    assert sorted(path.name for path in out.iterdir()) == ["export.json", Path(reported["file"]).name]


def test_the_help_names_every_format() -> None:
    """Written out there: the formats are in modules that load torch, which --help does not."""
    option = next(option for option in commands()["export"].params if option.name == "format")
    assert set(option.metavar.split("|")) == {*FORMATS, *TABLE_FORMATS, "triton", "embeddings"}


@pytest.mark.slow
def test_without_tables(small: tuple[Path, Path], tmp_path: Path) -> None:
    reported = figures("export", small[1], "--out", tmp_path / "dense", "--no-tables")
    assert reported["tables"] is False
    assert reported["inputs"] == ["dense", "embedding"]


@pytest.mark.parametrize(
    ("form", "option"),
    [
        ("onnx", ("--tables", "missing.json")),
        ("torch", ("--text", "utf8")),
        ("parquet", ("--form", "ensemble")),
        ("triton", ("--no-tables",)),
        ("npy", ("--no-tables",)),
    ],
)
def test_options_of_other_formats_are_rejected(workshop: Workshop, tmp_path: Path, form: str, option: tuple) -> None:
    """They were ignored: `missing.json` was never opened."""
    rejected("export", workshop.run, "--out", tmp_path / "o", "--to", form, *option, where=option[0], problem=form)


def test_what_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    rejected("export", workshop.run, "--out", out, "--to", "onx", where="--to", problem="did you mean 'onnx'?")
    rejected("export", workshop.data, "--out", out, error=DataNotFoundError, where=workshop.data, problem="run.json")
    typed = ["export", workshop.run, "--out", out, "--checkpoint", "123456"]
    rejected(*typed, where=workshop.run / "checkpoints", problem="step 123456")
    assert list(tmp_path.iterdir()) == []
