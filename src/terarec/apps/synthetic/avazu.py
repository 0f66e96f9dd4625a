# SPDX-License-Identifier: Apache-2.0
"""Raw logs of clicks on mobile advertisements in Avazu's layout, drawn from a planted model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.apps.synthetic import draws, raw_log
from terarec.apps.synthetic.click_model import (
    CategoryColumn,
    ClickModel,
    SignalShape,
    category_values,
    draw_categories,
    plant,
    scaled_values,
)
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, blocks, drawn, write_log

FILE = "train.csv"
FULL_ROWS = 40_428_967
"""Rows of the public training file, for which the numbers of values are given."""
DAYS = 10
_FIRST_SECOND = 1_413_849_600  # 2014-10-21 00:00 UTC

_SITE = ("site_id", "site_domain", "site_category")
_APP = ("app_id", "app_domain", "app_category")
_VALUES: Mapping[str, int] = {
    "C1": 7,
    "banner_pos": 7,
    "site_id": 4_737,
    "site_domain": 7_745,
    "site_category": 26,
    "app_id": 8_552,
    "app_domain": 559,
    "app_category": 36,
    "device_id": 2_686_408,
    "device_ip": 6_729_486,
    "device_model": 8_251,
    "device_type": 5,
    "device_conn_type": 4,
    "C14": 2_626,
    "C15": 8,
    "C16": 9,
    "C17": 435,
    "C18": 4,
    "C19": 68,
    "C20": 172,
    "C21": 60,
}
"""Numbers of values in the public training file."""
_CODES: Mapping[str, tuple[int, ...]] = {
    "C1": (1005, 1002, 1010, 1012, 1007, 1001, 1008),
    "banner_pos": (0, 1, 7, 2, 4, 5, 3),
    "device_type": (1, 0, 4, 5, 2),
    "device_conn_type": (0, 2, 3, 5),
    "C15": (320, 300, 216, 728, 120, 1024, 480, 768),
    "C16": (50, 250, 36, 480, 90, 20, 768, 320, 1024),
    "C18": (0, 3, 2, 1),
}
"""Values of columns that hold a few small numbers; frequent ones first."""
_FIRST_CODE: Mapping[str, int] = {"C14": 375, "C17": 112, "C19": 33, "C20": 100_000, "C21": 1}
"""Columns of further numbers, each with its first number."""

_HOUR_OF_DAY = len(_VALUES)
_NAMES = tuple(_VALUES)
_CROSSED = (("site_id", "device_model"), ("app_id", "C14"), ("C14", "banner_pos"), ("C17", "C21"), ("C1", "C20"))
_SHAPE = SignalShape(
    medians=(),
    crossed=tuple((_NAMES.index(first), _NAMES.index(second)) for first, second in _CROSSED),
    positive_share=0.17,
)
_APP_SHARE = 0.36

_BLOCK_ROWS = 32_768
_PILOT_ROWS = 32_768
_LABEL_STREAM, _MODEL_STREAM, _PILOT_STREAM, _PLACE_STREAM, _ID_STREAM, _COLUMN_STREAM = 0, 1, 2, 3, 4, 100


def generate(out: Path, *, rows: int, seed: int = 0, progress: Progress | None = None) -> GenerateReport:
    """Write ``out/train.csv``, with a header line, and ``out/generated.json``.

    The rows are in order of their hour and cover ten days from 2014-10-21 on. The same `rows` and `seed` give the same
    bytes. Numbers of values shrink with the rows.

    `rows` are the lines without the header; other arguments and errors are those of `raw_log.write_log`.
    """
    return write_log(out, _pieces(rows, seed), rows=rows, seed=seed, progress=progress)


@dataclass(frozen=True, slots=True)
class _Log:
    """Model of the rows, any range of which can be drawn on its own."""

    rows: int
    seed: int
    num_values: tuple[int, ...]
    model: ClickModel

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Log:
        columns = [CategoryColumn(num_values=count) for count in _VALUES.values()]
        num_values = tuple(scaled_values(column, rows, FULL_ROWS) for column in columns)
        hours = np.arange(_PILOT_ROWS) * DAYS * 24 // _PILOT_ROWS
        pilot = _draw_ranks(num_values, hours, seed, (_PILOT_STREAM,), 0)
        model = plant(
            draws.numbers(seed, (_MODEL_STREAM,)),
            rows,
            (*num_values, 24),
            (np.empty((0, _PILOT_ROWS), dtype=np.int32), pilot),
            _SHAPE,
        )
        return cls(rows, seed, num_values, model)

    def piece(self, start: int, stop: int) -> LogText:
        """Return rows `start` to `stop`."""
        numbers = np.arange(start, stop)
        hours = numbers * (DAYS * 24) // self.rows
        ranks = _draw_ranks(self.num_values, hours, self.seed, (), start)
        chances = self.model.probabilities(np.empty((0, stop - start), dtype=np.int32), ranks)
        uniforms = draws.uniforms(self.seed, (_LABEL_STREAM,), start, stop)
        clicked, packed = drawn(chances.astype(np.float64), uniforms)
        # Beyond int64, as Avazu's ids are: a reader that parses them as integers has to notice.
        ids = np.uint64(10**19) + (draws.traits(self.seed, _ID_STREAM, numbers) * 8e18).astype(np.uint64)
        values = [_texts(column, ranks[column]) for column in range(len(_NAMES))]
        stamps = raw_log.clock(_FIRST_SECOND + 3600 * hours, "%y%m%d%H")
        text = raw_log.joined([ids, clicked.astype(np.int8), stamps, *values], ",")
        return LogText(FILE, text, stop - start, packed)


def _pieces(rows: int, seed: int) -> Iterator[LogText]:
    log = _Log.plan(rows, seed)
    yield LogText(FILE, (",".join(("id", "click", "hour", *_NAMES)) + "\n").encode())
    for block in blocks(rows, _BLOCK_ROWS):
        yield log.piece(*block)


def _draw_ranks(
    num_values: tuple[int, ...], hours: NDArray[np.int64], seed: int, stream: tuple[int, ...], start: int
) -> NDArray[np.int64]:
    """Draw ranks int64[22, n] of the columns and, last, the hour of day; an ad is on a site or in an app."""
    stop = start + len(hours)
    ranks = np.empty((len(num_values) + 1, len(hours)), dtype=np.int64)
    for index, (name, count) in enumerate(zip(_NAMES, num_values, strict=True)):
        uniforms = draws.uniforms(seed, (*stream, _COLUMN_STREAM + index), start, stop)
        ranks[index] = draw_categories(CategoryColumn(num_values=_VALUES[name]), count, uniforms)
    in_app = draws.uniforms(seed, (*stream, _PLACE_STREAM), start, stop) < _APP_SHARE
    for names, is_elsewhere in ((_SITE, in_app), (_APP, ~in_app)):
        for name in names:
            # Avazu has one fixed value for "no site" and one for "no app", the most frequent of each column.
            ranks[_NAMES.index(name), is_elsewhere] = 0
    ranks[_HOUR_OF_DAY] = hours % 24
    return ranks


def _texts(column: int, ranks: NDArray[np.int64]) -> raw_log.Column:
    name = _NAMES[column]
    if name in _CODES:
        return np.array(_CODES[name])[ranks]
    if name in _FIRST_CODE:
        # C20 is -1 where it is not known, which is the most frequent of its values.
        return np.where((name == "C20") & (ranks == 0), -1, _FIRST_CODE[name] + ranks)
    return raw_log.hexadecimal(category_values(column, ranks).astype(np.uint32))
