# SPDX-License-Identifier: Apache-2.0
"""``terarec init-config`` writes a whole run for every registered model, and the run trains as it is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from terarec.config import load_run
from terarec.config.starting_run import ColumnRelations, starting_run
from terarec.etl import prepare
from terarec.etl.ops import Categorify, ListSlice
from terarec.etl.workflow import Workflow
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.models.registry import MODELS
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DINSpec,
    DynamicTablesSpec,
    LabelColumn,
    LabelSpec,
    SASRecSpec,
    ShardSpec,
    SourceColumn,
    SourceSpec,
    SplitByFraction,
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


def log_lines(rows: int = 400) -> list[str]:
    """Users have an age, items a brand; the hour, and what a user saw before, belong to neither."""
    choose = np.random.default_rng(0)
    lines = ["user_id,item_id,brandId,item_history,age,hour,city,click"]
    for row in range(rows):
        user, item, other = choose.integers(0, 60), choose.integers(0, 40), choose.integers(0, 40)
        lines.append(f"u{user},{item},{item % 7},{item} {other},{20 + user % 30},{row % 24},{user % 7},{row % 2}")
    return lines


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sequences")
    (directory / "log.csv").write_text("\n".join(log_lines()) + "\n")
    types = {"user_id": "text", "age": "number", "hour": "number", "item_history": "integer"}
    names = log_lines(0)[0].split(",")
    columns = tuple(
        SourceColumn(name=name, type=types.get(name, "integer"), separator=" " if "history" in name else None)  # type: ignore[arg-type]
        for name in names
    )
    workflow = Workflow(
        [
            Categorify(columns=("user_id", "brandId", "city")),
            Categorify(columns=("item_id", "item_history"), joint=True),
            ListSlice(columns=("item_history",), stop=2),
        ],
        source=SourceSpec(format="delimited", delimiter=",", header=True, columns=columns),
        labels=[LabelSpec(name="click")],
        dense=["age", "hour"],
        categorical=["user_id", "city", "item_id", "brandId", "item_history"],
        split=SplitByFraction(valid=0.25),
    )
    prepare(workflow, [directory / "log.csv"], directory / "data")
    return directory / "data"


@pytest.mark.parametrize("kind", in_every_run(["dlrm", "din", "graph", "two_tower"], KINDS))
def test_the_written_run_trains_without_changes(data: Path, tmp_path: Path, kind: str) -> None:
    config = tmp_path / "run.json"
    factory = ["--factory", "tests.models.factories:small_model"] if kind == "python" else []
    written = figures("init-config", kind, data, "--out", config, *factory)
    assert written["open_fields"] == (["model.user"] if kind == "two_tower" else [])
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


def test_columns_are_chosen_by_what_the_data_show(data: Path, tmp_path: Path) -> None:
    """Finding N13: item columns came into the tower of users, and lists to columns of other vocabularies."""
    figures("init-config", "din", data, "--out", tmp_path / "din.json")
    din = load_run(tmp_path / "din.json").model
    assert isinstance(din, DINSpec)
    assert din.sequences == (TargetHistory(target="item_id", history="item_history"),)
    written = figures("init-config", "two_tower", data, "--out", tmp_path / "towers.json")
    towers = load_run(tmp_path / "towers.json").model
    assert isinstance(towers, TwoTowerSpec)
    assert towers.user == ("age", "user_id", "city")
    assert (towers.item, towers.item_key) == (("item_id", "brandId"), "item_id")
    assert written["open_fields"] == ["model.user"]
    lines = "".join(line.strip(" /") + " " for line in (tmp_path / "towers.json").read_text().splitlines())
    assert "hour, item_history" in lines


def test_equal_numbers_of_rows_are_no_vocabulary(tmp_path: Path) -> None:
    """Finding N13: columns of equal row count that have nothing in common were paired."""
    data = write(tmp_path / "data", dataclasses.replace(COLUMNS, labels=COLUMNS.labels[:1]))
    assert figures("init-config", "din", data, "--out", tmp_path / "din.json")["open_fields"] == ["model.sequences"]


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
    for kind in ("two_tower", "sasrec", "mult_vae", "mf_bpr"):
        rejected("init-config", kind, data, "--out", tmp_path / "no", where=kind, problem="got 2 labels")


def test_keys_without_a_number_of_rows_get_dynamic_tables(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = dataclasses.replace(COLUMNS, categorical=(CategoricalColumn(name="any"),))
    write_dataset(dataclasses.replace(columns, splits={"test": ()}), tmp_path / "data")
    figures("init-config", "deepfm", tmp_path / "data", "--out", tmp_path / "run.json")
    run = load_run(tmp_path / "run.json")
    assert not isinstance(run.model.tables, StaticTablesSpec)
    assert run.training.eval_split == "test"


def test_tables_are_dynamic_where_a_column_that_is_looked_up_has_keys() -> None:
    """Those of each model were, by any column of the data, and began with other weights."""
    kinds = {spec.kind: spec for spec in MODELS}
    keys, item = CategoricalColumn(name="user_id"), CategoricalColumn(name="item_id", rows=9)
    columns = dataclasses.replace(COLUMNS, labels=COLUMNS.labels[:1], categorical=(keys, item))
    sequences, pairs = (starting_run(kinds[kind], columns, "data").run.model for kind in ("sasrec", "mf_bpr"))
    assert sequences == SASRecSpec(
        item="ITEM", history="HISTORY", tables=DynamicTablesSpec(initializer="normal", init_scale=0.02)
    )
    assert pairs.tables == DynamicTablesSpec(initializer="normal", init_scale=0.01)
    # A column to replace may be any of them.
    unknown = dataclasses.replace(columns, categorical=(dataclasses.replace(keys, name="who"), item))
    assert starting_run(kinds["mf_bpr"], unknown, "data").run.model == dataclasses.replace(pairs, user="USER")
    histories = dataclasses.replace(
        columns, categorical=(keys, item, dataclasses.replace(item, name="past", hotness=3))
    )
    joint = ColumnRelations(vocabularies={"item_id": 0, "past": 0})
    assert starting_run(kinds["sasrec"], histories, "data", relations=joint).run.model == SASRecSpec(
        item="item_id", history="past"
    )


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
