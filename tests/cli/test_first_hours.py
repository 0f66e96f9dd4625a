# SPDX-License-Identifier: Apache-2.0
"""What meets a user in the first hours: files of another format, packages next to the logs, runs of other data."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.data import Reader
from terarec.errors import FormatError
from terarec.serve import InferenceSession
from tests.cli.conftest import figures, rejected
from tests.train.planted import make_planted


def write_csv(path: Path, rows: int = 60) -> Path:
    path.write_text("bought,brand\n" + "".join(f"{row % 2},b{row // 3 % 5}\n" for row in range(rows)))
    return path


def test_a_parquet_file_is_not_read_as_text(tmp_path: Path) -> None:
    """Finding P6: "byte 7 is not UTF-8" did not say that the file is Parquet."""
    pq.write_table(pa.table({"bought": [0, 1], "brand": ["a", "b"]}), tmp_path / "log.csv")
    arguments = ["csv", tmp_path / "log.csv", "--out", tmp_path / "data", "--label", "bought", "--categorical", "brand"]
    rejected("prepare", *arguments, error=FormatError, where=tmp_path / "log.csv", problem="is a Parquet file")


@pytest.mark.parametrize(
    ("content", "source_format", "problem"),
    [
        (b"bought,brand\n1,a\n", "parquet", "is text, expected a Parquet file; the format 'delimited'"),
        (b"bought,brand\n1,\xe9\n", "arrow", "is text, expected an Arrow file; the format 'delimited'"),
        (b'{"bought": 1}\n', "parquet", "is JSON lines, expected a Parquet file; the format 'json_lines'"),
        (b"ARROW1\0\0", "parquet", "is an Arrow file, expected a Parquet file; the format 'arrow'"),
        (b"PAR1\0\0", "arrow", "is a Parquet file, expected an Arrow file; the format 'parquet'"),
        (b"PAR1\0\0", "parquet", "cannot be read"),
        (b"PAR1\0\0", "json_lines", "is a Parquet file, expected text"),
        # A drafted workflow would give the values other ids.
        (b"bought,brand\n1,a\n", "parquet", "to keep the ids of a fitted one, write the rows as a Parquet file"),
        (b"ARROW1\0\0", "json_lines", "to keep the ids of a fitted one, write the rows as Parquet, to *.parquet"),
        (b"PAR1\0\0", "json_lines", "to keep the ids of a fitted one, name it *.parquet"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, content: bytes, source_format: str, problem: str) -> None:
    """Finding P6: text read as Parquet was "not a whole file"."""
    (tmp_path / "log.data").write_bytes(content)
    columns = [{"name": "bought", "type": "integer"}, {"name": "brand", "type": "integer"}]
    workflow = {"name": "s", "source": {"format": source_format, "columns": columns}, "steps": []}
    workflow |= {"labels": [{"name": "bought"}], "keys": ["brand"]}
    described = {"format": "terarec.workflow", "version": 4, "workflow": workflow}
    (tmp_path / "w.json").write_text(json.dumps(described))
    arguments = [tmp_path / "w.json", tmp_path / "log.data", "--out", tmp_path / "data"]
    rejected("prepare", *arguments, error=FormatError, where=tmp_path / "log.data", problem=problem)
    assert not (tmp_path / "data").exists()


def test_a_package_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding P6: ``--allow-import`` did not see the working directory."""
    (tmp_path / "shop_near_the_logs.py").write_text("def twice(column):\n    return column\n")
    figures("workflow", "draft", write_csv(tmp_path / "log.csv"), "--out", tmp_path / "w.json")
    found = json.loads((tmp_path / "w.json").read_text())
    step = {"kind": "lambda_op", "columns": ["brand"], "outputs": ["brand"], "output_type": "text"}
    step["function"] = "shop_near_the_logs:twice"
    found["workflow"]["steps"].insert(0, step)
    (tmp_path / "w.json").write_text(json.dumps(found))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # restores the path at the end
    figures("prepare", "w.json", "log.csv", "--out", "data", "--allow-import", "shop_near_the_logs")


def test_a_run_with_patience_is_continued_on_data_without_validation(tmp_path: Path) -> None:
    """Finding P6: ``--init-from`` failed, as patience needs a split to evaluate on."""
    options = ["--label", "bought", "--categorical", "brand"]
    for name, share in (("a", 0.2), ("b", 0)):
        file = write_csv(tmp_path / f"{name}.csv")
        if name == "a":
            figures("prepare", "csv", file, "--out", tmp_path / name, *options, "--valid-fraction", share)
        else:
            figures("prepare", tmp_path / "a", file, "--out", tmp_path / name, "--split", "train")
    run = ["--model", "lr", "--epochs", 1, "--batch-size", 16]
    figures("train", *run, "--data", tmp_path / "a", "--out", tmp_path / "run", "--patience", 2)
    figures("train", "--init-from", tmp_path / "run", "--data", tmp_path / "b", "--out", tmp_path / "run2")
    described = json.loads((tmp_path / "run2" / "run.json").read_text())
    assert described["training"].get("patience") is None
    assert repr(InferenceSession.open(tmp_path / "run")) == "InferenceSession(lr, step 3, 1 inputs -> bought)"
    assert repr(Reader(tmp_path / "a", "train", batch_size=16)) == "Reader('a', 48 samples in 3 batches of 16)"


def test_a_batch_moves_like_a_tensor() -> None:
    """Finding P6: a batch had no ``to``."""
    keys = Jagged(names=("a",), keys=torch.tensor([3]), offsets=torch.tensor([0, 1]))
    batch = Batch(dense=torch.ones(1, 1), label=torch.zeros(1, 1), sparse=keys)
    assert batch.to("meta").dense.is_meta
    assert torch.equal(batch.to("cpu").sparse.keys, keys.keys)


@pytest.mark.parametrize(
    ("options", "where", "problem"),
    [
        (["--model", "two_tower"], "--model", """--set 'model.user=["user"]' --set 'model.item=["item"]', or"""),
        (["--model", "two_tower", "--set", "model.item=item"], "--model", """--set 'model.user=["user"]', or"""),
        (["--model", "din"], "--model", "(columns of the data: user, item, tags (lists))"),
        (["--model", "din"], "--model", """--set 'model.sequences=[{"target": "TARGET", "history": "HISTORY"}]'"""),
        (["--model", "din"], "--model", "'terarec init-config din "),
        (["--model", "python"], "--model", "--set model.factory=your_package.models:build_model"),
        (["--model", "graph"], "--model", "--set model.file=GRAPH.json"),
        (["--schedule", "step"], "training.schedule.step_size", "--set 'training.schedule.step_size=N'"),
    ],
)
def test_a_model_without_its_fields_names_what_to_type(
    tmp_path: Path, planted_columns: Path, options: list[str], where: str, problem: str
) -> None:
    """Finding P6: ``train --model din`` named no syntax."""
    arguments = ["--data", planted_columns, "--out", tmp_path / "run", *options]
    rejected("train", *arguments, where=where, problem=problem)
    assert not (tmp_path / "run").exists()


def test_the_fields_of_the_error_train(tmp_path: Path, planted_columns: Path) -> None:
    """Finding P6: what the error says can be typed."""
    settings = ["--set", 'model.user=["user"]', "--set", 'model.item=["item"]']
    arguments = ["--data", planted_columns, "--out", tmp_path / "run", "--batch-size", 64]
    assert figures("train", *arguments, "--model", "two_tower", *settings)["steps"] > 0


@pytest.fixture(scope="module")
def planted_columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planted")
    make_planted(directory, train=128, valid=64, rows_per_group=64)
    return directory
