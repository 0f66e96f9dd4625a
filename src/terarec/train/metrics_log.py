# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl``, the log of a run: the callback that writes it, and its lines for a report."""

from __future__ import annotations

import io
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from terarec.errors import DataNotFoundError, FormatError
from terarec.io.files import write_bytes
from terarec.io.opening import open_file, read_bytes
from terarec.spec.checks import quoted
from terarec.spec.codec import finite_data, parse_json
from terarec.train.devices import describe_environment
from terarec.train.evaluation import Evaluation
from terarec.train.loggers import LOG_EVERY, Point, PointLogger
from terarec.train.trainer import Trainer

_NO_METRICS = frozenset({"step", "samples", "split", "seconds", "labels", "slices", "untrained_labels", "calibration"})
"""Entries of an evaluation line that are not metrics."""

_MOST_BYTES = 4 << 30


class MetricsLog(PointLogger):
    """Writes a line for each start, a training line every few steps, a line per evaluation, and one of tables in tiers.

    The line of a start has ``step``, ``samples`` and what `describe_environment` returns. A training line is a point of
    `PointLogger`. An evaluation line has ``step``, ``samples``, ``split``, every metric by its name (null where it is
    undefined), ``seconds``, and
    ``labels`` and ``slices`` where there are several. The line of tables in tiers comes at the end: ``tiers`` has the
    numbers of `terarec.memory.fast_tier.TierUse`.

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

    @override
    def on_start(self, trainer: Trainer) -> None:
        # Without lines that a killed run had logged after its checkpoint: without any, where a run starts over.
        is_resumed = trainer.step > trainer.first_step and self.path.exists()
        kept = _lines_until(self.path, trainer.step) if is_resumed else []
        write_bytes(self.path, b"".join(kept))
        self._file = io.TextIOWrapper(open_file(self.path, "ab"), encoding="utf-8")
        where = describe_environment(trainer.device, trainer.spec)
        self._write({"step": trainer.step, "samples": trainer.samples, **where})
        super().on_start(trainer)

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        super().on_evaluation(trainer, evaluation)
        content = evaluation.to_json()
        del content["rows"], content["samples_per_second"]
        self._write({"step": trainer.step, "samples": trainer.samples, "split": self.split, **content})

    @override
    def on_end(self, trainer: Trainer) -> None:
        # `on_end` comes also where an `on_start` before this one's has raised.
        if self._file is not None:
            super().on_end(trainer)
            tiers = trainer.tier_use()
            if tiers is not None:
                self._write({"step": trainer.step, "samples": trainer.samples, "tiers": tiers._asdict()})
            self._file.close()
            self._file = None

    @override
    def log_training(self, point: Point) -> None:
        self._write(point)

    def _write(self, point: Mapping[str, Any]) -> None:
        assert self._file is not None, "the log is open while training runs"
        # Without what is unknown, but for the metrics of an evaluation, of which null says that they are undefined.
        known = {name: value for name, value in finite_data(point).items() if value is not None or "split" in point}
        self._file.write(json.dumps(known, allow_nan=False) + "\n")
        # Each line at once, so that curves can be followed and survive a kill.
        self._file.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The lines of a ``metrics.jsonl`` by kind, each in rising order of steps, one of a step and split.

    Attributes:
        training: Lines with a loss.
        evaluations: Lines with a split; a metric that was undefined is None.
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
        starts = [point["step"] for point in self.starts]
        # Of each start the clock in its last line.
        clocks = {bisect_left(starts, point["step"]): point["seconds"] for point in self.training}
        return float(sum(clocks.values()))


def read_log(path: Path) -> RunLog:
    """Read ``metrics.jsonl``. After a resume the later line of a step counts.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: A line that is not a JSON object with a step and samples, with its number.
    """
    try:
        lines = read_bytes(path, most=_MOST_BYTES).splitlines()
    except DataNotFoundError:
        raise DataNotFoundError(path, "no such file, expected the log of a training run") from None
    points = [read_point(path, number, line) for number, line in enumerate(lines, start=1)]
    return RunLog(
        training=_last_of_each_step([point for point in points if "loss" in point]),
        evaluations=_last_of_each_step([point for point in points if "split" in point]),
        starts=[point for point in points if "device" in point],
        tiers=[point["tiers"] for point in points if "tiers" in point],
    )


def read_point(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Read one line of ``metrics.jsonl``, the `number`-th of `path`."""
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
    # An evaluation of another split is another one.
    last: dict[tuple[int, str | None], dict[str, Any]] = {}
    for point in points:
        place = point["step"], point.get("split")
        last.pop(place, None)  # it comes in the place of the later line: that of the step may be of another split
        last[place] = point
    return sorted(last.values(), key=itemgetter("step"))


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Return the lines of steps up to `step`; a last line that a crash truncated is also removed."""
    kept = []
    for number, line in enumerate(read_bytes(path, most=_MOST_BYTES).splitlines(keepends=True), start=1):
        if not line.endswith(b"\n") or read_point(path, number, line)["step"] > step:
            break
        kept.append(line)
    return kept
