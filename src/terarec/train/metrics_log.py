"""``metrics.jsonl``: the curves of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from terarec.formats import write_bytes
from terarec.metrics import Throughput
from terarec.train.callback import Callback
from terarec.train.evaluation import Evaluation
from terarec.train.report_log import read_point
from terarec.train.trainer import Trainer

LOG_EVERY = 10
"""Steps between training lines: hundreds of points for a run of thousands of steps, at some 10 us a line."""


class MetricsLog(Callback):
    """Writes a training line every few steps and a line per evaluation.

    A training line has ``step``, ``samples``, ``epoch``, ``loss`` (mean over the steps since the last line),
    ``samples_per_second`` (over the same steps, evaluations left out) and ``seconds`` (of training since the start or
    resume). An evaluation line has ``step``, ``samples``, ``split``, ``auc``, ``logloss`` and ``seconds``.

    Args:
        path: the file; lines that lie after the step at which training starts are removed, the others kept.
        split: name of the validation split.
        every: steps between training lines.
    """

    def __init__(self, path: Path, split: str, every: int = LOG_EVERY) -> None:
        self.path = path
        self.split = split
        self.every = every
        self._file: IO[str] | None = None
        self._throughput = Throughput()
        self._losses: list[float] = []
        self._samples_logged = 0
        self._seconds = 0.0
        self._evaluation_seconds = 0.0

    def on_start(self, trainer: Trainer) -> None:
        """Open the file, without what a run that was killed had logged beyond its checkpoint."""
        kept = _lines_until(self.path, trainer.step) if self.path.exists() else []
        write_bytes(self.path, b"".join(kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._samples_logged = trainer.samples
        self._throughput.reset()

    def on_step(self, trainer: Trainer) -> None:
        """Add the loss; write a line if one is due."""
        self._losses.append(trainer.loss)
        if trainer.step % self.every == 0:
            self._write_training_line(trainer)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Write the evaluation's line."""
        self._evaluation_seconds += evaluation.seconds
        figures = {"auc": evaluation.auc, "logloss": evaluation.logloss, "seconds": evaluation.seconds}
        self._write({"step": trainer.step, "samples": trainer.samples, "split": self.split, **figures})

    def on_end(self, trainer: Trainer) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            if self._losses:
                self._write_training_line(trainer)
            self._file.close()
            self._file = None

    def _write_training_line(self, trainer: Trainer) -> None:
        seconds = self._throughput.seconds - self._evaluation_seconds
        self._seconds += seconds
        self._write(
            {
                "step": trainer.step,
                "samples": trainer.samples,
                "epoch": trainer.epoch,
                "loss": sum(self._losses) / len(self._losses),
                "samples_per_second": (trainer.samples - self._samples_logged) / seconds,
                "seconds": self._seconds,
            }
        )
        self._losses.clear()
        self._samples_logged = trainer.samples
        self._evaluation_seconds = 0.0
        self._throughput.reset()

    def _write(self, point: dict[str, Any]) -> None:
        assert self._file is not None, "the log is open while training runs"
        finite = {name: value for name, value in point.items() if not _is_nan(value)}  # JSON has no word for NaN
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The lines of steps up to `step`; a line cut short by a crash is the last one and goes too."""
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n") or read_point(path, number, line)["step"] > step:
            break
        kept.append(line)
    return kept
