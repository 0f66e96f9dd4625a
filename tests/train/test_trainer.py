# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from terarec.batch import Batch
from terarec.data import Reader
from terarec.errors import ConfigError, StorageError, TrainingError
from terarec.metrics import AUC
from terarec.metrics.means import LogLoss
from terarec.models import build_model
from terarec.spec import TrainingSpec
from terarec.train import Callback, Optimizers, Trainer, evaluate
from terarec.train.evaluation import Evaluator
from tests.errors import at
from tests.train.small_run import assert_same, weights


class Recorder(Callback):
    """Notes which hook came at which step."""

    def __init__(self):
        self.seen = []

    def on_start(self, trainer):
        self.seen.append(("start", trainer.step))

    def on_step(self, trainer):
        self.seen.append(("step", trainer.step))

    def on_evaluation(self, trainer, evaluation):
        self.seen.append(("evaluation", trainer.step))

    def on_epoch_end(self, trainer):
        self.seen.append(("epoch", trainer.epoch))

    def on_finish(self, trainer):
        self.seen.append(("finish", trainer.step))

    def on_error(self, trainer):
        self.seen.append(("error", trainer.step))

    def on_end(self, trainer):
        self.seen.append(("end", trainer.step))


def make_trainer(spec, training, callbacks=()):
    reader = Reader(spec.data, batch_size=training.batch_size, shuffle=True, seed=1)
    model = build_model(spec.model, reader.spec, seed=1)
    optimizers = Optimizers.of(model, spec.dense_optimizer, spec.sparse_optimizer)
    return Trainer(model, training, optimizers, callbacks=callbacks), reader


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_falls(spec, precision):
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=1000, precision=precision))
    batch = next(iter(reader))
    losses = [trainer.train_step(batch) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_nan_loss_stops_before_any_update(spec, poison):
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=100))
    batch = next(iter(reader))
    trainer.train_step(batch)
    before = weights(trainer.model)
    bad = Batch(dense=torch.full_like(batch.dense, poison), label=batch.label, sparse=batch.sparse)
    with pytest.raises(TrainingError, check=at("step 2 (epoch 1)")):
        trainer.train_step(bad)
    assert_same(weights(trainer.model), before)


def test_training_resumes_with_such_a_loss_where_the_check_is_off(spec):
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=100))
    unchecked = Trainer(trainer.model, trainer.spec, trainer.optimizers, check_loss=False)
    batch = next(iter(reader))
    bad = Batch(dense=torch.full_like(batch.dense, math.nan), label=batch.label, sparse=batch.sparse)
    assert math.isnan(unchecked.train_step(bad))
    assert (unchecked.step, unchecked.samples) == (1, 100)


def test_a_reader_that_starts_over_starts_an_epoch(spec):
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=500, max_steps=1))
    trainer.fit(reader)
    assert not trainer.is_epoch_end
    trainer.spec = TrainingSpec(batch_size=500, epochs=1)
    trainer.begin_epoch()
    trainer.fit(reader)
    assert (trainer.step, trainer.epoch) == (1 + trainer.steps_per_epoch, 1)


def test_callbacks_hear_everything_in_order(spec):
    recorder = Recorder()
    training = TrainingSpec(batch_size=500, epochs=3, max_steps=5, eval_every=3)
    trainer, reader = make_trainer(spec, training, [recorder])
    report = trainer.fit(reader, Reader(spec.data, "valid", batch_size=500))
    assert recorder.seen == [
        ("start", 0),
        *[("step", 1), ("evaluation", 2), ("step", 2), ("epoch", 1)],
        *[("evaluation", 3), ("step", 3), ("evaluation", 4), ("step", 4), ("epoch", 2)],
        *[("evaluation", 5), ("step", 5), ("finish", 5), ("end", 5)],
    ]
    assert (report.steps, report.samples, trainer.epoch) == (5, 2500, 2)
    assert report.samples_per_second == pytest.approx(2500 / report.seconds)
    assert report.highest_auc >= report.evaluation.auc
    assert report.peak_memory_bytes > 10**7


def test_callbacks_are_released_when_one_fails(spec):
    class Failing(Callback):
        def on_step(self, trainer):
            raise OSError("no more paper")

    recorder = Recorder()
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=500), [recorder, Failing()])
    with pytest.raises(OSError, match="no more paper"):
        trainer.fit(reader)
    assert recorder.seen == [("start", 0), ("step", 1), ("error", 1), ("end", 1)]


def test_the_first_error_is_raised_where_saving_after_it_fails_too(spec, caplog):
    """B4: a full disk must not hide why the training ended."""

    class Failing(Callback):
        def on_step(self, trainer):
            raise OSError("no more paper")

        def on_error(self, trainer):
            raise StorageError("the disk is full")

    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=500), [Failing()])
    with pytest.raises(OSError, match="no more paper"):
        trainer.fit(reader)
    assert "the disk is full" in caplog.text


def test_every_callback_is_released_though_another_one_fails_at_it(spec):
    """B4: the end of one callback must not depend on those before it."""

    class Failing(Callback):
        def on_end(self, trainer):
            raise OSError("no more paper")

    recorder = Recorder()
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=500, max_steps=1), [Failing(), recorder])
    with pytest.raises(OSError, match="no more paper"):
        trainer.fit(reader)
    assert recorder.seen == [("start", 0), ("step", 1), ("finish", 1), ("end", 1)]


def test_without_validation_there_is_no_evaluation(spec):
    trainer, reader = make_trainer(spec, TrainingSpec(batch_size=500, eval_every=1))
    report = trainer.fit(reader)
    assert report.evaluation is None
    assert report.highest_auc is None


def test_nothing_to_train_on(spec):
    trainer, _ = make_trainer(spec, TrainingSpec(batch_size=2000))
    with pytest.raises(ConfigError, check=at("fit")):
        trainer.fit(Reader(spec.data, batch_size=2000, drop_last=True))


def test_evaluation_equals_the_metrics_over_all_samples_at_once(spec):
    trainer, _ = make_trainer(spec, TrainingSpec())
    found = trainer.evaluate(Reader(spec.data, "valid", batch_size=7))
    whole = next(iter(Reader(spec.data, "valid", batch_size=300)))
    trainer.model.eval()
    logits = trainer.model(whole).detach()
    assert found.rows == 300
    assert found.auc == pytest.approx(AUC().update(logits, whole.label).compute(), abs=1e-4)
    assert found.logloss == pytest.approx(LogLoss().update(logits, whole.label).compute(), rel=1e-6)


def test_evaluation_gives_the_mode_back(spec):
    trainer, _ = make_trainer(spec, TrainingSpec())

    def stop(_samples):
        assert not trainer.model.training
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Evaluator().evaluate(trainer.model, Reader(spec.data, "valid", batch_size=50), progress=stop)
    assert trainer.model.training
    trainer.model.eval()
    evaluate(trainer.model, Reader(spec.data, "valid", batch_size=50))
    assert not trainer.model.training
