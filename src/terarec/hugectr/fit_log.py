"""What `Model.fit` prints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from terarec.hugectr.log import Log


class FitLog:
    """The lines of one call of `Model.fit`, with the seconds since it began.

    Args:
        solver: what `CreateSolver` made.
    """

    def __init__(self, solver: Any) -> None:
        self._solver = solver
        self._log = Log(solver.compat_release)
        self._start = self._shown_at = time.perf_counter()

    def header(self, mode: str, sources: Sequence[str], trainable: Sequence[str], intervals: tuple[int, int]) -> None:
        """What is trained on what, how, and how often it is evaluated and saved (`intervals`)."""
        solver = self._solver
        self._log.bare("Model Fit".center(118, "="))
        self._log(mode)
        self._log(f"Training batchsize: {solver.batchsize}, evaluation batchsize: {solver.batchsize_eval}")
        self._log(f"Evaluation interval: {intervals[0]}, snapshot interval: {intervals[1]}")
        for line in trainable:
            self._log(line)
        self._log(
            f"Use mixed precision: {solver.use_mixed_precision}, scaler: {solver.scaler:f}, "
            f"use cuda graph: {solver.use_cuda_graph}"
        )
        self._log(f"lr: {solver.lr:f}, warmup_steps: {solver.warmup_steps}, end_lr: {solver.end_lr:f}")
        self._log(
            f"decay_start: {solver.decay_start}, decay_steps: {solver.decay_steps}, decay_power: {solver.decay_power:f}"
        )
        self._log(f"Training source file: {sources[0]}")
        self._log(f"Evaluation source file: {sources[1]}")

    def epoch(self, number: int) -> None:
        """The line before an epoch."""
        self._log(f"{'-' * 35}Epoch {number}{'-' * 35}")

    def progress(self, iteration: int, display: int, loss: float, lr: float) -> None:
        """The line of a display, with the seconds since the last one."""
        now = time.perf_counter()
        self._log(f"Iter: {iteration} Time({display} iters): {now - self._shown_at:.6g}s Loss: {loss:.6g} lr:{lr:.6g}")
        self._shown_at = now

    def metrics(self, found: Mapping[str, float], class_aucs: Sequence[float], seconds: float) -> None:
        """The metrics of an evaluation that took `seconds`; of several labels, the AUC of each before their mean."""
        for name, value in found.items():
            if name == "AUC" and len(class_aucs) > 1:
                self._log(f"Evaluation, AUC: {{{', '.join(f'{auc:f}' for auc in class_aucs)}}}")
            self._log(f"Evaluation, {name}: {value:.6g}")
        self._log(f"Eval Time for {self._solver.max_eval_batches} iters: {seconds:.6g}s")

    def hit(self, target: float, iteration: int, of_what: str) -> None:
        """The AUC is above the target."""
        batchsize, seconds = self._solver.batchsize, self._seconds()
        self._log(
            f"Hit target accuracy AUC {target:.5f} at {iteration} / {of_what} with batchsize {batchsize} in "
            f"{seconds:.2f}s. Average speed {iteration * batchsize / seconds:f} records/s."
        )

    def finish(self, what: str) -> None:
        """All is done: `what`, with the seconds that it took."""
        self._log(f"Finish {what} {self._solver.batchsize} in {self._seconds():.2f}s.")

    def _seconds(self) -> float:
        return time.perf_counter() - self._start
