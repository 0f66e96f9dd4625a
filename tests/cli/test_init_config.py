"""``terarec init-config`` writes a whole run for every registered model, and the run trains as it is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from terarec.config import load_run
from terarec.formats import ParquetShardWriter, write_dataset
from terarec.models.registry import MODELS
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DINSpec,
    LabelColumn,
    ShardSpec,
    StaticTablesSpec,
    TargetHistory,
    TwoTowerSpec,
)
from tests.cli.conftest import figures, rejected, terarec
from tests.formats.samples import make_block
from tests.params import in_every_run

KINDS = sorted(spec.kind for spec in MODELS)
COLUMNS = DatasetSpec(
    name="sequences",
    storage="parquet",
    labels=(LabelColumn(name="click"), LabelColumn(name="buy")),
    dense=(DenseColumn(name="age"),),
    categorical=(
        CategoricalColumn(name="user_id", rows=60),
        CategoricalColumn(name="item_id", rows=40),
        CategoricalColumn(name="brandId", rows=7),
        CategoricalColumn(name="item_history", rows=40, hotness=4),
    ),
)


def write(directory: Path, columns: DatasetSpec) -> Path:
    splits = {}
    for seed, (split, rows) in enumerate((("train", 300), ("valid", 100))):
        block = make_block(columns, rows, seed)
        label = np.random.default_rng(seed).integers(0, 2, block.label.shape).astype(np.float32)
        writer = ParquetShardWriter(directory / split / "part.parquet", columns)
        writer.write_block(dataclasses.replace(block, label=label))
        writer.close()
        splits[split] = (ShardSpec(file=f"{split}/part.parquet", rows=rows),)
    write_dataset(dataclasses.replace(columns, splits=splits), directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    one_label = dataclasses.replace(COLUMNS, labels=COLUMNS.labels[:1])
    return write(tmp_path_factory.mktemp("sequences") / "data", one_label)


@pytest.mark.parametrize("kind", in_every_run(["dlrm", "din", "graph", "two_tower"], KINDS))
def test_the_written_run_trains_without_changes(data: Path, tmp_path: Path, kind: str) -> None:
    config = tmp_path / "run.json"
    factory = ["--factory", "tests.models.factories:small_model"] if kind == "python" else []
    written = figures("init-config", kind, data, "--out", config, *factory)
    assert written["open_fields"] == []
    run = load_run(config)
    assert (run.model.kind, run.data) == (kind, str(data))
    assert run.training.batch_size == 16
    trained = figures("train", "--config", config, "--out", tmp_path / "run", "--allow-import", "tests")
    assert (trained["model"], trained["steps"]) == (kind, 19)
    # What training writes is JSON without comments.
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"]["kind"] == kind


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_there_with_a_comment(data: Path, tmp_path: Path, kind: str) -> None:
    config = tmp_path / "run.json"
    figures("init-config", kind, data, "--out", config)
    lines = config.read_text().splitlines()
    found = json.loads("\n".join(line for line in lines if not line.strip().startswith("//")))
    run = load_run(config)
    for spec, held in ((run, found), (run.training, found["training"]), (run.model, found["model"])):
        assert set(held) - {"kind"} == {field.name for field in dataclasses.fields(spec)}
    for name in (*found["training"], *(set(found["model"]) - {"kind"})):
        (place,) = [number for number, line in enumerate(lines) if line.startswith(f'    "{name}":')]
        assert lines[place - 1].startswith("    // "), name


def test_columns_are_chosen_by_their_names(data: Path, tmp_path: Path) -> None:
    figures("init-config", "din", data, "--out", tmp_path / "din.json")
    din = load_run(tmp_path / "din.json").model
    assert isinstance(din, DINSpec)
    assert din.sequences == (TargetHistory(target="item_id", history="item_history"),)
    figures("init-config", "two_tower", data, "--out", tmp_path / "towers.json")
    towers = load_run(tmp_path / "towers.json").model
    assert isinstance(towers, TwoTowerSpec)
    assert "user_id" in towers.user
    assert {"item_id", "brandId"} <= set(towers.item)


def test_what_cannot_be_chosen_is_reported(tmp_path: Path) -> None:
    categorical = tuple(CategoricalColumn(name=f"c{index}", rows=50) for index in range(2))
    data = write(tmp_path / "data", dataclasses.replace(COLUMNS, labels=COLUMNS.labels[:1], categorical=categorical))
    for kind, fields in (("din", ["model.sequences"]), ("two_tower", ["model.user", "model.item"])):
        config = tmp_path / f"{kind}.json"
        written = figures("init-config", kind, data, "--out", config)
        assert written["open_fields"] == fields
        assert "Replace" in config.read_text()
        rejected("train", "--config", config, "--out", tmp_path / "run", where=kind, problem="c0, c1")
    assert figures("init-config", "python", data, "--out", tmp_path / "p.json")["open_fields"] == ["model.factory"]


def test_a_graph_has_a_loss_for_each_label(tmp_path: Path) -> None:
    data = write(tmp_path / "data", COLUMNS)
    figures("init-config", "graph", data, "--out", tmp_path / "run.json")
    figures("train", "--config", tmp_path / "run.json", "--out", tmp_path / "run")
    evaluated = figures("evaluate", tmp_path / "run", "--data", data)
    assert set(evaluated["labels"]) == {"click", "buy"}
    rejected("init-config", "two_tower", data, "--out", tmp_path / "no", where="two_tower", problem="got 2 labels")


def test_keys_without_a_number_of_rows_get_dynamic_tables(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = dataclasses.replace(COLUMNS, categorical=(CategoricalColumn(name="any"),))
    write_dataset(dataclasses.replace(columns, splits={"test": ()}), tmp_path / "data")
    figures("init-config", "deepfm", tmp_path / "data", "--out", tmp_path / "run.json")
    run = load_run(tmp_path / "run.json")
    assert not isinstance(run.model.tables, StaticTablesSpec)
    assert run.training.eval_split == "test"


def test_a_file_is_not_overwritten_and_words_are_checked(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.json"
    figures("init-config", "lr", data, "--out", config)
    rejected("init-config", "lr", data, "--out", config, where="--out", problem=f"{config} exists")
    assert terarec("init-config", "fm", data, "--out", config, "--force").code == 0
    assert load_run(config).model.kind == "fm"
    rejected("init-config", "depfm", data, "--out", tmp_path / "no", where="MODEL", problem="did you mean 'deepfm'?")
    rejected(
        "init-config", "python", data, "--out", tmp_path / "no", "--factory", "x", where="--factory", problem="got 'x'"
    )
    rejected("init-config", "lr", data, "--out", tmp_path / "no", "--factory", "a:b", where="--factory", problem="lr")
    assert not (tmp_path / "no").exists()


def test_an_error_behind_comments_names_its_line(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.json"
    config.write_text('{\n  // a comment with a "quote"\n  "data": "d",\n  // another\n  "model": }\n')
    rejected("train", "--config", config, "--out", tmp_path / "run", where=f"{config}: line 5 column 12")
    config.write_text('{\n  // a comment\n  "data": "https://x//y"\n}\n')
    assert load_run(config).data.endswith("/x/y")
