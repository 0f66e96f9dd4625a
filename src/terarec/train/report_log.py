"""What a run logged, for its report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terarec.errors import DataNotFoundError, FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The lines of a ``metrics.jsonl`` by kind, each in rising order of steps.

    Attributes:
        training: lines with a loss.
        evaluations: lines with a split; a figure that was not a number is not in them.
    """

    training: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]

    @property
    def training_seconds(self) -> float:
        """Time spent in training; the logged clock starts anew at every resume."""
        clocks: list[float] = [point["seconds"] for point in self.training]
        restarts = [a for a, b in itertools.pairwise(clocks) if b < a]
        return sum(restarts) + (clocks[-1] if clocks else 0.0)


def read_log(path: Path) -> RunLog:
    """Read ``metrics.jsonl``. After a resume the later line of a step counts.

    Raises:
        DataNotFoundError: there is no such file.
        FormatError: a line that is not a JSON object with a step and samples, with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataNotFoundError(f"{path}: no such file, expected the log of a training run") from None
    points = [_point(path, number, line) for number, line in enumerate(lines, start=1)]
    return RunLog(
        training=_last_of_each_step([point for point in points if "loss" in point]),
        evaluations=_last_of_each_step([point for point in points if "split" in point]),
    )


def _point(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        point = json.loads(line)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: line {number} column {error.colno}: {error.msg}, expected JSON") from None
    if not isinstance(point, dict) or not all(isinstance(point.get(name), int) for name in ("step", "samples")):
        raise FormatError(f"{path}: line {number}: got {line[:60]!r}, expected an object with step and samples")
    return point


def _last_of_each_step(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {point["step"]: point for point in points}
    return [by_step[step] for step in sorted(by_step)]
