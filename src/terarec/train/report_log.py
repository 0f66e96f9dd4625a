"""The log of a run, for its report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terarec.errors import DataNotFoundError, FormatError
from terarec.spec.codec import parse_json
from terarec.spec.quoting import quoted

_NO_METRICS = frozenset({"step", "samples", "split", "seconds", "labels", "slices"})
"""Entries of an evaluation line that are no metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The lines of a ``metrics.jsonl`` by kind, each in rising order of steps.

    Attributes:
        training: Lines with a loss.
        evaluations: Lines with a split; a figure that was not a number is not in them.
        starts: Lines that say what the training ran on, one for each start.
        tiers: Statistics of tables in tiers, by name, one for each start that ended; empty without such tables.
    """

    training: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]
    starts: Sequence[dict[str, Any]] = ()
    tiers: Sequence[dict[str, int]] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of the evaluations, in their order."""
        names = dict.fromkeys(name for point in self.evaluations for name in point)
        return tuple(name for name in names if name not in _NO_METRICS)

    @property
    def training_seconds(self) -> float:
        """Time spent in training; the logged clock restarts at every resume."""
        clocks: list[float] = [point["seconds"] for point in self.training]
        restarts = [a for a, b in itertools.pairwise(clocks) if b < a]
        return sum(restarts) + (clocks[-1] if clocks else 0.0)


def read_log(path: Path) -> RunLog:
    """Read ``metrics.jsonl``. After a resume the later line of a step counts.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: A line that is not a JSON object with a step and samples, with its number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataNotFoundError(path, "no such file, expected the log of a training run") from None
    points = [read_point(path, number, line) for number, line in enumerate(lines, start=1)]
    return RunLog(
        training=_last_of_each_step([point for point in points if "loss" in point]),
        evaluations=_last_of_each_step([point for point in points if "split" in point]),
        starts=[point for point in points if "device" in point],
        tiers=[point["tiers"] for point in points if "tiers" in point],
    )


def read_point(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Read one line of ``metrics.jsonl``, the `number`-th of `path`.

    Raises:
        FormatError: It is not a JSON object with a step and samples.
    """
    try:
        point = parse_json(line)
    except json.JSONDecodeError as error:
        raise FormatError(path, f"line {number} column {error.colno}", f"{error.msg}, expected JSON") from None
    except ValueError as error:
        raise FormatError(path, f"line {number}", f"{error}, expected JSON") from None
    if not isinstance(point, dict) or not all(isinstance(point.get(name), int) for name in ("step", "samples")):
        got = quoted(line.decode(errors="backslashreplace"))
        raise FormatError(path, f"line {number}", f"got {got}, expected an object with step and samples")
    return point


def _last_of_each_step(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {point["step"]: point for point in points}
    return [by_step[step] for step in sorted(by_step)]
