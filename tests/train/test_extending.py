# SPDX-License-Identifier: Apache-2.0
"""A training that continues the chain of checkpoints of the day before with other data (finding L12)."""

import dataclasses
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from terarec.batch import column
from terarec.checkpoint import complete_checkpoints, load
from terarec.checkpoint.directory import read_chain, read_manifest, state_id
from terarec.config import load_run
from terarec.errors import ConfigError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.models.artifact import dense_state, extended_step, load_model, tables
from terarec.ragged import Ragged
from terarec.serve import InferenceSession
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DLRMSpec,
    DynamicTablesSpec,
    MFBPRSpec,
    NegativesSpec,
    RunSpec,
    SGDSpec,
    ShardSpec,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
    TwoTowerSpec,
)
from terarec.train import Callback, build
from terarec.train.metrics_log import read_log
from tests.errors import at
from tests.train.planted import COLUMNS, make_planted
from tests.train.small_run import assert_same, changed, weights
from tests.train.test_rejected_runs import content, shops_run, write_shops

FIRST = 8  # steps of the first day


@pytest.fixture(scope="module")
def small_day(tmp_path_factory):
    """Return a data set of the same columns that touches fewer than half of the rows."""
    directory = tmp_path_factory.mktemp("small_day")
    make_planted(directory, train=60, valid=100, rows_per_group=100)
    return directory


@pytest.fixture(scope="module")
def large_day(tmp_path_factory):
    """Return a data set of the same columns that touches more than half of the rows."""
    directory = tmp_path_factory.mktemp("large_day")
    make_planted(directory, train=2000, valid=100, rows_per_group=100)
    return directory


@pytest.fixture(scope="module")
def grown_day(tmp_path_factory):
    """Return a data set of the same columns with a third more users, ids after those that were there."""
    directory = tmp_path_factory.mktemp("grown_day")
    columns = tuple(
        dataclasses.replace(column, rows=400) if column.name == "user" else column for column in COLUMNS.categorical
    )
    spec = dataclasses.replace(COLUMNS, categorical=columns)
    rng = np.random.default_rng(1)
    splits = {}
    for split, rows in (("train", 40), ("valid", 40)):
        file = f"{split}/part-00000.parquet"
        writer = ParquetShardWriter(directory / file, spec)
        tags = Ragged(rng.integers(0, 40, rows), np.arange(rows + 1))
        keys = [rng.integers(290, 400, rows), rng.integers(0, 20, rows), tags]
        label = (keys[0] % 2).astype(np.float32)[:, None]
        writer.write(label, rng.normal(size=(rows, 2)).astype(np.float32), keys)
        writer.close()
        splits[split] = (ShardSpec(file=file, rows=rows),)
    write_dataset(dataclasses.replace(spec, splits=splits), directory)
    return directory


def first_day(spec: RunSpec, out, **training):
    run = build(changed(spec, epochs=1, **training), out)
    run.fit()
    assert run.trainer.step == FIRST
    return run


def next_day(spec: RunSpec, data, out, former, **training):
    options = {"epochs": 1, "batch_size": 20, "keep_best": False, **training}
    described = changed(dataclasses.replace(spec, data=str(data)), **options)
    return build(described, out, init_from=former, extend_chain=True)


def links(run):
    """Step -> whether the checkpoint is a delta."""
    return {
        int(path.name[5:]): read_manifest(path).delta is not None
        for path in complete_checkpoints(run.directory.checkpoints)
    }


TABLES = {
    "static": StaticTablesSpec(),
    "dynamic": DynamicTablesSpec(max_rows=460),
    "tiers": StaticTablesSpec(tiers=Tiers(device="24KiB", host="64KiB")),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_day_with_few_changed_rows_begins_with_a_delta(tmp_path, spec, small_day, kind):
    model = dataclasses.replace(spec.model, tables=TABLES[kind])
    spec = dataclasses.replace(spec, model=model)
    first = first_day(spec, tmp_path / "first")
    former = tmp_path / f"first/checkpoints/step-{FIRST:08d}"
    base_bytes = sum(entry.bytes for entry in read_manifest(former).files)
    second = next_day(spec, small_day, tmp_path / "second", tmp_path / "first")
    report = second.fit()
    assert report.steps == 3
    # Those of the last step, which is served, also where it is not the best one.
    assert dataclasses.replace(report, best_step=None).metrics == report.evaluation.results.named_values()
    assert links(second) == {FIRST: False, FIRST + 3: True}
    [_, (_, manifest)] = read_chain(second.directory.checkpoints / f"step-{FIRST + 3:08d}")
    assert manifest.delta.previous == state_id(former, FIRST)
    assert sum(entry.bytes for entry in manifest.files) < base_bytes
    # The same training as a plain warm start.
    plain = build(dataclasses.replace(second.spec, extend_chain=False), tmp_path / "plain", init_from=former)
    plain.fit()
    assert_same(weights(second.model), weights(plain.model))
    # The chain needs nothing of the first day any more.
    shutil.rmtree(tmp_path / "first")
    assert first.directory.path == tmp_path / "first"
    loaded = tables(load_model(tmp_path / "second").model)
    for name, table in tables(second.model).items():
        keys = table.keys()
        assert torch.equal(loaded[name].keys(), keys)
        assert torch.equal(loaded[name].export(keys).weights, table.export(keys).weights)


def test_a_day_with_many_changed_rows_begins_with_a_base(tmp_path, spec, large_day):
    first_day(spec, tmp_path / "first")
    second = next_day(spec, large_day, tmp_path / "second", tmp_path / "first")
    second.fit()
    assert links(second) == {FIRST: False, FIRST + 100: False}


def test_days_go_on_by_deltas(tmp_path, spec, small_day):
    first_day(spec, tmp_path / "0")
    for day in range(1, 4):
        run = next_day(spec, small_day, tmp_path / str(day), tmp_path / str(day - 1))
        run.fit()
        assert links(run)[FIRST + 3 * day]
    loaded = tables(load_model(tmp_path / "3").model)
    for name, table in tables(run.model).items():
        assert torch.equal(loaded[name].weights, table.weights)


def test_static_tables_that_grew_are_resized_by_the_delta(tmp_path, spec, grown_day):
    first_day(spec, tmp_path / "first")
    second = next_day(spec, grown_day, tmp_path / "second", tmp_path / "first", max_steps=1)
    second.fit()
    assert links(second) == {FIRST: False, FIRST + 1: True}
    users = tables(second.model)["user"]
    loaded = tables(load_model(tmp_path / "second").model)["user"]
    assert len(loaded) == 400
    assert torch.equal(loaded.weights, users.weights)
    # Trained further, and the day after: the next process begins from the chain.
    resumed = build(changed(second.spec, max_steps=2), tmp_path / "second")
    resumed.fit(resume=True)
    third = next_day(spec, grown_day, tmp_path / "third", tmp_path / "second", max_steps=1)
    third.fit()
    assert links(third) == {FIRST: False, FIRST + 1: True, FIRST + 2: True, FIRST + 3: True}
    assert torch.equal(
        tables(load_model(tmp_path / "third").model)["user"].weights, tables(third.model)["user"].weights
    )
    # A model of the first day's size does not take it.
    shutil.copy(tmp_path / "first/dataset/dataset.json", tmp_path / "third/dataset/dataset.json")
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/third/checkpoints/step-{FIRST + 3:08d}", "has 400 rows")):
        load_model(tmp_path / "third")


def test_tables_in_tiers_grow_where_their_initial_weights_do_not_depend_on_the_rows(tmp_path, spec, grown_day):
    def described(**options):
        tiers = StaticTablesSpec(tiers=Tiers(device="24KiB", host="64KiB"), **options)
        return dataclasses.replace(spec, model=dataclasses.replace(spec.model, tables=tiers))

    first_day(described(), tmp_path / "first")
    with pytest.raises(ConfigError, check=at("table 'user'", "300 to 400 rows")):
        next_day(described(), grown_day, tmp_path / "second", tmp_path / "first").fit()
    assert not (tmp_path / "second").exists()
    first_day(described(init_scale=0.1), tmp_path / "third")
    run = next_day(described(init_scale=0.1), grown_day, tmp_path / "fourth", tmp_path / "third", max_steps=1)
    run.fit()
    assert links(run)[FIRST + 1]
    loaded, held = tables(load_model(tmp_path / "fourth").model)["user"], tables(run.model)["user"]
    assert torch.equal(loaded.export(loaded.keys()).weights, held.export(held.keys()).weights)


POPULAR = NegativesSpec(draw="popularity")
COUNTING = {
    "two_tower": TwoTowerSpec(width=4, user=("age", "item"), item=("user",), hidden=(), vector_width=4),
    "mf_bpr": MFBPRSpec(width=4, user="item", item="user", negatives=POPULAR),
}


@pytest.mark.parametrize("kind", COUNTING)
def test_counts_of_items_go_on_and_begin_at_zero_for_those_that_are_added(tmp_path, spec, grown_day, kind):
    spec = dataclasses.replace(spec, model=COUNTING[kind])
    first_day(spec, tmp_path / "first")
    run = next_day(spec, grown_day, tmp_path / "second", tmp_path / "first", max_steps=1)
    run.fit()
    before, after = (dense_state(load_model(tmp_path / day).model) for day in ("first", "second"))
    assert_same(after, dense_state(run.model))
    name = "sampler.counts" if kind == "mf_bpr" else "frequency.sightings"
    batch = next(iter(run.reader("train")))
    counts = batch.label[:, 0] > 0
    items = column(batch, "user")[counts] if kind == "mf_bpr" else column(batch, "user").unique()
    assert len(after[name]) == 400
    assert items.max() >= 300
    expected = torch.cat([before[name], torch.zeros(100, dtype=torch.int64)]) + items.bincount(minlength=400)
    assert torch.equal(after[name], expected)
    # A replica of the first day moves on to it.
    session = InferenceSession.open(tmp_path / "first")
    session.move_on(load(complete_checkpoints(run.directory.checkpoints)[-1]))
    assert session.step == FIRST + 1


def test_an_interrupted_day_resumes_to_the_bit(tmp_path, spec, small_day):
    first_day(spec, tmp_path / "first")
    straight = next_day(spec, small_day, tmp_path / "straight", tmp_path / "first", delta_every=1)
    straight.fit()
    assert links(straight) == {FIRST: False, FIRST + 1: True, FIRST + 2: True, FIRST + 3: True}
    pressed = next_day(spec, small_day, tmp_path / "pressed", tmp_path / "first", delta_every=1)
    pressed.callbacks.insert(0, Press("on_step"))  # before its first checkpoint
    with pytest.raises(KeyboardInterrupt):
        pressed.fit()
    # The chain of the first day is there, which is no checkpoint of this run to resume from.
    described = load_run(tmp_path / "pressed/run.json")
    assert described.init_from == str(tmp_path / f"first/checkpoints/step-{FIRST:08d}")
    build(changed(described, max_steps=2), tmp_path / "pressed").fit(resume=True)
    resumed = build(described, tmp_path / "pressed")
    assert resumed.fit(resume=True).steps == 3
    assert_same(weights(resumed.model), weights(straight.model))
    assert links(resumed) == links(straight)


@pytest.mark.parametrize("out", ["other", "first"])
def test_no_run_is_extended_over(tmp_path, spec, small_day, out):
    """Checkpoints of fewer steps than the chain has counted as copies of it, and the run was replaced."""
    build(changed(spec, max_steps=3), tmp_path / "other").fit()
    first_day(spec, tmp_path / "first")
    before = content(tmp_path)
    for resume, where in ((False, tmp_path / out), (True, tmp_path / out / "run.json")):
        run = next_day(spec, small_day, tmp_path / out, tmp_path / "first", keep_checkpoints=1)
        with pytest.raises(ConfigError, check=at(where)):
            run.fit(resume=resume)
    assert content(tmp_path) == before


def test_a_day_resumes_after_the_run_before_went_on(tmp_path, spec, small_day):
    first_day(spec, tmp_path / "first")
    next_day(spec, small_day, tmp_path / "second", tmp_path / "first", max_steps=2).fit()
    build(changed(spec, max_steps=FIRST + 4), tmp_path / "first").fit(resume=True)
    resumed = next_day(spec, small_day, tmp_path / "second", tmp_path / "first")
    assert resumed.fit(resume=True).steps == 3
    assert links(resumed) == {FIRST: False, FIRST + 2: True, FIRST + 3: True}


class Press(Callback):
    """Stops a run at once."""

    def __init__(self, hook):
        setattr(self, hook, self.press)

    def press(self, _trainer):
        raise KeyboardInterrupt


def test_a_day_without_a_checkpoint_starts_over_from_the_chain(tmp_path, spec, small_day):
    def pressed(hook):
        run = next_day(spec, small_day, tmp_path / "second", tmp_path / "first")
        run.callbacks.insert(0, Press(hook))
        with pytest.raises(KeyboardInterrupt):
            run.fit()
        return run

    first_day(spec, tmp_path / "first")
    assert links(pressed("on_step")) == {FIRST: False}
    build(changed(spec, max_steps=FIRST + 4), tmp_path / "first").fit(resume=True)
    # Of a start before its first step no copies stay, which would be served.
    assert links(pressed("on_start")) == {FIRST: False}
    with pytest.raises(ConfigError, check=at(tmp_path / "second")):
        build(spec, tmp_path / "second").fit()
    run = next_day(spec, small_day, tmp_path / "second", tmp_path / "first")
    run.fit()
    assert list(links(run))[-1] == FIRST + 7
    log = read_log(run.directory.metrics)
    assert {point["step"] for point in (*log.starts, *log.training, *log.evaluations)} == {FIRST + 4, FIRST + 7}


def test_checkpoints_without_the_description_of_their_run_are_refused(tmp_path, spec, small_day):
    first_day(spec, tmp_path / "first")
    next_day(spec, small_day, tmp_path / "second", tmp_path / "first").fit()
    (tmp_path / "second/run.json").unlink()
    before = content(tmp_path / "second")
    for resume in (False, True):
        with pytest.raises(ConfigError, check=at(tmp_path / "second")):
            next_day(spec, small_day, tmp_path / "second", tmp_path / "first").fit(resume=resume)
    assert content(tmp_path / "second") == before


def test_the_newest_checkpoint_is_extended_and_not_the_best_one(tmp_path, spec, small_day):
    first = build(changed(spec, epochs=1, checkpoint_every=2, keep_checkpoints=9, patience=9), tmp_path / "first")
    first.fit()
    run = next_day(spec, small_day, tmp_path / "second", tmp_path / "first")
    assert run.spec.init_from == str(tmp_path / f"first/checkpoints/step-{FIRST:08d}")


def test_what_a_chain_cannot_continue_is_rejected(tmp_path, spec, small_day):
    first_day(spec, tmp_path / "first")

    def rejected(check, **changes):
        other = dataclasses.replace(spec, **changes)
        with pytest.raises(ConfigError, check=check):
            next_day(other, small_day, tmp_path / "second", tmp_path / "first").fit()
        assert not (tmp_path / "second").exists()

    rejected(at("dense_optimizer"), dense_optimizer=SGDSpec())
    rejected(at("sparse_optimizer"), sparse_optimizer=AdamSpec())
    rejected(at("init_from", "top.layers.0"), model=DLRMSpec(width=4, bottom=(8, 4), top=(9,)))
    with pytest.raises(ConfigError, check=at("RunSpec.extend_chain")):
        RunSpec(data="data", extend_chain=True)
    with pytest.raises(ConfigError, check=at("RunSpec.extend_chain")):
        RunSpec(data="data", init_from="first", extend_chain=True, reset_optimizer=True)
    for name in ("first", "step-" + "1" * 5000):  # of which Python makes no number
        with pytest.raises(ConfigError, check=at("init_from")):
            extended_step(RunSpec(data="data", init_from=name, extend_chain=True))
    assert RunSpec(data="data", sparse_optimizer=AdaGradSpec(), training=TrainingSpec()).extend_chain is False


def write_vocabulary(data, values, buckets=2):
    """Replace the workflow of a data set by one step with this vocabulary."""
    folder = data / "workflow"
    (folder / "shop.parquet").unlink(missing_ok=True)
    (folder / "states").mkdir()
    step = {"kind": "categorify", "columns": ["shop"], "hash_buckets": buckets}
    (folder / "workflow.json").write_text(json.dumps({"workflow": {"steps": [step]}}))
    table = pa.table({"value": pa.array(values), "count": pa.array(range(len(values), 0, -1))})
    pq.write_table(table, folder / "states/00-categorify-shop.parquet")
    return data


@pytest.mark.parametrize(
    ("values", "options", "reported"),
    [
        (["a", "b", "c"], {}, None),
        (["a", "b", "c", "d"], {"rows": 7}, None),
        (["a", "c", "b"], {}, ("data set 'shops', column 'shop'", "id 4 was 'b', now 'c'")),
        (["a", "b"], {}, ("data set 'shops', column 'shop'", "id 5 was 'c', which is gone")),
        (["a", "b", "c"], {"rows": 5}, ("data set 'shops', column 'shop'", "id 5 is gone")),
        (["a", "b", "c"], {"buckets": 3}, ("data set 'shops'", "workflow/workflow.json")),
        ([1, 2, 3], {}, ("data set 'shops', column 'shop'", "values of int64, expected string")),
    ],
)
def test_ids_stay_and_others_may_be_added(tmp_path, values, options, reported):
    buckets = options.pop("buckets", 2)
    shops_run(write_vocabulary(write_shops(tmp_path / "data"), ["a", "b", "c"]), tmp_path / "first").fit()
    other = write_vocabulary(write_shops(tmp_path / "other", **options), values, buckets)
    spec = shops_run(other, tmp_path / "second").spec
    run = build(spec, tmp_path / "second", init_from=tmp_path / "first", extend_chain=True)
    if reported is None:
        run.fit()
        assert read_dataset(tmp_path / "second/dataset").categorical[0].rows == options.get("rows", 6)
        return
    with pytest.raises(ConfigError, check=at(*reported)):
        run.fit()
    assert not (tmp_path / "second").exists()
