# SPDX-License-Identifier: Apache-2.0
"""``--share``: columns with one table from the description of a run to its server."""

import json
from pathlib import Path

import numpy as np
import pytest

from terarec.apps.recipes.reproduce import prepare_sequences
from terarec.apps.recommend import Catalogue, Recommender
from terarec.config import load_run
from terarec.errors import ConfigError
from terarec.formats import read_dataset
from terarec.models import DNN
from terarec.models.pairs import MFBPR
from terarec.models.sequences import SASRec
from terarec.serve import InferenceSession
from terarec.spec import DNNSpec, MFBPRSpec, NegativesSpec, SASRecSpec, StaticTablesSpec
from tests.apps.recipes.sequences import ITEMS, write_planted_sequences
from tests.cli.conftest import figures, rejected
from tests.errors import at

CATALOGUE = list(range(1, ITEMS + 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("share")
    prepare_sequences(write_planted_sequences(root / "files", users=60) / "Beauty.txt", root / "data")
    return root / "data"


def test_a_described_run_shares_and_so_does_what_is_made_of_it(data: Path, tmp_path: Path) -> None:
    config, run = tmp_path / "run.json", tmp_path / "run"
    figures("init-config", "deepfm", data, "--out", config, "--share", "item=history")
    assert load_run(config).model.tables.shared == {"history": "item"}  # type: ignore[union-attr]
    short = ("--width", 4, "--hidden", "4", "--batch-size", 16, "--set", "training.eval_split=none")
    figures("train", "--config", config, "--out", run, *short, "--set", "training.max_steps=2")
    resumed = figures("train", "--out", run, "--resume", "--set", "training.max_steps=4")
    assert resumed["steps"] == 4
    assert {table["table"] for table in figures("inspect", run)["tables"]} == {"item", "item.wide"}
    with InferenceSession.open(run) as session:
        expected = session.predict({"item": CATALOGUE, "history": [[3, 4]] * ITEMS})
    exported = figures("export", run, "--format", "torch", "--out", tmp_path / "export")
    assert exported["max_abs_difference"] < 1e-5  # of the program's scores from those of the model
    assert np.ptp(expected) > 0


def test_towers_share_the_table_of_the_items(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    towers = ("--model", "two_tower", "--set", "model.user=history", "--set", "model.item=item", "--width", 4)
    short = ("--batch-size", 16, "--set", "training.max_steps=5", "--set", "training.eval_split=none")
    figures("train", "--data", data, "--out", run, *towers, *short, "--share", "item=history")
    assert [table["table"] for table in figures("inspect", run)["tables"]] == ["item"]
    with InferenceSession.open(run) as session:
        scores = session.predict({"item": CATALOGUE, "history": [[3, 4]] * ITEMS})[:, 0]
    found = Recommender.open(run, Catalogue({"item": CATALOGUE}, "item")).recommend({"history": [[3, 4]]}, 3)
    assert found.items[0] == [CATALOGUE[place] for place in np.argsort(-scores, kind="stable")[:3]]


def test_rows_of_each_table_of_a_column_are_named(data: Path, tmp_path: Path) -> None:
    """Those of all but the first two had question marks."""
    run, model = tmp_path / "run", ("--model", "mult_vae", "--set", "model.item=item", "--set", "model.history=history")
    short = ("--set", "training.max_steps=1", "--set", "training.eval_split=none", "--hidden", "4")
    figures("train", "--data", data, "--out", run, *model, *short, "--set", "model.latent=2")
    for table in ("item", "item.encoder", "item.bias"):
        largest = figures("inspect", run, "--table", table)["largest"]
        assert [row["value"] for row in largest] == [str(row["row"]) for row in largest], table


def test_what_cannot_be_shared_is_rejected_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.json"
    rejected("init-config", "dnn", data, "--out", config, "--share", "item", where="--share")
    rejected("init-config", "dnn", data, "--out", config, "--share", "item=past", where="dnn", problem="'past'")
    twice = ("--share", "item=history", "--share", "other=history")
    rejected("init-config", "dnn", data, "--out", config, *twice, where="--share", problem="'other'")
    rejected("init-config", "graph", data, "--out", config, "--share", "item=history", where="model.tables")
    rejected("train", "--data", data, "--out", tmp_path / "run", "--model", "dnn", "--share", "item=past", where="dnn")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("joint", [False, True])
def test_columns_of_two_vocabularies_do_not_share_a_table(tmp_path: Path, joint: bool) -> None:
    """Both have as many ids, by their `max_size`, which is all that was compared."""
    lines = [f"1,u{row % 3},{row},i{row * row % 7}" for row in range(60)]
    (tmp_path / "log.csv").write_text("\n".join(["y,user,time,item", *lines]) + "\n")
    both = {"kind": "categorify", "max_size": 3}
    workflow = {
        "name": "log",
        "source": {
            "format": "delimited",
            "delimiter": ",",
            "header": True,
            "columns": [{"name": name, "type": "integer"} for name in ("y", "time")]
            + [{"name": name, "type": "text"} for name in ("user", "item")],
        },
        "steps": [
            {
                "kind": "history",
                "columns": ["item"],
                "outputs": ["past"],
                "group": "user",
                "order": "time",
                "max_length": 4,
            },
            {**both, "columns": ["item", "past"], "joint": joint},
            {**both, "columns": ["user"]},
        ],
        "split": {"kind": "by_time", "column": "time", "valid": 0.2},
        "labels": [{"name": "y"}],
        "categorical": ["item", "past", "user"],
    }
    content = {"format": "terarec.workflow", "version": 4, "workflow": workflow}
    (tmp_path / "log.json").write_text(json.dumps(content))
    figures("prepare", tmp_path / "log.json", tmp_path / "log.csv", "--out", tmp_path / "data")
    columns = [column for column in read_dataset(tmp_path / "data").categorical if column.name != "user"]
    assert {column.rows for column in columns} == {5}
    short = ("--data", tmp_path / "data", "--out", tmp_path / "run", "--set", "training.max_steps=1")
    sasrec = ("--model", "sasrec", "--width", 4, "--set", "model.item=item", "--set", "model.history=past")
    din = ("--model", "din", "--width", 4, "--set", 'model.sequences=[{"target": "item", "history": "past"}]')
    if joint:
        rejected("train", *sasrec[:-1], "model.history=user", *short, where="column 'user'")
        figures("train", *sasrec, *short)
        return
    dataset = read_dataset(tmp_path / "data")
    pairs = MFBPRSpec(user="user", item="item", negatives=NegativesSpec(draw="column", column="past"))
    for build in (
        lambda: SASRec(SASRecSpec(item="item", history="past", width=4), dataset),
        lambda: DNN(DNNSpec(tables=StaticTablesSpec(shared={"past": "item"})), dataset),
        lambda: MFBPR(pairs, dataset),
    ):
        with pytest.raises(ConfigError, check=at("column 'past'", "ids are those of another vocabulary")):
            build()
    for model in (sasrec, din, ("--model", "dnn", "--width", 4, "--share", "item=past")):
        rejected("train", *model, *short, where="column 'past'", problem="ids are those of another vocabulary")
    assert not (tmp_path / "run").exists()
