"""Ctrl-C and SIGTERM: the step is finished, a checkpoint written, one clear error raised; twice is at once."""

import os
import signal
import threading

import pytest

from terarec.checkpoint import latest, load, whole
from terarec.errors import RunInterruptedError
from terarec.train import Callback, build
from terarec.train.stopping import Interrupts
from tests.train.small_run import assert_same, changed, weights


class SignalAt(Callback):
    """Sends a signal to this process at a step, in a hook."""

    def __init__(self, step, *, hook="on_step", number=signal.SIGINT):
        self.step = step
        self.number = number
        setattr(self, hook, self.send)

    def send(self, trainer, *_):
        if trainer.step >= self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("step", "hook"), [(5, "on_step"), (8, "on_step"), (8, "on_evaluation"), (1, "on_start")])
def test_a_signal_leaves_a_checkpoint_to_resume_from(tmp_path, spec, number, step, hook):
    straight = build(spec, tmp_path / "straight")
    straight.fit()
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    sender = SignalAt(0 if hook == "on_start" else step, hook=hook, number=number)
    interrupted = build(spec, tmp_path / "run", callbacks=[sender])
    told = rf"{number.name} after step {step} of 16 .*checkpoints/step-0000000{step}"
    with pytest.raises(RunInterruptedError, match=told):
        interrupted.fit()
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
    with pytest.raises(RunInterruptedError, match="SIGINT after step 2 of 2"):
        run.fit()
    assert len(seen) == 1
    assert load(latest(tmp_path / "checkpoints")).step == 2


def test_a_second_signal_acts_at_once_and_leaves_the_earlier_checkpoint_whole(tmp_path, spec, monkeypatch):
    from terarec.checkpoint import write

    run = build(changed(spec, checkpoint_every=3), tmp_path, callbacks=[SignalAt(5)])
    real = write.write_manifest

    def interrupted_write(checkpoint, step, files):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        real(checkpoint, step, files)

    monkeypatch.setattr(write, "write_manifest", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert load(whole(tmp_path / "checkpoints")[0]).step == 3


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
