# SPDX-License-Identifier: Apache-2.0
"""``terarec plan`` shows where tables are, and what would fit where they do not."""

import json

import numpy as np
import pytest
import torch

from terarec.dist import RowWise, ShardingPlan, TableWise, load_plan
from terarec.dist.plan import TablePlan
from terarec.errors import NoSpaceError
from terarec.formats.block import ColumnBlock
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn
from tests.cli.conftest import figures, rejected, terarec
from tests.formats.samples import write_split

ROWS = {"user": 4_000_000, "item": 600_000, "country": 100}


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The description of a run over three columns."""
    directory = tmp_path_factory.mktemp("plan")
    dataset = DatasetSpec(
        name="planned",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(DenseColumn(name="I1"),),
        categorical=tuple(CategoricalColumn(name=name, rows=rows) for name, rows in ROWS.items()),
    )
    block = ColumnBlock(
        label=np.zeros((8, 1), np.float32),
        dense=np.zeros((8, 1), np.float32),
        keys=tuple(np.arange(8) for _ in ROWS),
    )
    write_split(directory / "data", dataset, block, cuts=(), rows_per_group=8)
    path = directory / "run.json"
    model = {"kind": "dlrm", "width": 16, "bottom": [16], "top": [8]}
    path.write_text(json.dumps({"data": str(directory / "data"), "model": model, "training": {"device": "cpu"}}))
    return path


@pytest.mark.usefixtures("reports")
def test_tables_and_their_bytes(described):
    found = figures("plan", described)
    assert {table["name"]: table["rows"] for table in found["tables"]} == ROWS
    assert found["host_bytes"] > sum(ROWS.values()) * 16 * 4
    assert (found["suggestion"], found["placement"], found["device_bytes"]) == (None, [], 0)


@pytest.mark.usefixtures("reports")
def test_over_budget_the_placement_that_would_fit_is_shown(described):
    needed = figures("plan", described)["host_bytes"]
    tables_bytes = sum(ROWS.values()) * 2 * 16 * 4
    # All rows; a plan would count 8 of a table in tiers, those of the samples.
    rows = [word for name, count in ROWS.items() for word in ("--rows", f"{name}={count}")]
    ended = terarec("plan", described, "--memory", f"{needed - tables_bytes // 2}", *rows, "--json")
    assert ended.code != 0
    found, error = map(json.loads, ended.out.splitlines())
    assert found["suggestion"] in error["error"]
    assert found["suggestion"].startswith("host=")
    shares = {table["name"]: table["resident_share"] for table in found["placement"]}
    assert shares["country"] == 1
    assert 0 < shares["user"] < 1
    fitting = figures("plan", described, "--memory", f"{needed}", "--tiers", found["suggestion"], *rows)
    assert [table["resident_share"] for table in fitting["tables"]] == [*shares.values()]
    rejected("plan", described, "--memory", "much", where="--memory", problem="got 'much'")


def test_tables_are_placed_on_ranks_by_a_plan_that_can_be_edited(described, tmp_path):
    path = tmp_path / "plan.json"
    options = ("--ranks", "2", "--rows", "user=4000000", "--local-bandwidth", "2GB")
    found = figures("plan", described, *options, "--out", path)
    assert {table["table"] for table in found["tables"]} == {*ROWS}
    assert len(found["ranks"]) == found["world_size"] == 2
    assert "local bandwidth given" in found["costs_from"]
    assert load_plan(path).world_size == 2
    rejected("plan", described, *options, "--out", path, where="--out", problem=f"{path} exists")
    # 8 samples ask for too little to spread a table.
    entries = [TablePlan(table=name, placement=TableWise(rank=1)) for name in ROWS]
    edited = ShardingPlan(world_size=2, tables=tuple(entries))
    edited.save(path)
    rated = figures("plan", described, *options, "--plan", path)
    assert rated["ranks"][0]["table_bytes"] == 0
    assert rated["ranks"][1]["table_bytes"] > sum(ROWS.values()) * 16 * 4
    assert found["ranks"][1]["table_bytes"] < rated["ranks"][1]["table_bytes"]


def test_tables_on_gpus_get_what_layers_batches_and_the_exchange_leave(described):
    whole = sum(ROWS.values()) * 16 * 8
    found = figures("plan", described, "--ranks", "2", "--device-memory", f"{2**30 + 2 * whole}")
    assert found["costs_from"] == "assumed for GPUs"
    assert 1.9 * whole < found["rank_bytes"] < 2 * whole
    tight = figures("plan", described, "--ranks", "2", "--device-memory", f"{2**30 + 7 * whole // 10}")
    assert {table["table"]: table["placement"] for table in tight["tables"]}["user"] == "row_wise"
    assert all(rank["table_bytes"] <= tight["rank_bytes"] for rank in tight["ranks"])
    tiny = ("--ranks", "2", "--device-memory", "1GiB")
    rejected("plan", described, *tiny, error=NoSpaceError, where="--device-memory", problem="libraries")


def test_options_without_a_meaning_are_rejected(described, tmp_path):
    """They were ignored."""
    ranks = ("--ranks", "2", "--rows", "user=100")
    rejected("plan", described, *ranks, "--memory", "1GiB", where="--memory", problem="--rank-memory")
    figures("plan", described, *ranks, "--out", tmp_path / "plan.json")
    made = (*ranks, "--plan", tmp_path / "plan.json")
    for option in (("--place", "user=row_wise"), ("--ranks-per-node", "1")):
        rejected("plan", described, *made, *option, where=option[0], problem="no meaning with --plan")
    if not torch.cuda.is_available():
        rejected("plan", described, "--device-memory", "1GiB", where="--device-memory", problem="without a GPU")
    # One process is one rank, for which this plan is not.
    one = ("train", described, "--plan", tmp_path / "plan.json", "--out", tmp_path / "run")
    rejected(*one, where="plan.world_size", problem="got 2, expected 1")
    assert not (tmp_path / "run").exists()


def test_plans_that_do_not_fit_are_rejected(described, tmp_path):
    path = tmp_path / "plan.json"
    for change, words in (
        ({"tables": ["user", "item", "county"]}, "county"),
        ({"tables": ["user", "item"]}, "'country'"),
        ({"world_size": 3, "tables": [*ROWS]}, "world_size"),
        ({"rank_bytes": 1000, "tables": [*ROWS]}, "rank_bytes"),
    ):
        entries = tuple(TablePlan(table=name, placement=RowWise()) for name in change["tables"])
        ShardingPlan(**{"world_size": 2, **change, "tables": entries}).save(path)
        ended = terarec("plan", described, "--ranks", "2", "--plan", path, "--json")
        assert (ended.code != 0, words in ended.err) == (True, True), ended.err
    twice = json.loads(path.read_text())
    twice["tables"][1]["table"] = "user"
    path.write_text(json.dumps(twice))
    assert "'user'" in terarec("plan", described, "--ranks", "2", "--plan", path).err
    rejected("plan", described, "--probe", where="--probe", problem="--ranks")
    assert terarec("plan", described, "--ranks", "2", "--rank-memory", "1MiB").code != 0
    rejected("plan", described, "--ranks", "2", "--place", "user", where="--place", problem="got 'user'")
    twice = ("--place", "user=row_wise", "--place", "user=table_wise")
    rejected("plan", described, "--ranks", "2", *twice, where="--place", problem="got 'user' twice")
