# SPDX-License-Identifier: Apache-2.0
"""Runs with tables in tiers: equal to those in memory, resumed or not, and used where runs are used."""

import dataclasses
import resource
import shutil

import pytest

from terarec.errors import ConfigError, StorageError
from terarec.models.artifact import load_model, tables
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DeepFMSpec,
    DLRMSpec,
    DynamicTablesSpec,
    StaticTablesSpec,
    Tiers,
    freq,
)
from terarec.train import Callback, build
from terarec.train.report import write_report
from tests.errors import at
from tests.params import in_every_run
from tests.train.small_run import assert_same, changed, weights

MODELS = {
    "static": (DLRMSpec(width=4, bottom=(8, 4), top=(8,)), 30),
    "two widths": (DeepFMSpec(width=4, hidden=(8,)), 54),
    "dynamic": (DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=DynamicTablesSpec(admit=freq(2))), 27),
}
"""Each with KiB that hold hardly more than a batch."""


def with_tiers(spec, tiers):
    return dataclasses.replace(
        spec, model=dataclasses.replace(spec.model, tables=dataclasses.replace(spec.model.tables, tiers=tiers))
    )


@pytest.mark.parametrize("model", in_every_run(["two widths"], MODELS))
def test_a_run_equals_one_in_memory_with_and_without_a_stop(tmp_path, spec, model):
    optimizers = {"dense_optimizer": AdamSpec(), "sparse_optimizer": AdaGradSpec(lr=0.05)}
    described, kib = MODELS[model]
    spec = dataclasses.replace(spec, model=described, **optimizers)
    plain = build(spec, tmp_path / "plain")
    expected = plain.fit()
    tiered_spec = with_tiers(spec, Tiers(host=f"{kib}KiB", file=str(tmp_path / "rows")))
    straight = build(tiered_spec, tmp_path / "straight")
    report = straight.fit()
    assert_same(weights(straight.model), weights(plain.model))
    assert report.evaluation.results == expected.evaluation.results
    assert expected.tiers is None
    assert report.tiers.rows_read > 0
    assert report.tiers.staged > 0
    write_report(tmp_path / "straight")
    assert "rows in the fastest tier" in (tmp_path / "straight" / "report.html").read_text()
    del straight

    build(changed(tiered_spec, max_steps=5), tmp_path / "resumed").fit()
    resumed = build(with_tiers(spec, Tiers(host=f"{kib + 5}KiB", file=str(tmp_path / "rows"))), tmp_path / "resumed")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(plain.model))
    loaded = load_model(tmp_path / "resumed").model  # while the model that trained uses its files
    assert loaded is not resumed.model
    for name, table in tables(loaded).items():
        keys = table.keys()
        assert table.export(keys).weights.equal(tables(plain.model)[name].export(keys).weights)


class StopsAt(Callback):
    """Stops each call of `fit` after three steps."""

    def on_step(self, trainer):
        if trainer.step % 3 == 0:
            trainer.stop()


def test_a_second_fit_continues_where_the_first_stopped(tmp_path, spec):
    losses = []
    for tiers in (None, Tiers(host="30KiB", file=str(tmp_path / "rows"))):
        run = build(with_tiers(spec, tiers), tmp_path / "run", [StopsAt()])
        reader, found = run.reader("train"), []
        for _ in range(4):
            found.append(run.trainer.fit(reader).loss)
            found.append(run.trainer.samples)
        losses.append(found)
        shutil.rmtree(tmp_path / "run")
    assert losses[0] == losses[1]


class FillsDisk(Callback):
    """Lets no file grow from a step on, as a full disk does."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit))


@pytest.mark.parametrize("delta_every", in_every_run([2], [None, 2]))
def test_a_full_disk_stops_the_training_and_leaves_whole_tables(tmp_path, spec, delta_every):
    spec = changed(dataclasses.replace(spec, model=MODELS["static"][0]), checkpoint_every=3, delta_every=delta_every)
    plain = build(spec, tmp_path / "plain")
    plain.fit()
    tiered = with_tiers(spec, Tiers(host="30KiB", file=str(tmp_path / "rows")))
    run = build(tiered, tmp_path / "run", [FillsDisk(7)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(StorageError) as caught:
            run.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(caught.value)
    assert "File too large" in message
    assert "\n" not in message
    if delta_every is None:
        assert "earlier checkpoints are complete; continue from step-00000006" in message
    elsewhere = Tiers(host="30KiB", file=str(tmp_path / "other"))  # the error holds the first model
    resumed = build(with_tiers(spec, elsewhere), tmp_path / "run")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(plain.model))


def test_tiers_without_room_name_the_step(tmp_path, spec):
    spec = dataclasses.replace(spec, model=MODELS["static"][0])
    with pytest.raises(RuntimeError, check=at("step 1: tiers host='2KiB': tables 'user', 'item', 'tags'")):
        build(with_tiers(spec, Tiers(host="2KiB", file=str(tmp_path / "rows"))), tmp_path / "run").fit()


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({}, "Tiers"),
        ({"host": "many"}, "Tiers.host"),
        ({"device": 7}, "Tiers.device"),
        ({"file": ""}, "Tiers.file"),
    ],
)
def test_tiers_that_make_no_sense(wrong, where):
    with pytest.raises(ConfigError, check=at(where)):
        StaticTablesSpec(tiers=Tiers(**wrong))
    with pytest.raises(ConfigError, check=at("StaticTablesSpec.tiers")):
        StaticTablesSpec(tiers="host=2GiB")
    with pytest.raises(ConfigError, check=at("tiers")):
        Tiers.parse("disk=3")
    assert Tiers.parse("host=2GiB,file=/a") == Tiers(host="2GiB", file="/a")


def test_a_loaded_run_writes_nothing_outside_of_itself(tmp_path, spec):
    """Finding Q12: the path of the files in a run of somebody else was written to."""
    described = dataclasses.replace(changed(spec, max_steps=1), model=MODELS["static"][0])
    build(with_tiers(described, Tiers(host="30KiB", file=str(tmp_path / "rows"))), tmp_path / "run").fit()
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace(str(tmp_path / "rows"), str(tmp_path / "of_the_user")))
    loaded = load_model(tmp_path / "run")
    assert not (tmp_path / "of_the_user").exists()
    assert loaded.step == 1
    assert any(path.name.startswith(".terarec-loaded") for path in (tmp_path / "run").iterdir())
