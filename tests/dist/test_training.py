# SPDX-License-Identifier: Apache-2.0
"""Runs on several processes: they give what one process gives, and are resumed on any number of processes."""

import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from terarec.batch import Batch
from terarec.checkpoint import latest, load
from terarec.dist import ColumnWise, DataParallel, Hybrid, Placement, Ranks, RowWise, ShardingPlan, TableWise
from terarec.dist.plan import TablePlan
from terarec.errors import ConfigError, FormatError
from terarec.models.artifact import dense_state, load_model
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DLRMSpec,
    DynamicTablesSpec,
    RowOptions,
    RunSpec,
    StaticTablesSpec,
    TrainingSpec,
)
from terarec.train import Callback, ProgressBar, Trainer
from terarec.train.run import build
from tests.dist.launch import Raised, raised, run_ranks
from tests.errors import at
from tests.train.planted import make_planted
from tests.train.small_run import weights

TABLES = ("user", "item", "tags")
PLANS: dict[str, tuple[Placement, ...]] = {
    "mixed": (RowWise(), ColumnWise(), DataParallel()),
    "other": (Hybrid(hot_keys=(0, 1, 7)), TableWise(rank=1), RowWise()),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planted")
    make_planted(directory, train=1000, valid=301, rows_per_group=100)
    return directory


def run_spec(data: Path, *, tables: str = "static", **training: Any) -> RunSpec:
    kind = StaticTablesSpec() if tables == "static" else DynamicTablesSpec()
    settings: dict[str, Any] = {
        "batch_size": 111,
        "epochs": 2,
        "seed": 5,
        "metrics": ("auc", "logloss", "average_loss"),
    }
    return RunSpec(
        data=str(data),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=kind),
        dense_optimizer=AdamSpec(lr=0.01, eps=1e-3),
        sparse_optimizer=AdaGradSpec(lr=0.05, initial_accumulator=0.1),
        training=TrainingSpec(**settings | training),  # 10 steps an epoch, the last of one sample
    )


def plan(name: str, size: int) -> ShardingPlan:
    entries = [
        TablePlan(table=table, placement=placement) for table, placement in zip(TABLES, PLANS[name], strict=True)
    ]
    return ShardingPlan(world_size=size, tables=tuple(entries))


def fit(ranks: Ranks, spec: RunSpec, out: Path, placements: str | None, resume: bool) -> dict[str, Any]:
    made = None if placements is None else plan(placements, ranks.size)
    report = build(spec, out, ranks=ranks, plan=made).fit(resume=resume)
    assert report.evaluation is not None
    return {
        "steps": report.steps,
        "samples": report.samples,
        "loss": report.loss,
        "values": dict(report.evaluation.results.overall.values),
        "rows": report.evaluation.rows,
        "checkpoint": str(report.checkpoint),
    }


def on_ranks(size: int, *arguments: Any) -> dict[str, Any]:
    results = run_ranks(size, fit, *arguments)
    assert not any(isinstance(result, Raised | str) for result in results), results
    assert all(result == results[0] for result in results), results
    return results[0]


def check_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["steps"], found["rows"]) == (expected["steps"], expected["rows"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["values"] == pytest.approx(expected["values"], rel=1e-4)


def check_same_weights(out: Path, expected: Path) -> None:
    """Compare what one process loads from two runs."""
    found, wanted = (weights(load_model(path).model) for path in (out, expected))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("tables", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_a_run_on_ranks_equals_one_process_and_continues_on_any_number(data: Path, tmp_path: Path, tables: str) -> None:
    spec = run_spec(data, tables=tables)
    expected = fit(Ranks(), spec, tmp_path / "one", None, False)
    half = run_spec(data, tables=tables, epochs=1)
    first = on_ranks(4, half, tmp_path / "many", "mixed", False)
    assert first["steps"] == 10
    assert first["samples"] == 1000
    saved = load(latest(tmp_path / "many" / "checkpoints"))
    assert {"user", "item", "tags"} == set(saved.table_files().names)
    found = on_ranks(2, spec, tmp_path / "many", "other", True)
    check_close(found, expected)
    assert found["samples"] == 1000
    check_same_weights(tmp_path / "many", tmp_path / "one")
    longer = run_spec(data, tables=tables, epochs=3)
    alone = fit(Ranks(), longer, tmp_path / "many", None, True)  # from what two ranks saved
    check_close(alone, fit(Ranks(), longer, tmp_path / "one", None, True))
    check_same_weights(tmp_path / "many", tmp_path / "one")


def test_gradients_of_ranks_are_clipped_by_their_joint_norm(data: Path, tmp_path: Path) -> None:
    options = RowOptions(clip_global_norm=0.01, non_finite="raise")
    rule = AdaGradSpec(lr=0.05, initial_accumulator=0.1, rows=options)
    spec = dataclasses.replace(run_spec(data, epochs=1, clip_norm=0.05), sparse_optimizer=rule)
    check_close(on_ranks(2, spec, tmp_path / "many", "mixed", False), fit(Ranks(), spec, tmp_path / "one", None, False))
    check_same_weights(tmp_path / "many", tmp_path / "one")


@pytest.mark.slow
def test_one_process_saves_what_three_and_eight_ranks_load(data: Path, tmp_path: Path) -> None:
    half, spec = run_spec(data, epochs=1), run_spec(data)
    expected = fit(Ranks(), spec, tmp_path / "one", None, False)
    for size in (3, 8):
        out = tmp_path / f"ranks-{size}"
        fit(Ranks(), half, out, None, False)
        check_close(on_ranks(size, spec, out, None, True), expected)
        check_same_weights(out, tmp_path / "one")


def rejected(ranks: Ranks, data: Path, out: Path) -> list[Raised]:
    """Return what is raised for runs that cannot be trained together."""
    other = out / "other"
    if not ranks.is_first:
        make_planted(other, train=1000, valid=301, rows_per_group=50)
    found = []
    for spec, placements in (
        (run_spec(data, clip_norm=1.0), "other"),
        (run_spec(data if ranks.is_first else other), None),
        (run_spec(data, seed=5 + ranks.rank), None),
    ):
        try:
            fit(ranks, spec, out / "rejected", placements, False)
        except Exception as error:
            found.append(raised(error))
    run = build(run_spec(data), out / "rejected", ranks=ranks)
    with torch.no_grad():
        dict(run.model.named_parameters())["top.layers.0.bias"][0] += ranks.rank
    try:
        run.fit()
    except Exception as error:
        found.append(raised(error))
    return found


def test_what_cannot_be_trained_on_ranks_is_rejected_on_all(data: Path, tmp_path: Path) -> None:
    for result in run_ranks(2, rejected, data, tmp_path):
        assert isinstance(result, list), result
        assert [(error.kind, error.fields.get("collective")) for error in result] == [
            ("ConfigError", None),
            ("CollectiveError", "check of data"),
            ("CollectiveError", "check of data"),
            ("CollectiveError", "check of layers"),
        ]
        assert {rank for rank, _ in result[1].fields["differences"]} == {1}
        assert result[2].fields["differences"] == ((1, "position.seed"),)
        assert result[3].fields["differences"] == ((1, "top.layers.0.bias"),)
    assert not (tmp_path / "rejected").exists()


class Acts(Callback):
    """Acts after step 2: as ``what`` says, and on rank 1 alone."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step(self, trainer: Trainer) -> None:
        if self.what == "rate":
            trainer.optimizers.lr = 0.002
        if trainer.step != 2 or trainer.ranks.is_first:
            return
        if self.what == "stop":
            trainer.stop()
        elif self.what == "other rate":
            trainer.optimizers.lr = 1e-9
        elif self.what == "raise":
            raise ValueError("enough")


def act(ranks: Ranks, spec: RunSpec, out: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for what in ("rate", "stop", "raise", "other rate", "none on rank 1"):
        callbacks = [ProgressBar(), Acts(what)] if what != "none on rank 1" or ranks.is_first else []
        run = build(spec, out / what, callbacks, ranks=ranks)
        try:
            steps = run.fit().steps
        except Exception as error:
            results[what] = raised(error)
        else:
            results[what] = steps, {name: value.tolist() for name, value in dense_state(run.model).items()}
    return results


def test_what_callbacks_do_on_one_rank_holds_for_all(data: Path, tmp_path: Path) -> None:
    spec = run_spec(data, epochs=1, max_steps=4, eval_split=None, rank_timeout=20.0)
    first, second = run_ranks(2, act, spec, tmp_path)
    assert first["rate"] == second["rate"]
    build(spec, tmp_path / "one", [Acts("rate")]).fit()
    check_same_weights(tmp_path / "rate", tmp_path / "one")
    assert first["stop"] == second["stop"]
    assert first["stop"][0] == 2
    assert first["raise"].message == "on_step of callbacks in step 2: failed on rank 1: ValueError: enough"
    assert (second["raise"].kind, second["raise"].message) == ("ValueError", "enough")
    for of_rank in (first, second):
        assert "rank 1 has dense.0.lr = 1e-09, rank 0 has 0.01" in of_rank["other rate"].message
        assert of_rank["none on rank 1"].kind == "CollectiveError"
    saved = {what: load(latest(tmp_path / what / "checkpoints")).step for what in ("stop", "raise", "other rate")}
    assert saved == dict.fromkeys(saved, 2)
    assert not (tmp_path / "none on rank 1" / "checkpoints").exists()


@pytest.mark.parametrize("renamed", [{}, {TABLES[0]: "users"}])
def test_a_run_rejects_a_plan_for_other_tables(data: Path, tmp_path: Path, renamed: dict[str, str]) -> None:
    """It ended in a KeyError where the placements are described."""
    ranks = Ranks()
    ranks.size = 2
    tables = [entry for entry in plan("mixed", 2).tables if renamed or entry.table != TABLES[-1]]
    tables = [dataclasses.replace(entry, table=renamed.get(entry.table, entry.table)) for entry in tables]
    other = ShardingPlan(world_size=2, tables=tuple(tables))
    place = at("plan.tables", "'users'" if renamed else repr(TABLES[-1]))
    with pytest.raises(ConfigError, check=place):
        _ = build(run_spec(data), tmp_path / "run", ranks=ranks, plan=other).model
    assert not (tmp_path / "run").exists()


class Breaks(Callback):
    """Raises after step 3, on the first rank alone."""

    is_for_first_rank = True

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            raise OSError("no space for the log")


class Breaking:
    """A reader that fails after some batches."""

    def __init__(self, reader: Any, after: int) -> None:
        self._reader, self._after = reader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __len__(self) -> int:
        return len(self._reader)

    def __iter__(self) -> Iterator[Batch]:
        yield from islice(self._reader, self._after)
        raise FormatError("part-00000.parquet", "is damaged")


BREAKS = {
    "callback": (0, "OSError", "no space for the log"),
    "train": (1, "FormatError", "is damaged"),
    "valid": (1, "FormatError", "is damaged"),
}
"""What fails -> on which rank, and the kind and the end of its error."""


def fail(ranks: Ranks, spec: RunSpec, out: Path, what: str) -> int:
    run = build(spec, out, [Breaks()] if what == "callback" else [], ranks=ranks)
    if what != "callback" and ranks.rank == 1:
        reader = run.reader
        run.reader = lambda split: Breaking(reader(split), 4) if split == what else reader(split)  # type: ignore
    return run.fit().steps


@pytest.mark.parametrize("what", BREAKS)
def test_what_fails_on_one_rank_is_named_on_the_others(data: Path, tmp_path: Path, what: str) -> None:
    eval_every = 4 if what == "valid" else None
    spec = run_spec(data, epochs=1, checkpoint_every=2, eval_every=eval_every, batch_size=50, rank_timeout=20.0)
    results = run_ranks(2, fail, spec, tmp_path / "run", what)
    rank, kind, problem = BREAKS[what]
    assert results[rank].kind == kind
    other = results[1 - rank]
    assert (other.kind, other.fields["rank"]) == ("CollectiveError", rank)
    assert f"has failed: {kind}: " in other.message
    assert other.message.endswith(problem)
    # Ranks read a batch ahead, so that the reader fails before step 4 is saved.
    assert load(latest(tmp_path / "run" / "checkpoints")).step == 2
    on_ranks(2, spec, tmp_path / "run", None, True)
