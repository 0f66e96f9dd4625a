# SPDX-License-Identifier: Apache-2.0
"""Options of `TrainingSpec` for more than plain steps, each compared with its definition."""

import dataclasses
import itertools
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from terarec.batch import Batch, Jagged, slice_samples
from terarec.data import Reader
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.models.artifact import load_model
from terarec.models.contract import training_loss
from terarec.nn.objectives import build_objective
from terarec.spec import (
    AdamSpec,
    CosineSchedule,
    DeepFMSpec,
    ExponentialSchedule,
    MFBPRSpec,
    MultiClassSpec,
    NegativesSpec,
    PairwiseSpec,
    PlateauSchedule,
    PythonModelSpec,
    RegressionSpec,
    SampledSoftmaxSpec,
    SASRecSpec,
    SGDSpec,
    TorchOptimizerSpec,
    TrainingSpec,
    WarmupDecaySchedule,
    YouTubeDNNSpec,
)
from terarec.train import Optimizers, Trainer, build, predict
from terarec.train.optimizers import Schedule
from tests.errors import at
from tests.models.every import MODELS, dataset, random_batch
from tests.params import in_every_run
from tests.train.small_run import assert_same, changed, weights

MODEL = DeepFMSpec(width=4, hidden=(8,))


def trainer_of(spec, training, *, lr=0.5):
    reader = Reader(spec.data, batch_size=training.batch_size)
    model = build_model(MODEL, reader.spec, seed=1)
    return Trainer(model, training, Optimizers.of(model, SGDSpec(lr=lr), SGDSpec(lr=lr))), reader


def assert_close(found, expected, tolerance=1e-6):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=tolerance, msg=name)


def test_accumulated_batches_are_one_large_batch(spec):
    whole, reader = trainer_of(spec, TrainingSpec(batch_size=100))
    parts, _ = trainer_of(spec, TrainingSpec(batch_size=100))
    batch = next(iter(reader))
    loss = whole.train_step(batch)
    cuts = [(0, 10), (10, 64), (64, 100)]  # of different sizes: each sample counts the same
    found = parts.train_step(*(slice_samples(batch, start, stop) for start, stop in cuts))
    assert float(found) == pytest.approx(float(loss), rel=1e-6)
    assert_close(weights(parts.model), weights(whole.model))


HISTORIES = dataset(dense=0, categorical=("a", "b", "past"), rows=9)


@pytest.mark.parametrize(
    "model",
    [
        YouTubeDNNSpec(item="a", history="past", width=4, hidden=(5,), loss="softmax"),
        SASRecSpec(item="a", history="past", width=4, loss="softmax", dropout=0.0),
        MFBPRSpec(user="b", item="a", width=4, loss="bce", negatives=NegativesSpec(draw="column", column="past")),
    ],
    ids=["samples", "positions", "samples with an item"],
)
def test_accumulated_batches_have_one_mean_over_what_counts(model):
    """By the gradient of the whole batch, of plain autograd; the negatives are one item, the only one in a list."""
    made, parts = (build_model(model, HISTORIES, seed=1) for _ in range(2))
    size = 10
    items, users = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 8, 2]), torch.arange(1, 9).repeat(2)[:size]
    lengths = torch.tensor([1, 1, 4, 2, 1, 1, 3, 1, 1, 1])
    past = torch.repeat_interleave((items + 3) % 8 + 1, lengths)
    batch = Batch(
        dense=torch.empty(size, 0),
        label=torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 1, 0, 0])[:, None],
        sparse=Jagged(
            names=("a", "b", "past"),
            keys=torch.cat([items, users, past]),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), torch.ones(2 * size).long(), lengths]).cumsum(0),
        ),
        weight=torch.linspace(0.5, 2.0, size),
    )
    loss = made.training_loss(made(batch), batch)
    loss.backward()
    optimizers = Optimizers.of(made, SGDSpec(lr=0.5), SGDSpec(lr=0.5))
    for optimizer in optimizers:
        optimizer.step()
    trainer = Trainer(parts, TrainingSpec(), Optimizers.of(parts, SGDSpec(lr=0.5), SGDSpec(lr=0.5)))
    # The first one has four samples that count, and the last one has none.
    found = trainer.train_step(*(slice_samples(batch, *cut) for cut in ((0, 4), (4, 8), (8, 10))))
    assert float(found) == pytest.approx(loss.item(), rel=1e-5)
    assert_close(weights(parts), weights(made))


@pytest.mark.parametrize("name", ["deepfm", "dien"])
def test_accumulated_batches_count_by_their_samples_where_the_loss_is_no_one_mean(name):
    """Of labels with pairs of their own, and with DIEN's term over the samples: the mean of the batches' losses."""
    columns = dataset(labels=1 if name == "dien" else 2)
    batches = [random_batch(columns, seed=seed) for seed in (1, 2)]
    batches[0] = dataclasses.replace(batches[0], label=batches[0].label * 0 if name == "dien" else batches[0].label)
    whole, parts = (build_model(MODELS[name], columns, seed=1) for _ in range(2))
    objective, rate = build_objective(PairwiseSpec()), SGDSpec(lr=0.5)
    optimizers = Optimizers.of(whole, rate, rate)
    torch.manual_seed(3)
    loss = torch.stack([training_loss(whole, whole(batch), batch, objective) for batch in batches]).mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    trainer = Trainer(parts, TrainingSpec(), Optimizers.of(parts, rate, rate), objective=objective)
    torch.manual_seed(3)
    assert float(trainer.train_step(*batches)) == pytest.approx(loss.item(), rel=1e-5)
    assert_close(weights(parts), weights(whole))


def test_steps_and_epochs_of_accumulated_batches(spec):
    trainer, reader = trainer_of(spec, TrainingSpec(batch_size=100, accumulate=4, epochs=2), lr=0.01)
    report = trainer.fit(reader)
    assert (report.steps, report.samples, trainer.epoch, trainer.total_steps) == (6, 2000, 2, 6)


def test_the_norm_of_all_gradients_together_is_bounded(spec):
    bound = 1e-3
    trainer, reader = trainer_of(spec, TrainingSpec(batch_size=100, clip_norm=bound), lr=1.0)
    before = weights(trainer.model)
    trainer.train_step(next(iter(reader)))
    moved = sum((now - before[name]).double().square().sum() for name, now in weights(trainer.model).items())
    assert float(moved.sqrt()) == pytest.approx(bound, rel=1e-3)  # SGD with the rate 1 moves by the gradient


def test_a_bound_that_no_gradient_reaches_changes_nothing(spec):
    bounded, reader = trainer_of(spec, TrainingSpec(batch_size=100, clip_norm=1e9))
    free, _ = trainer_of(spec, TrainingSpec(batch_size=100))
    batch = next(iter(reader))
    bounded.train_step(batch)
    free.train_step(batch)
    assert_close(weights(bounded.model), weights(free.model))


def test_a_sample_of_weight_two_is_two_samples(spec):
    weighted, reader = trainer_of(spec, TrainingSpec(batch_size=100))
    repeated, _ = trainer_of(spec, TrainingSpec(batch_size=100))
    batch = slice_samples(next(iter(reader)), 0, 2)
    doubled = dataclasses.replace(batch, weight=torch.tensor([2.0, 0.0]))
    first = slice_samples(batch, 0, 1)
    loss = weighted.train_step(doubled)
    assert float(loss) == pytest.approx(float(repeated.train_step(first, first)), rel=1e-6)
    assert_close(weights(weighted.model), weights(repeated.model))


@pytest.mark.parametrize("patterns", [("item",), ("user*",), ("deep.*",)])
def test_frozen_parts_stay_unchanged(spec, patterns):
    free, reader = trainer_of(spec, TrainingSpec(batch_size=100))
    batch = next(iter(reader))
    before = weights(free.model)
    free.train_step(batch)
    all_moved = {name for name, now in weights(free.model).items() if not torch.equal(now, before[name])}
    frozen, _ = trainer_of(spec, TrainingSpec(batch_size=100, freeze=patterns))
    frozen.train_step(batch)
    moved = {name for name, now in weights(frozen.model).items() if not torch.equal(now, before[name])}
    stem = patterns[0].strip("*").strip(".")
    assert moved < all_moved
    assert all(stem in name for name in all_moved - moved)


def test_a_pattern_that_matches_nothing(spec):
    with pytest.raises(ConfigError, check=at("freeze")):
        trainer_of(spec, TrainingSpec(freeze=("itemm",)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_scaled_losses_train(spec, precision, scale):
    training = TrainingSpec(batch_size=100, precision=precision, loss_scale=scale)
    scaled, reader = trainer_of(spec, training, lr=0.05)
    plain, _ = trainer_of(spec, TrainingSpec(batch_size=100), lr=0.05)
    batch = next(iter(reader))
    found = [float(scaled.train_step(batch)) for _ in range(20)]
    expected = [float(plain.train_step(batch)) for _ in range(20)]
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert found[-1] < found[0]


SCHEDULES = {
    "cosine": CosineSchedule(t_max=16, warmup=3),
    "exponential": ExponentialSchedule(gamma=0.5),
    "hugectr": WarmupDecaySchedule(warmup_steps=4, decay_start=8, decay_steps=10),
    "plateau": PlateauSchedule(factor=0.5, patience=0, threshold=0.5),
}


OPTIONS = {"plain": {}, "accumulated": {"accumulate": 2, "clip_norm": 0.1}, "scaled": {"loss_scale": "dynamic"}}


@pytest.mark.parametrize(
    ("schedule", "more"),
    in_every_run(
        [("exponential", "scaled"), ("plateau", "plain")],
        itertools.product(SCHEDULES, OPTIONS),
    ),
)
def test_a_resumed_run_resumes_with_its_rates(tmp_path, spec, schedule, more):
    schedule, more = SCHEDULES[schedule], OPTIONS[more]
    spec = changed(dataclasses.replace(spec, model=MODEL), epochs=3, schedule=schedule, **more)
    straight = build(spec, tmp_path / "straight")
    straight.fit()
    assert straight.trainer.optimizers.lr != spec.dense_optimizer.lr
    build(changed(spec, max_steps=5), tmp_path / "resumed").fit()
    resumed = build(spec, tmp_path / "resumed")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))
    rates = [group["lr"] for optimizer in resumed.trainer.optimizers for group in optimizer.param_groups]
    assert rates == [group["lr"] for optimizer in straight.trainer.optimizers for group in optimizer.param_groups]


def test_a_schedule_moves_the_rates_of_layers_and_rows_alike(spec):
    trainer, reader = trainer_of(spec, TrainingSpec(batch_size=500, epochs=3))
    trainer.optimizers.follow(ExponentialSchedule(gamma=0.1), monitor="auc")
    trainer.fit(reader)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    np.testing.assert_allclose(rates, 0.5e-3)


def test_any_optimizer_and_scheduler_of_torch(spec):
    reader = Reader(spec.data, batch_size=200)
    model = build_model(MODEL, reader.spec, seed=1)
    optimizers = Optimizers.of(model, TorchOptimizerSpec(name="NAdam", lr=0.01), AdamSpec(lr=0.01))
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers.dense, max_lr=0.01, total_steps=40)
    optimizers.schedules.append(Schedule(scheduler=cycle))
    trainer = Trainer(model, TrainingSpec(batch_size=200, epochs=4), optimizers)
    assert type(optimizers.dense) is torch.optim.NAdam
    assert trainer.fit(reader).loss < 0.7
    assert cycle.last_epoch == trainer.step == 20
    assert optimizers.lr == cycle.get_last_lr()[0] != optimizers.rows.lr


@pytest.mark.parametrize(
    ("metric", "eval_split", "where"),
    [
        ("rmse", "valid", "training.schedule.metric"),
        ("auk", "valid", "training.schedule.metric"),
        ("auc", None, "training.schedule"),
    ],
)
def test_a_plateau_waits_for_a_metric_that_is_computed(tmp_path, spec, metric, eval_split, where):
    spec = changed(spec, schedule=PlateauSchedule(metric=metric), metrics=("auc",), eval_split=eval_split)
    with pytest.raises(ConfigError, check=at(where)):
        build(spec, tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("metric", "direction"), [("logloss", -1), ("accuracy", 1), ("ne", -1)])
def test_the_best_checkpoint_by_any_metric(tmp_path, spec, metric, direction):
    run = build(changed(spec, metrics=("auc", metric), monitor=metric, epochs=3), tmp_path / "run")
    run.fit()
    points = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    values = {point["step"]: direction * point[metric] for point in points if "split" in point}
    assert run.trainer.early_stopping.best_step == max(values, key=lambda step: (values[step], -step))
    assert load_model(tmp_path / "run", "best").step == run.trainer.early_stopping.best_step


def test_a_metric_that_is_not_computed_cannot_be_monitored(spec):
    with pytest.raises(ConfigError, check=at("training.monitor")):
        trainer_of(spec, TrainingSpec(monitor="rmse"))


@pytest.mark.parametrize(
    ("objective", "metrics"),
    [
        (MultiClassSpec(classes=2), ["accuracy", "logloss"]),
        (RegressionSpec(loss="huber"), ["rmse", "mae"]),
        (PairwiseSpec(group="user"), ["auc"]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_other_objectives_train_evaluate_and_score(tmp_path, spec, objective, metrics):
    run = build(dataclasses.replace(spec, model=MODEL, objective=objective), tmp_path / "run")
    report = run.fit()
    assert list(report.evaluation.results.overall.values) == metrics
    assert all(np.isfinite(value) for value in report.evaluation.results.overall.values.values())
    predict(tmp_path / "run", spec.data, "valid", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")
    names = [name for name in scores.column_names if name.startswith("score")]
    assert names == (["score_0", "score_1"] if objective.kind == "multi_class" else ["score"])
    batch = next(iter(run.reader("valid")))
    assert isinstance(batch, Batch)
    expected = run.objective.scores(load_model(tmp_path / "run").model(batch).detach())
    found = np.stack([scores[name].to_numpy() for name in names], axis=1)[: batch.batch_size]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_a_model_samples_the_items_of_its_softmax(tmp_path, spec):
    ranker = PythonModelSpec(factory="tests.models.factories:SampledRanker")
    spec = changed(dataclasses.replace(spec, model=ranker, objective=SampledSoftmaxSpec()), epochs=2)
    run = build(spec, tmp_path / "run", allow_import=("tests",))
    report = run.fit()
    assert run.trainer.output.shape == (1000 % 128, 3)
    assert np.isfinite([report.loss, report.evaluation.auc]).all()
    predict(tmp_path / "run", spec.data, "valid", tmp_path / "scores.parquet", allow_import=("tests",))
    assert pq.read_table(tmp_path / "scores.parquet").column_names == ["score", "click"]
