# SPDX-License-Identifier: Apache-2.0
"""Raw click logs in Criteo's layout, drawn from a planted model, so that the best reachable AUC is known."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.apps.synthetic import draws
from terarec.apps.synthetic.click_model import (
    CATEGORIES,
    INTEGERS,
    ClickModel,
    category_values,
    draw_categories,
    draw_integers,
    plant,
    scaled_values,
)
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, blocks, check_count, pack, write_log
from terarec.closer import stream
from terarec.errors import ConfigError
from terarec.kernels.cpu._encoding import format_rows, widest_row

_BLOCK_ROWS = 32_768
"""Rows drawn at once: 13 MB of text. Blocks of 8k to 64k rows were equally fast (Zen 3, 2 cores)."""
_THREADS = 2
_PILOT_ROWS = 32_768
_LABEL_STREAM, _MODEL_STREAM, _PILOT_STREAM, _INTEGER_STREAM, _CATEGORY_STREAM = 0, 1, 2, 100, 200


def generate(
    out: Path,
    *,
    rows: int,
    days: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> GenerateReport:
    r"""Write ``out/day_0.tsv`` to ``out/day_{days-1}.tsv`` and ``out/generated.json``.

    A line is ``label \t 13 integers \t 26 categories of 8 hexadecimal digits``; a missing value is empty. The same
    `rows`, `days` and `seed` give the same bytes. Memory stays flat except for 4 bytes a row that the AUC needs.

    Args:
        out: Directory to create; it must not exist, or be empty.
        rows: Rows in all, shared evenly among the days.
        days: Number of files.
        seed: Seed of the click model and of the rows.
        progress: Callback; see `raw_log.Progress`.

    Raises:
        ConfigError: A number out of range, or `out` holds something.
        StorageError: The disk cannot hold the log.
    """
    for name, value, minimum in (("rows", rows, 1), ("days", days, 1), ("seed", seed, 0)):
        check_count(name, value, minimum)
    if days > rows:
        raise ConfigError("generate", f"days: got {days} for {rows} rows, expected at least one row a day")
    options = {"days": days}
    return write_log(out, _pieces(rows, days, seed), rows=rows, seed=seed, options=options, progress=progress)


@dataclass(frozen=True, slots=True)
class _Log:
    """Model of the rows, any range of which can be drawn on its own."""

    seed: int
    num_values: tuple[int, ...]
    model: ClickModel

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Log:
        num_values = tuple(scaled_values(column, rows) for column in CATEGORIES)
        pilot = _draw_features(num_values, lambda stream: draws.uniforms(seed, (_PILOT_STREAM, stream), 0, _PILOT_ROWS))
        return cls(seed, num_values, plant(draws.numbers(seed, (_MODEL_STREAM,)), rows, num_values, pilot))

    def text(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Return rows `start` to `stop` as text, and their packed probabilities and labels."""

        def uniforms(stream: int) -> NDArray[np.float64]:
            return draws.uniforms(self.seed, (stream,), start, stop)

        integers, ranks = _draw_features(self.num_values, uniforms)
        scores = self.model.probabilities(integers, ranks)
        labels = (uniforms(_LABEL_STREAM) < scores).astype(np.uint8)
        values = np.stack([category_values(column, column_ranks) for column, column_ranks in enumerate(ranks)])
        buffer = np.empty((stop - start) * widest_row(len(INTEGERS), len(CATEGORIES)), dtype=np.uint8)
        return buffer[: format_rows(labels, integers, values, buffer)], pack(scores, labels)


def _draw_features(
    num_values: tuple[int, ...], uniforms: Callable[[int], NDArray[np.float64]]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Draw integers int32[13, n] and ranks int64[26, n] from one stream of uniform numbers a column."""
    integers = [draw_integers(column, uniforms(_INTEGER_STREAM + i)) for i, column in enumerate(INTEGERS)]
    ranks = [
        draw_categories(column, num_values[i], uniforms(_CATEGORY_STREAM + i)) for i, column in enumerate(CATEGORIES)
    ]
    return np.stack(integers), np.stack(ranks)


@stream
def _pieces(rows: int, days: int, seed: int) -> Generator[LogText]:
    log = _Log.plan(rows, seed)
    # Days are cut from one range of rows, so that a row does not depend on the number of days.
    bounds = [rows * day // days for day in range(days + 1)]
    # Threads, as NumPy's draws and the compiled formatter release the interpreter's lock.
    with ThreadPoolExecutor(_THREADS) as pool:
        for day in range(days):
            for text, packed in _in_order(pool, log, bounds[day], bounds[day + 1]):
                yield LogText(f"day_{day}.tsv", text.data, len(packed), packed)


def _in_order(
    pool: ThreadPoolExecutor, log: _Log, first: int, last: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint32]]]:
    """Yield the blocks of rows `first` to `last`, drawn in parallel but yielded in order; few wait at a time."""
    waiting: list[Future[tuple[NDArray[np.uint8], NDArray[np.uint32]]]] = []
    for bounds in blocks(last, _BLOCK_ROWS, first):
        waiting.append(pool.submit(log.text, *bounds))
        if len(waiting) > _THREADS:
            yield waiting.pop(0).result()
    for block in waiting:
        yield block.result()
