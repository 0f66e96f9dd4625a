"""``metrics.jsonl``: the curves of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from terarec.formats import write_bytes
from terarec.train.environment import describe_environment
from terarec.train.evaluation import Evaluation
from terarec.train.points import LOG_EVERY, Point, PointLogger
from terarec.train.report_log import read_point
from terarec.train.trainer import Trainer


class MetricsLog(PointLogger):
    """Writes a line for each start, a training line every few steps and a line per evaluation.

    The line of a start has ``step``, ``samples`` and what `describe_environment` returns. A training line is a point of
    `PointLogger`. An evaluation line has ``step``, ``samples``, ``split``, every metric by its name, ``seconds``, and
    ``labels`` and ``slices`` where there are several.

    Args:
        path: Path of the file. Lines after the step at which training starts are removed, the others kept.
        split: Name of the validation split.
        every: Steps between training lines.
    """

    def __init__(self, path: Path, split: str, every: int = LOG_EVERY) -> None:
        super().__init__(every)
        self.path = path
        self.split = split
        self._file: IO[str] | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Open the file, without what a run that was killed had logged beyond its checkpoint."""
        kept = _lines_until(self.path, trainer.step) if self.path.exists() else []
        write_bytes(self.path, b"".join(kept))
        self._file = self.path.open("a", encoding="utf-8")
        where = describe_environment(trainer.device, trainer.spec)
        self._write({"step": trainer.step, "samples": trainer.samples, **where})
        super().on_start(trainer)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Write the evaluation's line."""
        super().on_evaluation(trainer, evaluation)
        figures = {
            name: value for name, value in evaluation.figures().items() if name not in ("rows", "samples_per_second")
        }
        self._write({"step": trainer.step, "samples": trainer.samples, "split": self.split, **figures})

    def on_end(self, trainer: Trainer) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            super().on_end(trainer)
            self._file.close()
            self._file = None

    def log_training(self, point: Point) -> None:
        """Write a training line."""
        self._write(point)

    def _write(self, point: Mapping[str, Any]) -> None:
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
