# SPDX-License-Identifier: Apache-2.0
"""The callbacks of a run on several ranks: what one of them does on one rank ends or changes the training on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from typing_extensions import override

from terarec.dist import Ranks
from terarec.errors import CollectiveError
from terarec.spec.checks import one_line
from terarec.train.evaluation import Evaluation
from terarec.train.trainer import Callback, Trainer


class RanksCallbacks(Callback):
    """Calls a run's callbacks, and compares after each hook what they did on all ranks, before a next step.

    A `Trainer.stop` on one rank stops all; after an exception on one rank all of them raise, and save the last step;
    learning rates that differ are an error. Hooks that no callback of all ranks has are not compared.

    Args:
        callbacks: The callbacks of this rank; those of the first rank alone are left out on others.
        ranks: The processes that train together.
        save: Saves the last step; called on all ranks.
    """

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks, save: Callable[[Trainer], None]) -> None:
        shared = [callback for callback in callbacks if not callback.is_for_first_rank]
        kinds = [f"{type(callback).__module__}.{type(callback).__qualname__}" for callback in shared]
        ranks.check_same("callbacks", {"callbacks": kinds})
        self._callbacks = list(callbacks) if ranks.is_first else shared
        self._shared, self._save = shared, save
        # Of its own, as callbacks may use the collectives of the model's ranks.
        self._ranks = ranks.twin() if shared else Ranks()
        self._is_failure_shared = False

    @override
    def on_start(self, trainer: Trainer) -> None:
        self._call("on_start", trainer)

    @override
    def on_step_start(self, trainer: Trainer) -> None:
        self._call("on_step_start", trainer)

    @override
    def on_step(self, trainer: Trainer) -> None:
        self._call("on_step", trainer)

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._call("on_evaluation", trainer, evaluation)

    @override
    def on_epoch_end(self, trainer: Trainer) -> None:
        self._call("on_epoch_end", trainer)

    # No step follows the other hooks, so that nothing is compared behind them.

    @override
    def on_interrupt(self, trainer: Trainer) -> None:
        for callback in self._callbacks:
            callback.on_interrupt(trainer)

    @override
    def on_finish(self, trainer: Trainer) -> None:
        for callback in self._callbacks:
            callback.on_finish(trainer)

    @override
    def on_error(self, trainer: Trainer) -> None:
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(callback.on_error, trainer)
            if self._is_failure_shared:
                self._save(trainer)

    @override
    def on_end(self, trainer: Trainer) -> None:
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(callback.on_end, trainer)

    def _call(self, hook: str, trainer: Trainer, *arguments: object) -> None:
        failure: Exception | None = None
        try:
            for callback in self._callbacks:
                getattr(callback, hook)(trainer, *arguments)
        except CollectiveError:  # the ranks no longer act together
            raise
        except Exception as error:
            failure = error
        if any(_has(callback, hook) for callback in self._shared):
            self._compare(hook, trainer, failure)
        elif failure is not None:
            raise failure

    def _compare(self, hook: str, trainer: Trainer, failure: Exception | None) -> None:
        ranks, rates = self._ranks, _rates(trainer)
        ranks.step = trainer.step
        # Hashes of floats are the same in all processes; those of ranks differ if their highest and lowest ones do.
        digest = hash(tuple(rates.values())) >> 1
        numbers = torch.tensor([failure is not None, trainer.is_stopped, digest, -digest], dtype=torch.int64)
        has_failed, is_stopped, highest, lowest = ranks.all_reduce_(f"{hook} of callbacks", numbers, "max").tolist()
        if is_stopped:
            trainer.stop()
        self._is_failure_shared = bool(has_failed) or highest != -lowest
        if has_failed:
            problem = None if failure is None else f"{type(failure).__name__}: {one_line(str(failure))}"
            problems = ranks.gather("errors of callbacks", problem)
            if failure is not None:
                raise failure
            rank = next(rank for rank, text in enumerate(problems) if text is not None)
            raise CollectiveError(
                f"failed on rank {rank}: {problems[rank]}",
                collective=f"{hook} of callbacks",
                step=ranks.step,
                rank=rank,
            )
        if self._is_failure_shared:
            ranks.check_same("learning rates", rates)


def _has(callback: Callback, hook: str) -> bool:
    """Return whether a callback overrides a hook."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


def _rates(trainer: Trainer) -> dict[str, float]:
    """Return the learning rate of each group of the optimizers, which are the same on all ranks."""
    optimizers = {"rows": trainer.optimizers.rows, "dense": trainer.optimizers.dense}
    return {
        f"{name}.{number}.lr": float(group["lr"])
        for name, optimizer in optimizers.items()
        if optimizer is not None
        for number, group in enumerate(optimizer.param_groups)
    }
