# SPDX-License-Identifier: Apache-2.0
"""D5: early stopping, the best checkpoint, Ctrl-C and SIGTERM; a stop and a resume change nothing."""

import contextlib
import json
import math
import os
import signal
import threading

import pytest

from terarec.checkpoint import complete_checkpoints, find, latest, load, mark_best
from terarec.data import Reader
from terarec.errors import ConfigError, FormatError, RunInterruptedError
from terarec.models import build_model
from terarec.spec import PlateauSchedule, TrainingSpec
from terarec.train import Callback, Optimizers, Trainer, build
from terarec.train.checkpointing import Checkpointing
from terarec.train.metrics_log import read_log
from terarec.train.stopping import EarlyStopping, Interrupts
from tests.errors import at
from tests.params import in_every_run
from tests.train.small_run import assert_same, changed, weights


def fed(values, **training):
    """Return an `EarlyStopping` after evaluations of these values at steps 1, 2, ..., and the step of its end."""
    stopping = EarlyStopping(TrainingSpec(**training), training.get("monitor", "auc"))
    for step, value in enumerate(values, start=1):
        stopping.update(step, value, counts=True)
        if stopping.is_over:
            return stopping, step
    return stopping, None


@pytest.mark.parametrize(
    ("values", "training", "best_step", "over"),
    [
        ([0.6, 0.7, 0.69, 0.7], {"patience": 2}, 2, 4),
        ([0.6, 0.7, 0.69, 0.71, 0.70, 0.69], {"patience": 2}, 4, 6),
        ([0.6, 0.5, 0.4], {}, 1, None),
        ([0.60, 0.61, 0.62, 0.63], {"patience": 3, "min_delta": 0.025}, 4, None),
        ([0.60, 0.61, 0.62, 0.621], {"patience": 2, "min_delta": 0.025}, 3, 3),
        ([0.5, 0.4, 0.45, 0.41], {"patience": 2, "monitor": "logloss"}, 2, 4),
        ([math.nan, math.nan], {"patience": 2}, None, None),
        ([0.6, math.nan, 0.7], {"patience": 2}, 3, None),
    ],
)
def test_patience_counts_evaluations_without_an_improvement(values, training, best_step, over):
    stopping, found = fed(values, **training)
    assert (stopping.best_step, found) == (best_step, over)


def test_its_state_survives():
    stopping, _ = fed([0.6, 0.7, 0.65], patience=2)
    other = EarlyStopping(TrainingSpec(patience=2), "auc")
    other.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    other.update(4, 0.7, counts=True)
    assert (other.best_step, other.best_value, other.is_over) == (2, 0.7, True)


def test_another_metric_is_compared_anew(tmp_path, spec, caplog):
    """A plateau and the best step; both metrics are better at other ends."""
    first = changed(spec, epochs=1, metrics=("auc",), schedule=PlateauSchedule(factor=0.5))
    build(first, tmp_path).fit()
    run = build(changed(first, epochs=3, metrics=("logloss", "auc")), tmp_path)
    report = run.fit(resume=True)
    points = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    losses = {point["step"]: point["logloss"] for point in points if "logloss" in point}
    assert list(losses) == [16, 24]
    assert report.best_step == min(losses, key=losses.get)
    assert report.best_metrics["logloss"] == min(losses.values())
    for schedule in run.trainer.optimizers.schedules:
        assert (schedule.scheduler.mode, schedule.scheduler.best) == ("min", min(losses.values()))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "evaluations were compared by auc on valid and now are by logloss on valid"
    ]


def test_another_split_is_compared_anew(tmp_path, spec):
    first = changed(spec, epochs=1, patience=3, eval_split="train", schedule=PlateauSchedule(factor=0.5))
    build(first, tmp_path).fit()
    build(changed(first, eval_split="valid"), tmp_path).fit(resume=True)  # the last step alone, by the new split
    run = build(changed(first, epochs=3, eval_split="valid"), tmp_path)
    report = run.fit(resume=True)
    evaluations = read_log(run.directory.metrics).evaluations
    assert [(point["step"], point["split"]) for point in evaluations] == [
        *((8, "train"), (8, "valid")),
        *((16, "valid"), (24, "valid")),
    ]
    aucs = {point["step"]: point["auc"] for point in evaluations[2:]}
    assert (report.best_step, report.highest_auc) == (max(aucs, key=aucs.get), max(aucs.values()))
    for schedule in run.trainer.optimizers.schedules:
        assert schedule.scheduler.best == max(aucs.values())


def test_another_split_is_compared_anew_after_a_training_without_evaluations(tmp_path, spec, caplog):
    first = changed(spec, epochs=1, eval_split="train")
    build(first, tmp_path).fit()
    kept = build(changed(first, epochs=2, eval_split=None), tmp_path).fit(resume=True)
    assert kept.best_step == 8
    report = build(changed(first, epochs=3, eval_split="valid"), tmp_path).fit(resume=True)
    assert (report.best_step, report.highest_auc) == (24, report.evaluation.auc)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "evaluations were compared by auc on train and now are by auc on valid"
    ]


def test_a_checkpoint_of_an_earlier_build_names_metrics_alone(tmp_path, spec):
    spec = changed(spec, epochs=1, schedule=PlateauSchedule(factor=0.5))
    run = build(changed(spec, metrics=("logloss", "auc")), tmp_path / "then")
    best = run.fit().best_metrics["logloss"]
    state = run.trainer.state_dict()
    del state["early_stopping"]["measure"], state["schedule_measures"], state["auc_measure"]
    state["early_stopping"]["monitor"] = "logloss"
    state["schedule_metrics"] = ["logloss"] * len(state["schedules"])
    for metrics, expected in ((("logloss", "auc"), (8, best)), (("auc",), (None, -math.inf))):
        trainer = build(changed(spec, metrics=metrics), tmp_path / "now").trainer
        trainer.load_state_dict(state)
        for schedule in trainer.optimizers.schedules:
            assert (trainer.early_stopping.best_step, schedule.scheduler.best) == expected


@pytest.mark.parametrize(
    ("monitor", "then", "now", "is_kept"),
    [
        ("gauc", {"group": "user"}, {"group": "item"}, False),
        ("auc", {"group": "user"}, {"group": "item"}, True),
        ("auc", {}, {"eval_split": "test"}, False),
        ("auc", {}, {"eval_split": None}, True),
    ],
)
def test_best_values_of_the_same_measure_are_kept(monitor, then, now, is_kept):
    stopping, _ = fed([0.6], monitor=monitor, **then)
    other = EarlyStopping(TrainingSpec(**now), monitor)
    other.load_state_dict(stopping.state_dict())
    assert (other.best_step is not None) == is_kept


class LongReader(Reader):
    """A reader with fewer batches than its length, as where damaged records are left out."""

    def __len__(self):
        return super().__len__() + 1


def test_the_best_step_of_an_epoch_that_ends_early_is_saved(tmp_path, spec):
    saved = []

    class Found(Callback):
        def on_epoch_end(self, trainer):
            saved.append((trainer.step, trainer.early_stopping.best_step, latest(tmp_path).name))

    saving = Checkpointing(tmp_path, every=100, keep=2, keep_best=True)
    train, valid = (
        cls(spec.data, split=split, batch_size=500) for cls, split in ((LongReader, "train"), (Reader, "valid"))
    )
    model = build_model(spec.model, train.spec, seed=1)
    optimizers = Optimizers.of(model, spec.dense_optimizer, spec.sparse_optimizer)
    Trainer(model, TrainingSpec(epochs=1), optimizers, callbacks=[saving, Found()]).fit(train, valid)
    assert saved == [(2, 2, "step-00000002")]


@pytest.fixture
def stopping_spec(spec):
    """No improvement of 0.5 can come after the first evaluation; they come after steps 4, 8, 12, ..."""
    return changed(spec, epochs=9, eval_every=4, patience=3, min_delta=0.5, keep_checkpoints=1)


def steps(run):
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(run.directory.checkpoints)]


def test_training_stops_early_and_keeps_the_best(tmp_path, stopping_spec):
    run = build(stopping_spec, tmp_path)
    report = run.fit()
    points = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    aucs = {point["step"]: point["auc"] for point in points if "auc" in point}
    assert list(aucs) == [4, 8, 12, 16]
    assert (report.steps, report.stopped_early) == (16, True)
    assert report.best_step == max(aucs, key=aucs.get)
    assert steps(run) == sorted({report.best_step, 16})
    assert load(find(run.directory.checkpoints, "best")).step == report.best_step


@pytest.mark.parametrize("stop", in_every_run([5, 9], [3, 5, 8, 9, 13]))
def test_a_resumed_run_stops_where_one_without_a_stop_does(tmp_path, stopping_spec, stop):
    class Press(Callback):
        def on_step(self, trainer):
            if trainer.step == stop:
                signal.raise_signal(signal.SIGINT)

    straight = build(stopping_spec, tmp_path / "straight")
    expected = straight.fit()
    with pytest.raises(RunInterruptedError):
        build(stopping_spec, tmp_path / "RUN", callbacks=[Press()]).fit()
    resumed = build(stopping_spec, tmp_path / "RUN")
    report = resumed.fit(resume=True)
    assert (report.steps, report.best_step, report.stopped_early) == (16, expected.best_step, True)
    assert steps(resumed) == steps(straight)
    assert resumed.trainer.state_dict() == straight.trainer.state_dict()
    assert_same(weights(resumed.model), weights(straight.model))


def test_an_evaluation_that_a_signal_stopped_is_made_up_for(tmp_path, stopping_spec, monkeypatch):
    """Its epoch is saved, so resuming has to score it first: patience counts it, and it may be the best one."""
    straight = build(stopping_spec, tmp_path / "straight")
    straight.fit()
    run = build(stopping_spec, tmp_path / "RUN")
    reader = run.reader("valid")

    class Pressed:
        def __iter__(self):
            if run.trainer.step == 8:
                signal.raise_signal(signal.SIGINT)
            return iter(reader)

    monkeypatch.setattr(run, "_valid_reader", Pressed)
    with pytest.raises(RunInterruptedError) as stopped:
        run.fit()
    assert (stopped.value.signal, stopped.value.step) == ("SIGINT", 8)
    resumed = build(stopping_spec, tmp_path / "RUN")
    resumed.fit(resume=True)
    assert resumed.trainer.state_dict() == straight.trainer.state_dict()
    assert steps(resumed) == steps(straight)


def test_a_run_that_stopped_early_may_resume_with_more_patience(tmp_path, stopping_spec):
    build(stopping_spec, tmp_path).fit()
    again = build(stopping_spec, tmp_path).fit(resume=True)
    assert (again.steps, again.samples, again.stopped_early) == (16, 0, True)
    assert build(changed(stopping_spec, patience=4), tmp_path).fit(resume=True).steps == 20
    with pytest.raises(ConfigError, check=at(tmp_path / "run.json", 'training.monitor is null, got "logloss"')):
        build(changed(stopping_spec, monitor="logloss"), tmp_path).fit(resume=True)


def test_an_evaluation_that_only_max_steps_requested_uses_up_no_patience(tmp_path, stopping_spec):
    build(changed(stopping_spec, max_steps=6), tmp_path).fit()
    assert build(stopping_spec, tmp_path).fit(resume=True).steps == 16


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("call", ["mark_best", "keep_newest"])
def test_a_kill_between_saving_and_marking_loses_no_best(tmp_path, stopping_spec, monkeypatch, call):
    """The state of the checkpoint knows which step is the best; the mark follows it at the next start."""
    import terarec.train.checkpointing as module

    straight = build(stopping_spec, tmp_path / "straight")
    straight.fit()
    for number in (1, 2, 3):
        calls = []
        original = getattr(module, call)

        def killed(*arguments, calls=calls, number=number, original=original):
            calls.append(arguments)
            if len(calls) == number:
                raise KilledError
            return original(*arguments)

        directory = tmp_path / f"killed at {number}"
        with monkeypatch.context() as patch:
            patch.setattr(module, call, killed)
            with contextlib.suppress(KilledError):
                build(stopping_spec, directory).fit()
        resumed = build(stopping_spec, directory)
        resumed.fit(resume=True)
        assert find(resumed.directory.checkpoints, "best").name == find(straight.directory.checkpoints, "best").name
        assert steps(resumed) == steps(straight)


def test_the_best_may_be_left_out(tmp_path, stopping_spec):
    run = build(changed(stopping_spec, keep_best=False), tmp_path)
    assert run.fit().best_step is not None
    assert steps(run) == [16]
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/checkpoints")):
        find(run.directory.checkpoints, "best")


def test_patience_needs_a_split_to_evaluate_on(tmp_path, stopping_spec):
    with pytest.raises(ConfigError, check=at("training.patience")):
        build(changed(stopping_spec, eval_split=None), tmp_path / "RUN").fit()
    assert not (tmp_path / "RUN").exists()


def test_checkpoints_are_found_by_step_best_and_last(tmp_path, spec):
    run = build(changed(spec, checkpoint_every=4, keep_checkpoints=9), tmp_path)
    run.fit()
    directory = run.directory.checkpoints
    assert find(directory).name == find(directory, "last").name == find(directory, 16).name == "step-00000016"
    assert find(directory, "4").name == "step-00000004"
    mark_best(directory, 12)
    assert find(directory, "best").name == "step-00000012"
    with pytest.raises(ConfigError, check=at(directory)):
        find(directory, 5)
    with pytest.raises(ConfigError, check=at("checkpoint")):
        find(directory, "bset")
    (directory / "best.json").write_text("{")
    with pytest.raises(FormatError, check=at(f"{directory}/best.json")):
        find(directory, "best")


class SignalAt(Callback):
    """Sends a signal to this process at a step, in a hook."""

    def __init__(self, step, *, hook="on_step", number=signal.SIGINT):
        self.step = step
        self.number = number
        setattr(self, hook, self.send)

    def send(self, trainer, *_):
        if trainer.step >= self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "step", "hook"),
    [
        (signal.SIGINT, 5, "on_step"),
        (signal.SIGTERM, 8, "on_step"),
        (signal.SIGINT, 8, "on_evaluation"),
        (signal.SIGTERM, 1, "on_start"),
    ],
)
def test_a_signal_leaves_a_checkpoint_to_resume_from(tmp_path, spec, number, step, hook):
    straight = build(spec, tmp_path / "straight")
    straight.fit()
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    sender = SignalAt(0 if hook == "on_start" else step, hook=hook, number=number)
    interrupted = build(spec, tmp_path / "run", callbacks=[sender])
    with pytest.raises(RunInterruptedError) as stopped:
        interrupted.fit()
    assert (stopped.value.signal, stopped.value.step) == (number.name, step)
    assert stopped.value.checkpoint == tmp_path / "run" / "checkpoints" / f"step-0000000{step}"
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
    resumed = build(spec, tmp_path / "run")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))


def test_a_signal_during_evaluation_is_not_kept_waiting(tmp_path, spec):
    seen = []

    class DuringEvaluation(Callback):
        def on_start(self, trainer):
            score = trainer.model.forward

            def forward(batch):
                if not trainer.model.training:
                    seen.append(batch)
                    os.kill(os.getpid(), signal.SIGINT)
                return score(batch)

            trainer.model.forward = forward

    run = build(changed(spec, batch_size=50, max_steps=2), tmp_path, callbacks=[DuringEvaluation()])
    with pytest.raises(RunInterruptedError) as stopped:
        run.fit()
    assert (stopped.value.signal, stopped.value.step) == ("SIGINT", 2)
    assert len(seen) == 1
    assert load(latest(tmp_path / "checkpoints")).step == 2


def test_a_second_signal_acts_at_once_and_leaves_the_earlier_checkpoint_complete(tmp_path, spec, monkeypatch):
    from terarec.checkpoint import save_load

    run = build(changed(spec, checkpoint_every=3), tmp_path, callbacks=[SignalAt(5)])
    real = save_load.write_manifest

    def interrupted_write(checkpoint, manifest):
        if manifest.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        real(checkpoint, manifest)

    monkeypatch.setattr(save_load, "write_manifest", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert load(complete_checkpoints(tmp_path / "checkpoints")[0]).step == 3


def test_outside_the_main_thread_signals_are_left_alone():
    failures = []

    def work():
        before = signal.getsignal(signal.SIGINT)
        with Interrupts() as interrupts:
            if signal.getsignal(signal.SIGINT) is not before or interrupts.received is not None:
                failures.append("touched")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
