# SPDX-License-Identifier: Apache-2.0
"""Output of a model: lines with a prefix, the messages of `Model.fit` and the table of `Model.summary`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from terarec.hugectr.graph_json import Part, kind_name
from terarec.hugectr.network import tensors_of
from terarec.hugectr.objects import Input, Solver
from terarec.hugectr.processes import rank
from terarec.hugectr.release import release_number
from terarec.models.graph import tensor_shapes
from terarec.nn.layer import TensorShape
from terarec.spec import GraphSpec


class Log:
    """Printer of lines in the format of HugeCTR's log; of several processes, only the first prints.

    Args:
        release: Release of the prefix, such as "25.03".
    """

    def __init__(self, release: str) -> None:
        self._major = release_number(release)[0]
        # Not by `ranks()`, which waits until all processes have joined.
        self._is_silent = rank() != 0

    def __call__(self, message: str) -> None:
        """Print one line with its prefix."""
        self.bare(f"{self._prefix(datetime.now())}{message}")

    def bare(self, message: str) -> None:
        """Print one line without a prefix."""
        if not self._is_silent:
            # Flushed: the output of a script often goes to a file that is followed.
            print(message, flush=True)

    def _prefix(self, now: datetime) -> str:
        # The prefixes of 2.x, of 3.x and of later releases: tools that read a log of a release look for its own.
        if self._major == 2:
            return f"[{now:%d}d{now:%H}h{now:%M}m{now:%S}s][HUGECTR][INFO]: "
        if self._major == 3:
            return f"[HUGECTR][{now:%H:%M:%S}][INFO][RANK0]: "
        return f"[HCTR][{now:%H:%M:%S}.{now.microsecond // 1000:03d}][INFO][RK0][main]: "


class FitLog:
    """The lines of one call of `Model.fit`, with the seconds since it began.

    Args:
        solver: The `CreateSolver` object.
    """

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._log = Log(solver.compat_release)
        self._start = self._shown_at = time.perf_counter()

    def header(self, mode: str, sources: Sequence[str], trainable: Sequence[str], intervals: tuple[int, int]) -> None:
        """Print the mode, the data, the settings, and the `intervals` of evaluations and snapshots."""
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
        """Print the line before an epoch."""
        self._log(f"{'-' * 35}Epoch {number}{'-' * 35}")

    def progress(self, iteration: int, display: int, loss: float, lr: float) -> None:
        """Print the line of a display, with the seconds since the last one."""
        now = time.perf_counter()
        self._log(f"Iter: {iteration} Time({display} iters): {now - self._shown_at:.6g}s Loss: {loss:.6g} lr:{lr:.6g}")
        self._shown_at = now

    def metrics(self, values: Mapping[str, float], class_aucs: Sequence[float], seconds: float) -> None:
        """Print the metrics of an evaluation; of several labels, the AUC of each before their mean."""
        for name, value in values.items():
            # HugeCTR shows the AUC of each task, and their mean where it shows one number.
            if name == "AUC" and len(class_aucs) > 1:
                self._log(f"Evaluation, AUC: {{{', '.join(f'{auc:f}' for auc in class_aucs)}}}")
            self._log(f"Evaluation, {name}: {value:.6g}")
        self._log(f"Eval Time for {self._solver.max_eval_batches} iters: {seconds:.6g}s")

    def hit(self, target: float, iteration: int, of_what: str) -> None:
        """Print that the AUC is above the target."""
        batchsize, seconds = self._solver.batchsize, self._seconds()
        self._log(
            f"Hit target accuracy AUC {target:.5f} at {iteration} / {of_what} with batchsize {batchsize} in "
            f"{seconds:.2f}s. Average speed {iteration * batchsize / seconds:f} records/s."
        )

    def finish(self, what: str) -> None:
        """Print the end of `what`, with the seconds that it took."""
        self._log(f"Finish {what} {self._solver.batchsize} in {self._seconds():.2f}s.")

    def _seconds(self) -> float:
        return time.perf_counter() - self._start


_WIDTHS = (40, 30, 30)
_LINE = "-" * 118


def summary_lines(spec: GraphSpec, parts: Sequence[Part]) -> list[str]:
    """Return the lines: labels, dense and sparse inputs, then a row for each embedding and layer.

    Args:
        spec: The model's graph.
        parts: Its parts, the `Input` first.
    """
    shapes_of, inputs = tensor_shapes(spec), parts[0]
    assert isinstance(inputs, Input)
    sparse = ",".join(slots.top_name for slots in inputs.data_reader_sparse_param_array)
    lines = [
        "Model Summary".center(len(_LINE), "="),
        _row("Label", "Dense", "Sparse", ""),
        _row(",".join(label.name for label in spec.labels), inputs.dense_name, sparse, ""),
        _row(",".join(f"(None, {label.dim})" for label in spec.labels), f"(None, {inputs.dense_dim})", "", ""),
        _LINE,
        _row("Layer Type", "Input Name", "Output Name", "Output Shape"),
        _LINE,
    ]
    for kind, bottoms, tops in map(_columns, parts[1:]):
        shapes = [_shown(shapes_of.get(top)) for top in tops]
        for index in range(max(len(bottoms), len(tops))):
            bottom, top, shape = (_at(column, index) for column in (bottoms, tops, shapes))
            lines.append(_row("" if index else kind, bottom, top, shape))
    return [*lines, _LINE]


def _columns(part: Part) -> tuple[str, list[str], list[str]]:
    """Return the type, inputs and outputs of an embedding or layer, as in the script."""
    return kind_name(part), *tensors_of(part)


def _row(*cells: str) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)]
    return "".join([*padded, cells[-1]]).rstrip()


def _at(column: Sequence[str], index: int) -> str:
    return column[index] if index < len(column) else ""


def _shown(shape: TensorShape | None) -> str:
    """Return a shape for the table; several rows per sample are part of the batch dimension."""
    return "" if shape is None else f"({', '.join(['None', *map(str, shape.dims)])})"
