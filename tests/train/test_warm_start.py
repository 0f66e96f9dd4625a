# SPDX-License-Identifier: Apache-2.0
"""D3: a run that starts from the weights of another one, on the data of another day."""

import dataclasses
from pathlib import Path

import pytest
import torch

from terarec.config import load_run
from terarec.data import Reader
from terarec.errors import ConfigError, DataNotFoundError
from terarec.models.artifact import find_checkpoint
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DLRMSpec,
    RowOptions,
    RunSpec,
    SGDSpec,
    StaticTablesSpec,
    TorchOptimizerSpec,
)
from terarec.train import Callback, Trainer, build
from terarec.train.checkpointing import start_from
from tests.errors import at
from tests.params import in_every_run
from tests.train.planted import make_planted
from tests.train.small_run import assert_same, changed, weights
from tests.train.test_rejected_runs import shops_run, write_shops
from tests.train.test_resume import CASES, WIDE_DEEP


@pytest.fixture(scope="module")
def next_day(tmp_path_factory):
    """Return a data set of the same columns and of another length."""
    directory = tmp_path_factory.mktemp("next_day")
    make_planted(directory, train=700, valid=100, rows_per_group=100)
    return directory


def another_day(spec: RunSpec, next_day) -> RunSpec:
    """Return the same model on `next_day` with other learning rates, other epochs and another batch size."""
    dense = dataclasses.replace(spec.dense_optimizer, lr=spec.dense_optimizer.lr / 2)
    sparse = dataclasses.replace(spec.sparse_optimizer, lr=spec.sparse_optimizer.lr * 2)
    spec = dataclasses.replace(spec, data=str(next_day), dense_optimizer=dense, sparse_optimizer=sparse)
    return changed(spec, epochs=1, batch_size=100)


@pytest.mark.parametrize("name", in_every_run(list(CASES)[::3], CASES))
def test_a_warm_start_is_the_same_training_on_other_data(tmp_path, spec, next_day, name):
    model, dense, sparse = CASES[name]
    spec = changed(dataclasses.replace(spec, model=model, dense_optimizer=dense, sparse_optimizer=sparse), epochs=1)
    first = build(spec, tmp_path / "first")
    first.fit()
    second_spec = another_day(spec, next_day)
    second = build(second_spec, tmp_path / "second", init_from=tmp_path / "first")
    report = second.fit()
    assert (report.steps, report.samples, report.highest_auc) == (7, 700, report.evaluation.auc)

    # The oracle: the objects of the first run, which have never been saved, trained further by hand.
    held = first.trainer
    held.optimizers.rows.lr = second_spec.sparse_optimizer.lr
    for group in held.optimizers.dense.param_groups:
        group["lr"] = second_spec.dense_optimizer.lr
    by_hand = Trainer(first.model, second_spec.training, held.optimizers)
    torch.manual_seed(spec.training.seed)
    by_hand.fit(Reader(next_day, batch_size=100, shuffle=True, seed=spec.training.seed))
    assert_same(weights(second.model), weights(first.model))


def test_it_resumes_to_the_bit(tmp_path, spec, next_day):
    build(changed(spec, epochs=1), tmp_path / "first").fit()
    spec = another_day(spec, next_day)
    straight = build(spec, tmp_path / "straight", init_from=tmp_path / "first")
    straight.fit()

    class Press(Callback):
        def on_step(self, trainer):
            raise KeyboardInterrupt  # before any checkpoint: the weights of the first run are needed again

    with pytest.raises(KeyboardInterrupt):
        build(spec, tmp_path / "pressed", callbacks=[Press()], init_from=tmp_path / "first").fit()
    described = load_run(tmp_path / "pressed/run.json")
    assert described.init_from == str(tmp_path / "first")
    build(changed(described, max_steps=3), tmp_path / "pressed").fit(resume=True)
    resumed = build(described, tmp_path / "pressed")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))


def test_a_checkpoint_or_the_best_one_can_be_named(tmp_path, spec, next_day):
    run = build(changed(spec, checkpoint_every=3, keep_checkpoints=9, patience=9), tmp_path / "first")
    report = run.fit()
    second = build(another_day(spec, next_day), tmp_path / "a", init_from=run.directory.checkpoints / "step-00000003")
    second.fit()
    assert second.initial.name == "step-00000003"
    third = build(another_day(spec, next_day), tmp_path / "b", init_from=tmp_path / "first")
    third.fit()
    assert third.initial.name == f"step-{report.best_step:08d}"
    assert third.initial == find_checkpoint(tmp_path / "first", run.spec)


@pytest.mark.parametrize(
    ("dense", "sparse", "options", "left_out"),
    [
        (AdamSpec(), AdaGradSpec(), {"reset_optimizer": True}, ["dense_optimizer", "sparse_optimizer"]),
        (SGDSpec(), AdaGradSpec(), {}, ["dense_optimizer"]),
        (AdamSpec(), SGDSpec(), {}, ["sparse_optimizer"]),
        (AdamSpec(), AdaGradSpec(rows=RowOptions(mode="lazy_global")), {}, ["sparse_optimizer"]),
        (AdamSpec(lr=0.5), AdaGradSpec(rows=RowOptions(clip_norm=1.0)), {}, []),
    ],
)
def test_states_that_do_not_fit_are_left_out_with_one_line(
    tmp_path, spec, next_day, caplog, dense, sparse, options, left_out
):
    first = build(changed(spec, epochs=1), tmp_path / "first")
    first.fit()
    changed_spec = dataclasses.replace(another_day(spec, next_day), dense_optimizer=dense, sparse_optimizer=sparse)
    second = build(changed_spec, tmp_path / "second", init_from=tmp_path / "first", **options)
    start_from(second.trainer, second.spec, second.dataset)
    found, expected = weights(second.model), weights(first.model)
    states = ("/sum",)
    for name, tensor in expected.items():
        if not name.endswith(states) or "sparse_optimizer" not in left_out:
            assert torch.equal(found[name], tensor)
    assert bool(second.trainer.optimizers.dense.state) == ("dense_optimizer" not in left_out)
    assert second.trainer.optimizers.rows.num_steps == (0 if "sparse_optimizer" in left_out else 8)
    assert second.trainer.optimizers.rows.lr == sparse.lr
    assert {group["lr"] for group in second.trainer.optimizers.dense.param_groups} == {dense.lr}
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ([f"init_from: the state of {' and '.join(left_out)} was not loaded"] if left_out else [])


@pytest.mark.parametrize("before", [True, False])
def test_the_bias_correction_of_layers_goes_on(tmp_path, spec, next_day, before):
    spec = changed(dataclasses.replace(spec, dense_optimizer=AdamSpec(lr=0.01, eps_hat=before)), max_steps=3)
    build(spec, tmp_path / "first").fit()
    spec = dataclasses.replace(spec, dense_optimizer=AdamSpec(lr=0.01, eps_hat=True))
    second = build(another_day(spec, next_day), tmp_path / "second", init_from=tmp_path / "first")
    start_from(second.trainer, second.spec, second.dataset)
    (group,) = second.trainer.optimizers.dense.param_groups
    assert (group["num_steps"], group["lr"]) == (3, 0.005)
    second.fit()
    assert second.trainer.optimizers.dense.param_groups[0]["num_steps"] == 6


@pytest.mark.parametrize(
    ("name", "before", "now", "is_left_out"),
    [
        ("Adam", {}, {"amsgrad": True}, True),
        ("Adam", {"amsgrad": True}, {"weight_decay": 0.1}, False),
        ("RMSprop", {"momentum": 0.9}, {"centered": True}, True),
        ("SGD", {}, {"momentum": 0.9}, False),
    ],
)
def test_options_that_need_further_states(tmp_path, spec, next_day, caplog, name, before, now, is_left_out):
    old, new = (TorchOptimizerSpec(name=name, options=options) for options in (before, now))
    build(changed(dataclasses.replace(spec, dense_optimizer=old), max_steps=1), tmp_path / "first").fit()
    spec = dataclasses.replace(spec, data=str(next_day), dense_optimizer=new)
    spec = changed(spec, max_steps=1, eval_split=None)
    second = build(spec, tmp_path / "second", init_from=tmp_path / "first")
    start_from(second.trainer, second.spec, second.dataset)
    assert bool(second.trainer.optimizers.dense.state) == (not is_left_out and name != "SGD")
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["init_from: the state of dense_optimizer was not loaded"] * is_left_out
    second.fit()
    third = build(spec, tmp_path / "third", init_from=tmp_path / "first", extend_chain=True)
    if is_left_out:
        with pytest.raises(ConfigError, check=at("dense_optimizer")):
            third.fit()
    else:
        third.fit()


@pytest.mark.parametrize(
    ("model", "reported"),
    [
        (WIDE_DEEP, 'model.kind is "dlrm" in {first}/run.json, got "wide_deep"'),
        (
            DLRMSpec(width=8, bottom=(8, 8), top=(8,)),
            "{first}/checkpoints/step-00000001: weights 'bottom.layers.1.weight': got shape [4, 8], expected [8, 8]; "
            "was the model described otherwise?",
        ),
        (
            DLRMSpec(width=4, bottom=(8, 4), top=(9,)),
            "{first}/checkpoints/step-00000001: weights 'top.layers.0.weight': got shape [8, 16], expected [9, 16]",
        ),
        (
            DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=StaticTablesSpec(dtype="bfloat16")),
            'model.tables.dtype is "float32" in {first}/run.json, got "bfloat16"',
        ),
    ],
)
def test_another_model_is_rejected(tmp_path, spec, next_day, model, reported):
    build(changed(spec, max_steps=1), tmp_path / "first").fit()
    other = dataclasses.replace(another_day(spec, next_day), model=model)
    with pytest.raises(ConfigError, check=at("init_from", reported.format(first=tmp_path / "first"))):
        build(other, tmp_path / "second", init_from=tmp_path / "first").fit()
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"rows": 7}, "data set 'shops', column 'shop'"),
        ({"vocabulary": b"c b a"}, "data set 'shops'"),
    ],
)
def test_ids_of_another_workflow_are_rejected(tmp_path, other, reported):
    shops_run(write_shops(tmp_path / "data"), tmp_path / "first").fit()
    second = shops_run(write_shops(tmp_path / "other", **other), tmp_path / "second")
    with pytest.raises(ConfigError, check=at(reported)):
        build(second.spec, tmp_path / "second", init_from=tmp_path / "first").fit()
    assert not (tmp_path / "second").exists()


def test_a_directory_without_a_run_is_rejected(tmp_path, spec):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/none")):
        build(spec, tmp_path / "RUN", init_from=tmp_path / "none").fit()
    build(changed(spec, max_steps=1), tmp_path / "first").fit()
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/first/checkpoints")):
        build(spec, tmp_path / "RUN", init_from=tmp_path / "first/checkpoints").fit()
    (tmp_path / "first/checkpoints").rename(tmp_path / "alone")
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/alone/step-00000001")):
        build(spec, tmp_path / "RUN", init_from=tmp_path / "alone/step-00000001").fit()
    with pytest.raises(ConfigError, check=at("RunSpec.reset_optimizer")):
        dataclasses.replace(spec, reset_optimizer=True)
    assert not (tmp_path / "RUN").exists()


def test_resume_rejects_other_data_and_names_init_from(tmp_path, spec, next_day):
    build(changed(spec, max_steps=1), tmp_path / "first").fit()
    with pytest.raises(ConfigError, check=at("reader state")):
        build(dataclasses.replace(spec, data=str(next_day)), tmp_path / "first").fit(resume=True)
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/first/run.json")):
        build(spec, tmp_path / "first", init_from=tmp_path / "other").fit(resume=True)


def test_the_description_names_its_data_from_anywhere(tmp_path, spec, monkeypatch):
    """A relative path, such as that of `terarec reproduce`, counted from the run's folder when it was read again."""
    monkeypatch.chdir(Path(spec.data).parent)
    relative = dataclasses.replace(changed(spec, max_steps=1), data=Path(spec.data).name)
    build(relative, tmp_path / "run").fit()
    monkeypatch.chdir(tmp_path)
    described = load_run(tmp_path / "run" / "run.json")
    assert described.data == str(Path(spec.data).absolute())
    build(changed(described, max_steps=2), tmp_path / "run").fit(resume=True)
