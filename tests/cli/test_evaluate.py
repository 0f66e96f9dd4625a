# SPDX-License-Identifier: Apache-2.0
"""``terarec evaluate``: metrics by name, per label and slice, and of retrieval."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terarec.data import Reader
from terarec.etl import prepare
from terarec.etl.ops import GivenIds
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.datasets import IdValues
from terarec.metrics import MetricSet
from terarec.models.artifact import load_model
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, SplitByFraction
from tests.cli.conftest import figures, rejected, terarec

USERS, ITEMS, COUNTRIES = 12, 60, ("de", "fr", "it")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of users and items, a data set of it, and a run of wide_deep and of two_tower."""
    root = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(0)
    rows = zip(rng.integers(0, USERS, 600), rng.integers(0, ITEMS, 600), rng.integers(0, 3, 600), strict=True)
    lines = [f"{int((u + i) % 3 == 0)},{u},u{u},i{i},{COUNTRIES[c]}" for u, i, c in rows]
    (root / "log.csv").write_text("\n".join(["y,x,user,item,country", *lines]) + "\n")
    columns = ["--label", "y", "--dense", "x", "--categorical", "user,item", "--metadata", "country,user"]
    figures("prepare", "csv", root / "log.csv", "--out", root / "data", *columns, "--valid-fraction", 0.3)
    shape = ["--width", 4, "--hidden", "4", "--batch-size", 100, "--data", root / "data"]
    figures("train", "--model", "wide_deep", *shape, "--out", root / "run", "--sparse-lr", 0.1)
    towers = ["--set", "model.user=x,user", "--set", "model.item=item"]
    figures("train", "--model", "two_tower", *shape, *towers, "--out", root / "towers", "--sparse-lr", 0.1)
    return root


def expected(shop: Path, **options: Any) -> MetricSet:
    """The metrics of the whole split in one batch."""
    model = load_model(shop / "run").model
    (batch,) = Reader(shop / "data", "valid", batch_size=1000)
    logits = model(batch).detach()
    found = MetricSet(("gauc", "accuracy"), ("y",), group="user", slices=("country",))
    columns = {"user": batch.metadata["user"], "country": batch.metadata["country"]}
    found.update(labels=batch.label, logits=logits, scores=logits.sigmoid(), weights=None, columns=columns)
    return found


def test_metrics_groups_and_slices_are_those_that_are_named(shop: Path) -> None:
    options = ["--metrics", "gauc,accuracy", "--group", "user", "--slices", "country"]
    found = figures("evaluate", shop / "run", "--data", shop / "data", *options)
    results = expected(shop).compute()
    assert found["gauc"] == pytest.approx(results["gauc"])
    assert found["accuracy"] == pytest.approx(results["accuracy"])
    assert "auc" not in found
    of_value = {one.value: one.metrics.values["gauc"] for one in results.slices["country"].values}
    assert set(of_value) == set(COUNTRIES)
    assert {one["value"]: one["metrics"]["gauc"] for one in found["slices"]["country"]["values"]} == pytest.approx(
        of_value
    )
    shown = terarec("evaluate", shop / "run", "--data", shop / "data", *options).out
    assert "slices of country" in shown


def test_absent_figures_are_not_printed(shop: Path) -> None:
    reported = terarec("evaluate", shop / "run", "--data", shop / "data")
    assert "retrieval" not in reported.out + reported.err
    assert max(map(len, (reported.out + reported.err).splitlines())) < 1000


def test_the_metrics_of_the_run_are_the_default(shop: Path, tmp_path: Path) -> None:
    options = ["--metrics", "accuracy,gauc", "--group", "user", "--slices", "country", "--batch-size", 100]
    trained = figures("train", "--model", "lr", "--data", shop / "data", "--out", tmp_path / "run", *options)
    found = figures("evaluate", tmp_path / "run", "--data", shop / "data")
    assert found["gauc"] == pytest.approx(trained["gauc"])
    assert found["accuracy"] == pytest.approx(trained["accuracy"])
    assert found["device"] == "cpu" or found["device"].startswith("cuda")
    assert set(found["slices"]) == {"country"}


def test_a_two_tower_run_is_evaluated_over_all_items(shop: Path) -> None:
    reported = figures("evaluate", shop / "towers", "--data", shop / "data", "--k", "2,5")
    found = reported["retrieval"]
    model = load_model(shop / "towers").model
    batches = {split: next(iter(Reader(shop / "data", split, batch_size=1000))) for split in ("train", "valid")}
    vectors: dict[str, dict[str, np.ndarray]] = {"user": {}, "item": {}}
    met: dict[str, set[tuple[str, int]]] = {"train": set(), "valid": set()}
    for split in ("valid", "train"):
        batch = batches[split]
        items = batch.sparse.keys[batch.batch_size :].tolist()
        users = batch.metadata["user"].to_pylist()
        by_user, by_item = model.user_vectors(batch), model.item_vectors(batch)
        for row, (user, item) in enumerate(zip(users, items, strict=True)):
            if split == "valid":
                vectors["user"].setdefault(user, by_user[row].detach().numpy())
            vectors["item"].setdefault(item, by_item[row].detach().numpy())
            if batch.label[row, 0] > 0:
                met[split].add((user, item))
    train = batches["train"]
    counts = Counter(train.sparse.keys[train.batch_size :][train.label[:, 0] > 0].tolist())
    # Of equal ones that of the first batch, and there of the lower id.
    numbers: dict[int, int] = {}
    for split in ("valid", "train"):
        keys = batches[split].sparse.keys[batches[split].batch_size :].tolist()
        for start in range(0, len(keys), 100):
            for key in sorted(keys[start : start + 100]):
                numbers.setdefault(key, len(numbers))
    recalls: dict[int, list[float]] = {2: [], 5: []}
    of_popular: list[float] = []
    for user, vector in vectors["user"].items():
        wanted = {i for u, i in met["valid"] - met["train"] if u == user}
        candidates = [i for i in vectors["item"] if (user, i) not in met["train"]]
        ranked = sorted(candidates, key=lambda item: -float(vectors["item"][item] @ vector))
        popular = sorted(candidates, key=lambda item: (-counts[item], numbers[item]))
        of_popular += [len(wanted & set(popular[:5])) / len(wanted)] if wanted else []
        for k, values in recalls.items():
            if wanted:
                values.append(len(wanted & set(ranked[:k])) / len(wanted))
    assert reported["popularity"]["recall@5"] == pytest.approx(np.mean(of_popular))
    assert found["items"] == len(vectors["item"])
    assert found["users"] == len(recalls[2]) > 0
    assert found["relevant_seen"] == len(met["valid"] & met["train"])
    for k, values in recalls.items():
        assert found[f"recall@{k}"] == pytest.approx(np.mean(values))


def test_rare_and_missing_values_are_no_items(tmp_path: Path) -> None:
    """Of the items that training did not have, all were found as soon as one "rare value" was recommended."""
    lines = ["1,u1,i1", "1,u2,i1", "1,u1,i2", "1,u3,i2", "1,u3,i3", "1,u1,", "1,u2,i2", "1,u1,i9", "1,u3,i8", "1,u2,"]
    (tmp_path / "log.csv").write_text("\n".join(["y,user,item", *lines]) + "\n")
    columns = ["--label", "y", "--categorical", "user,item", "--min-count", 2, "--valid-fraction", 0.4]
    figures("prepare", "csv", tmp_path / "log.csv", "--out", tmp_path / "data", *columns)
    shape = ["--width", 4, "--hidden", "4", "--data", tmp_path / "data", "--out", tmp_path / "run", "--epochs", 1]
    figures("train", "--model", "two_tower", *shape, "--set", "model.user=user", "--set", "model.item=item")
    found = figures("evaluate", tmp_path / "run", "--data", tmp_path / "data", "--k", 1)["retrieval"]
    # i1 and i2; u2 took i2 in the valid split, and the others took i9, i8 and none.
    assert [found[name] for name in ("items", "users", "relevant", "relevant_unknown")] == [2, 1, 1, 3]


def test_users_are_reported_apart_by_the_group(shop: Path) -> None:
    options = ["evaluate", shop / "towers", "--data", shop / "data", "--split", "train", "--k", 60]
    by_key, by_name = figures(*options), figures(*options, "--group", "user")
    assert by_key["retrieval"]["users"] == by_name["retrieval"]["users"]
    assert by_key["retrieval"]["relevant_seen"] == 0
    assert by_key["retrieval"]["recall@60"] == pytest.approx(1.0)  # all items


def test_a_run_on_the_files_of_hugectr_is_evaluated_on_them(shop: Path, tmp_path: Path) -> None:
    records, run = tmp_path / "norm", tmp_path / "run"
    figures("convert", shop / "data", "--to", "norm", "--out", records)
    trained = figures("train", "--model", "deepfm", "--data", records, "--out", run, "--batch-size", 100)
    found = figures("evaluate", run, "--data", records / "records.json")
    assert (found["rows"], found["auc"]) == (180, pytest.approx(trained["auc"]))


def test_what_makes_no_sense_is_rejected(shop: Path) -> None:
    options = ["evaluate", shop / "run", "--data", shop / "data"]
    rejected(*options, "--k", "3", where="--k", problem="wide_deep")
    rejected("evaluate", shop / "towers", "--data", shop / "data", "--k", "x", where="--k", problem="got 'x'")
    rejected(*options, "--metrics", "aucc", where="metric", problem="did you mean 'auc'?")
    rejected(*options, "--slices", "counry", where="column 'counry'", problem="did you mean 'country'?")
    rejected(*options, "--device", "cuda:99", where="--device", problem="got 'cuda:99'")


def test_predict_takes_a_device(shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    figures("predict", shop / "run", "--data", shop / "data", "--out", out, "--device", "cpu")
    raw = tmp_path / "raw.csv"
    figures("predict", shop / "run", shop / "log.csv", "--out", raw, "--device", "cpu")
    assert len(raw.read_text().splitlines()) == 601
    typed = ["predict", shop / "run", shop / "log.csv", "--out", tmp_path / "no.csv", "--device", "cuda:99"]
    rejected(*typed, where="--device", problem="got 'cuda:99'")


def test_slices_have_the_values_behind_ids(shop: Path, tmp_path: Path) -> None:
    """Finding P5: slices of a categorical column showed ids."""
    options = ["evaluate", shop / "run", "--data", shop / "data", "--slices", "item", "--metrics", "accuracy"]
    named, plain = (figures(*options, *more)["slices"]["item"]["values"] for more in ([], ["--ids"]))
    assert [{**one, "value": None} for one in named] == [{**one, "value": None} for one in plain]
    values = IdValues(workflow_of(shop / "data"), "item")
    numbers = np.array([one["value"] for one in plain])
    assert [one["value"] for one in named] == [
        None if number == 0 else name for number, name in zip(numbers, values.values(numbers), strict=True)
    ]
    assert {"i1", "i2"} <= {one["value"] for one in named}
    trained = ["--model", "lr", "--batch-size", 100, "--slices", "item", "--data", shop / "data"]
    figures("train", *trained, "--out", tmp_path / "run")
    points = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (point,) = (point for point in points if "slices" in point)
    assert {one["value"] for one in point["slices"]["item"]["values"]} == {one["value"] for one in named}


@pytest.mark.parametrize("is_missing", [False, True])
def test_id_0_of_given_ids_is_an_item_unless_it_is_missing(tmp_path: Path, is_missing: bool) -> None:
    (tmp_path / "log.csv").write_text("1,0,0\n1,1,1\n1,0,2\n1,1,0\n")
    workflow = Workflow(
        [GivenIds(columns=("user",), rows=(2,)), GivenIds(columns=("item",), rows=(3,), zero_is_missing=is_missing)],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            columns=tuple(SourceColumn(name=name, type="integer") for name in ("y", "user", "item")),
        ),
        labels=[LabelSpec(name="y")],
        categorical=["user", "item"],
        split=SplitByFraction(valid=0.5),
    )
    prepare(workflow, [tmp_path / "log.csv"], tmp_path / "data")
    shape = ["--data", tmp_path / "data", "--out", tmp_path / "run", "--epochs", 1]
    figures("train", "--model", "mf_bpr", *shape, "--set", "model.user=user", "--set", "model.item=item")
    found = figures("evaluate", tmp_path / "run", "--data", tmp_path / "data", "--k", 1)["retrieval"]
    wanted = [2, 1, 1] if is_missing else [3, 2, 0]
    assert [found[name] for name in ("items", "users", "relevant_unknown")] == wanted
