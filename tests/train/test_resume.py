# SPDX-License-Identifier: Apache-2.0
"""Train N = train k, save, load, train N - k: to the bit, optimizers, dropout, data order and log included."""

import dataclasses
import json
from itertools import islice, product

import pytest

from terarec.checkpoint import complete_checkpoints, latest
from terarec.errors import ConfigError, FormatError
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DLRMSpec,
    DynamicTablesSpec,
    RowWiseAdaGradSpec,
    SGDSpec,
    StaticTablesSpec,
    WideDeepSpec,
    counting_filter,
    freq,
    lfu,
    lru,
    prob,
    ttl,
)
from terarec.train import Callback, build
from tests.errors import at
from tests.params import in_every_run
from tests.train.small_run import assert_same, changed, weights

DLRM = DLRMSpec(width=4, bottom=(8, 4), top=(8,))
WIDE_DEEP = WideDeepSpec(width=4, hidden=(16,), dropout=0.3)


def dynamic(model, **tables):
    """`model` with dynamic tables."""
    return dataclasses.replace(model, tables=DynamicTablesSpec(**tables))


def narrow(model, dtype):
    """`model` with static tables of narrow rows."""
    return dataclasses.replace(model, tables=StaticTablesSpec(dtype=dtype))


CASES = {
    "adam, adagrad": (DLRM, AdamSpec(), AdaGradSpec(lr=0.05)),
    "adagrad, adam, dropout": (WIDE_DEEP, AdaGradSpec(initial_accumulator=0.1), AdamSpec()),
    "sgd, rowwise adagrad, dropout": (WIDE_DEEP, SGDSpec(), RowWiseAdaGradSpec(initial_accumulator=0.2)),
    "sgd, sgd": (DLRM, SGDSpec(), SGDSpec()),
    "bfloat16": (narrow(DLRM, "bfloat16"), AdamSpec(), AdaGradSpec(lr=0.05)),
    "float16": (narrow(WIDE_DEEP, "float16"), AdamSpec(), AdamSpec()),
    "dynamic, lru, freq": (dynamic(DLRM, evict=lru(), max_rows=110, admit=freq(2)), AdamSpec(), AdamSpec(lr=0.01)),
    "dynamic, lfu, filter": (
        dynamic(WIDE_DEEP, evict=lfu(), max_rows=110, admit=counting_filter(2, num_bytes=4096)),
        AdamSpec(),
        AdaGradSpec(initial_accumulator=0.1),
    ),
    "dynamic, ttl, prob": (dynamic(DLRM, evict=ttl(3), admit=prob(0.5)), SGDSpec(), RowWiseAdaGradSpec(lr=0.1)),
}


def curve(run):
    """Return the log without what a clock decides."""
    points = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    return [{k: v for k, v in point.items() if k not in ("seconds", "samples_per_second")} for point in points]


# Within the first epoch, at its end, and within the second. All in every run for one case; the last for each.
@pytest.mark.parametrize(
    ("case", "steps"),
    in_every_run(
        [("adam, adagrad", 3), ("adam, adagrad", 8), *((case, 11) for case in list(CASES)[::2])],
        product(CASES, (3, 8, 11)),
    ),
)
def test_a_resumed_run_equals_one_without_a_stop(tmp_path, spec, case, steps):
    model, dense, sparse = CASES[case]
    spec = dataclasses.replace(spec, model=model, dense_optimizer=dense, sparse_optimizer=sparse)
    straight = build(spec, tmp_path / "straight")
    straight_report = straight.fit()
    expected = dataclasses.replace(straight_report.evaluation, seconds=0, samples_per_second=0)
    build(changed(spec, max_steps=steps), tmp_path / "resumed").fit()
    resumed = build(spec, tmp_path / "resumed")
    report = resumed.fit(resume=True)

    assert report.steps == straight_report.steps == 16
    assert report.samples == 2000 - min(steps * 128, 1000 + max(0, steps - 8) * 128)
    assert_same(weights(resumed.model), weights(straight.model))
    assert report.loss == straight_report.loss
    assert dataclasses.replace(report.evaluation, seconds=0, samples_per_second=0) == expected


@pytest.mark.parametrize("delta_every", [None, 2])
def test_a_kill_between_checkpoints_costs_only_the_steps_since(tmp_path, spec, delta_every):
    spec = changed(spec, checkpoint_every=3, keep_checkpoints=1)
    if delta_every is not None:
        spec = changed(spec, checkpoint_every=6, delta_every=3)
    straight = build(spec, tmp_path / "straight")
    straight.fit()

    class KilledError(BaseException):  # what is an Exception leaves a checkpoint of the last step
        pass

    class KillAtStep10:
        def __getattr__(self, hook):
            return lambda trainer, *_: self.check(hook, trainer)

        def check(self, hook, trainer):
            if hook == "on_step" and trainer.step == 10:
                raise KilledError

    with pytest.raises(KilledError):
        build(spec, tmp_path / "killed", callbacks=[KillAtStep10()]).fit()
    assert latest(tmp_path / "killed" / "checkpoints").name == "step-00000009"
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 10, "samp')
    names = {path.name for path in complete_checkpoints(tmp_path / "killed" / "checkpoints")}
    assert names >= ({"step-00000009"} if delta_every is None else {"step-00000006", "step-00000009"})
    resumed = build(spec, tmp_path / "killed")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))
    evaluations = [point for point in curve(straight) if "auc" in point]
    assert [point for point in curve(resumed) if "auc" in point] == evaluations
    assert [point["step"] for point in evaluations] == [8, 16]


class Stopping(Callback):
    """Raises before the step after some number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_start(self, trainer):
        if trainer.step == self.steps:
            raise KeyError("stop")


@pytest.mark.parametrize("steps", [8, 10])
def test_an_error_before_a_step_loses_no_batch(tmp_path, spec, steps):
    """The batch of a step that did not begin, at the start of an epoch and within one."""
    spec = changed(spec, checkpoint_every=100, keep_best=False)
    straight = build(spec, tmp_path / "straight")
    straight.fit()
    with pytest.raises(KeyError):
        build(spec, tmp_path / "resumed", [Stopping(steps)]).fit()
    assert latest(tmp_path / "resumed" / "checkpoints").name == f"step-{steps:08}"
    resumed = build(spec, tmp_path / "resumed")
    report = resumed.fit(resume=True)
    assert (report.steps, resumed.trainer.epoch) == (16, 2)
    assert_same(weights(resumed.model), weights(straight.model))


def test_a_reader_that_fails_within_the_batches_of_a_step_loses_none(tmp_path, spec):
    spec = changed(spec, checkpoint_every=100, keep_best=False, accumulate=3)
    straight, broken = build(spec, tmp_path / "straight"), build(spec, tmp_path / "resumed")
    straight.fit()
    open_split = broken.reader

    class Breaking:
        def __init__(self, reader):
            self._reader = reader

        def __getattr__(self, name):
            return getattr(self._reader, name)

        def __len__(self):
            return len(self._reader)

        def __iter__(self):
            yield from islice(self._reader, 5)  # the second step lacks one of its three
            raise FormatError("part-00000.parquet", "is damaged")

    broken.reader = lambda split: Breaking(open_split(split)) if split == "train" else open_split(split)
    with pytest.raises(FormatError):
        broken.fit()
    assert latest(tmp_path / "resumed" / "checkpoints").name == "step-00000001"
    resumed = build(spec, tmp_path / "resumed")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(straight.model))


def test_the_number_of_reader_threads_changes_nothing(tmp_path, spec):
    one, three = build(spec, tmp_path / "1"), build(changed(spec, reader_threads=3), tmp_path / "3")
    one.fit()
    three.fit()
    assert_same(weights(three.model), weights(one.model))


def test_resuming_a_finished_run_scores_it_again(tmp_path, spec):
    first = build(spec, tmp_path).fit()
    again = build(spec, tmp_path).fit(resume=True)
    assert (again.steps, again.samples) == (16, 0)
    assert again.evaluation.auc == first.evaluation.auc
    assert again.highest_auc == first.highest_auc
    assert again.checkpoint == first.checkpoint


def test_a_run_can_resume_for_longer(tmp_path, spec):
    build(spec, tmp_path / "a").fit()
    longer = build(changed(spec, epochs=3), tmp_path / "a")
    longer.fit(resume=True)
    straight = build(changed(spec, epochs=3), tmp_path / "b")
    straight.fit()
    assert_same(weights(longer.model), weights(straight.model))


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path, spec):
    fresh = build(spec, tmp_path)
    assert fresh.fit(resume=True).samples == 2000


def test_a_run_is_not_trained_over(tmp_path, spec):
    build(spec, tmp_path).fit()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, check=at(tmp_path)):
        build(spec, tmp_path).fit()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("field", "value", "reported"),
    [
        ("model", WIDE_DEEP, 'model.kind is "dlrm", got "wide_deep"'),
        ("model", DLRMSpec(width=8, bottom=(8, 8), top=(8,)), "model.width is 4, got 8"),
        ("model", DLRMSpec(width=4, bottom=(8, 4), top=(9, 2)), "model.top is [8], got [9, 2]"),
        ("sparse_optimizer", AdaGradSpec(lr=0.06), "sparse_optimizer.lr is 0.05, got 0.06"),
        ("dense_optimizer", SGDSpec(), 'dense_optimizer.kind is "adam", got "sgd"'),
    ],
)
def test_a_resumed_run_keeps_its_description(tmp_path, spec, field, value, reported):
    build(changed(spec, max_steps=1), tmp_path).fit()
    with pytest.raises(ConfigError, check=at(tmp_path / "run.json", reported)):
        build(dataclasses.replace(spec, **{field: value}), tmp_path).fit(resume=True)
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/run.json")):
        build(changed(spec, batch_size=64), tmp_path).fit(resume=True)
