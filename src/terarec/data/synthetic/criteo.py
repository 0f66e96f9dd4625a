"""Raw click logs in Criteo's layout, drawn from a planted model, so that the best reachable AUC is known."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.data.synthetic.best_auc import pack, packed_auc
from terarec.data.synthetic.click_model import ClickModel, plant
from terarec.data.synthetic.columns import (
    CATEGORIES,
    INTEGERS,
    category_values,
    draw_categories,
    draw_integers,
    scaled_values,
)
from terarec.errors import ConfigError
from terarec.formats import new_directory
from terarec.kernels.cpu._encoding import format_rows, widest_row

REPORT_FILE = "generated.json"

_BLOCK_ROWS = 32_768
"""Rows drawn at once: 13 MB of text. Blocks of 8k to 64k rows were equally fast (Zen 3, 2 cores)."""
_THREADS = 2
_PILOT_ROWS = 32_768
_LABEL_STREAM, _MODEL_STREAM, _PILOT_STREAM, _INTEGER_STREAM, _CATEGORY_STREAM = 0, 1, 2, 100, 200


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReport:
    """What was generated.

    Attributes:
        best_auc: AUC of the true click probabilities against the labels drawn, over all rows.
        rows: rows written.
        days: files written.
        seed: what the log was drawn with.
        positives: rows with label 1.
        files: the files' names, in order of days.
        text_bytes: size of the files together.
        seconds: time taken.
        rows_per_second: `rows` / `seconds`.
    """

    best_auc: float
    rows: int
    days: int
    seed: int
    positives: int
    files: tuple[str, ...]
    text_bytes: int
    seconds: float
    rows_per_second: float


def generate(
    out: Path,
    *,
    rows: int,
    days: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> GenerateReport:
    r"""Write ``out/day_0.tsv`` to ``out/day_{days-1}.tsv`` and ``out/generated.json``.

    A line is ``label \t 13 integers \t 26 categories of 8 hexadecimal digits``; a missing value is empty. The same
    `rows`, `days` and `seed` give the same bytes. Memory stays flat but for 4 bytes a row that the AUC needs.

    Args:
        out: directory to make; it must not exist, or be empty.
        rows: rows in all, shared evenly among the days.
        days: number of files.
        seed: of the click model and of the rows.
        progress: called with (rows done, rows) after every block.

    Raises:
        ConfigError: a number out of range, or `out` holds something.
        StorageError: the disk cannot hold the log.
    """
    _check(rows, days, seed)
    started = time.perf_counter()
    with new_directory(out) as partial:
        packed = _write_days(_Log.plan(rows, seed), partial, rows, days, progress)
        report = _report(partial, packed, days, seed, started)
        known = {key: value for key, value in asdict(report).items() if "second" not in key}
        (partial / REPORT_FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="ascii")
    return report


def _check(rows: int, days: int, seed: int) -> None:
    for name, value, minimum in (("rows", rows, 1), ("days", days, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"generate: {name}: got {value!r}, expected an integer >= {minimum}")
    if days > rows:
        raise ConfigError(f"generate: days: got {days} for {rows} rows, expected at least one row a day")


@dataclass(frozen=True, slots=True)
class _Log:
    """Everything that a row depends on: any range of rows can be drawn on its own."""

    seed: int
    num_values: tuple[int, ...]
    model: ClickModel

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Log:
        num_values = tuple(scaled_values(column, rows) for column in CATEGORIES)
        pilot = _draw_features(num_values, lambda stream: _uniforms(seed, (_PILOT_STREAM, stream), 0, _PILOT_ROWS))
        generator = np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=(_MODEL_STREAM,))))
        return cls(seed, num_values, plant(generator, rows, num_values, pilot))

    def text(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Rows `start` to `stop` as text, and their packed probabilities and labels."""

        def uniforms(stream: int) -> NDArray[np.float64]:
            return _uniforms(self.seed, (stream,), start, stop)

        integers, ranks = _draw_features(self.num_values, uniforms)
        scores = self.model.probabilities(integers, ranks)
        labels = (uniforms(_LABEL_STREAM) < scores).astype(np.uint8)
        values = np.stack([category_values(column, column_ranks) for column, column_ranks in enumerate(ranks)])
        buffer = np.empty((stop - start) * widest_row(len(INTEGERS), len(CATEGORIES)), dtype=np.uint8)
        return buffer[: format_rows(labels, integers, values, buffer)], pack(scores, labels)


def _draw_features(
    num_values: tuple[int, ...], uniforms: Callable[[int], NDArray[np.float64]]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Integers int32[13, n] and ranks int64[26, n] from one stream of uniform numbers a column."""
    integers = [draw_integers(column, uniforms(_INTEGER_STREAM + i)) for i, column in enumerate(INTEGERS)]
    ranks = [
        draw_categories(column, num_values[i], uniforms(_CATEGORY_STREAM + i)) for i, column in enumerate(CATEGORIES)
    ]
    return np.stack(integers), np.stack(ranks)


def _uniforms(seed: int, stream: tuple[int, ...], start: int, stop: int) -> NDArray[np.float64]:
    """Numbers `start` to `stop` of a stream; one number is one step of the bit generator, so it can jump."""
    bits = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=stream))
    return np.random.Generator(bits.advance(start)).random(stop - start)


def _write_days(
    log: _Log, directory: Path, rows: int, days: int, progress: Callable[[int, int], None] | None
) -> NDArray[np.uint32]:
    packed = np.empty(rows, dtype=np.uint32)
    bounds = [rows * day // days for day in range(days + 1)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for day in range(days):
            start = bounds[day]
            with (directory / f"day_{day}.tsv").open("wb") as file:
                for text, block in _in_order(pool, log, start, bounds[day + 1]):
                    file.write(text.data)
                    packed[start : start + len(block)] = block
                    start += len(block)
                    if progress is not None:
                        progress(start, rows)
    return packed


def _in_order(
    pool: ThreadPoolExecutor, log: _Log, first: int, last: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint32]]]:
    """The blocks of rows `first` to `last`, drawn in parallel but handed out in order; few wait at a time."""
    waiting: list[Future[tuple[NDArray[np.uint8], NDArray[np.uint32]]]] = []
    for start in range(first, last, _BLOCK_ROWS):
        waiting.append(pool.submit(log.text, start, min(start + _BLOCK_ROWS, last)))
        if len(waiting) > _THREADS:
            yield waiting.pop(0).result()
    for block in waiting:
        yield block.result()


def _report(directory: Path, packed: NDArray[np.uint32], days: int, seed: int, started: float) -> GenerateReport:
    files = tuple(f"day_{day}.tsv" for day in range(days))
    text_bytes = sum((directory / name).stat().st_size for name in files)
    positives = int((packed & np.uint32(1)).sum(dtype=np.int64))
    best_auc = packed_auc(packed)
    seconds = time.perf_counter() - started
    return GenerateReport(
        best_auc=best_auc,
        rows=len(packed),
        days=days,
        seed=seed,
        positives=positives,
        files=files,
        text_bytes=text_bytes,
        seconds=seconds,
        rows_per_second=len(packed) / seconds,
    )
