# SPDX-License-Identifier: Apache-2.0
"""Times in files and records: seconds since 1970 in UTC, and the nanoseconds of the second where there are parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import null_mask, numpy_values, text_buffers
from terarec.spec import SourceColumn
from terarec.spec.times import ACCEPTED_ISO, iso_time
from terarec.spec.workflow import ISO_FORMAT

FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The times that are accepted as integers, of the years 1 to 9999; milliseconds of any day since 1978 lie beyond."""

SECONDS = "seconds since 1970 in UTC, of the years 1 to 9999 (milliseconds are to be divided by 1000)"
"""Accepted values of an integer that is a time, for errors."""

NANOSECONDS = 1_000_000_000
"""Nanoseconds of a second."""


class Times(NamedTuple):
    """Times of n values.

    Attributes:
        seconds: int64[n], rounded down; 0 where a value is missing or bad.
        nanoseconds: int32[n], nanoseconds of the second.
        bad: Which are no times, bool[n].
    """

    seconds: NDArray[np.int64]
    nanoseconds: NDArray[np.int32]
    bad: NDArray[np.bool_]


def has_parts(column: SourceColumn) -> bool:
    """Return whether rows have the nanoseconds of a column, in every format and whatever its values are.

    Neither the format of the files nor that of the times tells: other files of a workflow may hold timestamps.
    """
    return column.type == "time" and column.separator is None


MOMENTS = "a time of the years 1 to 9999"
"""Accepted times of Arrow, for errors."""


def accepted_times(form: str | None) -> str:
    """Describe the values of a column of times, for errors."""
    if form is None:
        return SECONDS
    return ACCEPTED_ISO if form == ISO_FORMAT else f"a time like {form!r}"


def beyond_years(seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of ``seconds int64[n]`` are out of range, bool[n]; see `LAST_SECOND`."""
    bad: NDArray[np.bool_] = (seconds < FIRST_SECOND) | (seconds > LAST_SECOND)
    return bad


def is_moment(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are times that `arrow_times` reads."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def arrow_times(array: pa.Array) -> Times:
    """Return the times of Arrow timestamps or dates; 0 for a null. Those beyond the years 1 to 9999 are bad."""
    if not pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("s" if pa.types.is_date32(array.type) else "ms"))
    a_second = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": NANOSECONDS}[array.type.unit]
    units = np.where(_is_null(array), 0, numpy_values(array.cast(pa.int64())))
    seconds, parts = np.divmod(units, a_second)
    bad = beyond_years(seconds)
    return Times(np.where(bad, 0, seconds), (parts * (NANOSECONDS // a_second)).astype(np.int32), bad)


def parse_times(texts: pa.LargeStringArray, form: str) -> Times:
    """Return the times of texts written as `form`.

    Args:
        texts: Times as they are written, large_string[n].
        form: Directives %Y %m %d %H %M %S %f %z %I %p, and other characters as they are; or `ISO_FORMAT`.
    """
    text, offsets = text_buffers(texts)
    widths = np.diff(offsets)
    left = ~_is_null(texts)
    seconds, nanoseconds = np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=np.int32)
    # Times of full width are read as columns of digits, a few calls of NumPy for all rows.
    for parts in _layouts(form):
        width = sum(part.width for part in parts)
        chosen = np.flatnonzero(left & (widths == width))
        if not len(chosen):
            continue
        cells = _read_cells(text[offsets[chosen][:, None] + np.arange(width)], parts)
        good = chosen[~cells.bad]
        seconds[good], nanoseconds[good] = cells.seconds[~cells.bad], cells.nanoseconds[~cells.bad]
        left[good] = False
    # Times of another width, such as 9:05 for 09:05, are parsed by Python; logs repeat their times.
    if left.any():
        others = texts.filter(pa.array(left)).to_pylist()
        known = {value: _read_time(value, form) for value in dict.fromkeys(others)}
        read = [known[value] for value in others]
        seconds[left], nanoseconds[left] = (
            [time[0] if time else 0 for time in read],
            [time[1] if time else 0 for time in read],
        )
        left[left] = [time is None for time in read]
    return Times(seconds, nanoseconds, left)


def read_time(text: str, form: str) -> tuple[int, int]:
    """Return the seconds of a text written as `form`, rounded down, and the nanoseconds of the second."""
    if form == ISO_FORMAT:
        return iso_time(text)
    rest = 0
    if "%f" in form:
        # Python reads microseconds; the digits behind them are nanoseconds.
        match = _pattern(form).fullmatch(text)
        if match is not None and len(match["f"]) > 6:
            rest = int(match["f"][6:].ljust(3, "0"))
            text = text[: match.start("f") + 6] + text[match.end("f") :]
    moment = datetime.strptime(text, form)
    passed = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    return passed.days * 86_400 + passed.seconds, passed.microseconds * 1000 + rest


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _read_time(text: str, form: str) -> tuple[int, int] | None:
    try:
        return read_time(text, form)
    except ValueError:
        return None


def _is_null(array: pa.Array) -> NDArray[np.bool_]:
    mask = null_mask(array)
    return np.zeros(len(array), dtype=np.bool_) if mask is None else mask


class _Part(NamedTuple):
    """A directive without its %, or "" and characters as they are, in a text of a known width."""

    name: str
    width: int
    literal: bytes = b""


_Layout: TypeAlias = tuple[_Part, ...]

_WIDTHS: Mapping[str, Sequence[int]] = {
    "Y": (4,),
    **dict.fromkeys("mdHMSIp", (2,)),
    "f": range(1, 10),
    "z": (1, 5, 6),  # Z, +0100 and +01:00
}
_RANGES = {"Y": (1, 9999), "m": (1, 12), "d": (1, 31), "H": (0, 23), "M": (0, 59), "S": (0, 59), "I": (1, 12)}
_DIRECTIVE = re.compile(r"%(.)|([^%]+)", re.DOTALL)
_ISO_FORMS = (
    "%Y-%m-%d",
    *(
        f"%Y-%m-%d{separator}%H:%M:%S{fraction}{zone}"
        for separator in "T "
        for fraction in ("", ".%f")
        for zone in ("", "%z")
    ),
)
"""The most common forms of ISO 8601."""


@lru_cache(maxsize=256)
def _layouts(form: str) -> tuple[_Layout, ...]:
    """Return the layouts of all widths that texts of a form may have."""
    layouts: list[_Layout] = []
    for one in _ISO_FORMS if form == ISO_FORMAT else (form,):
        partial_layouts: list[_Layout] = [()]
        for name, literal in _DIRECTIVE.findall(one):
            encoded = literal.encode()
            partial_layouts = [
                (*parts, _Part(name, width, encoded))
                for parts in partial_layouts
                for width in (_WIDTHS[name] if name else (len(encoded),))
            ]
        layouts += partial_layouts
    return tuple(layouts)


@lru_cache(maxsize=256)
def _pattern(form: str) -> re.Pattern[str]:
    """Return the pattern that tells where a text of a form has its %f."""
    patterns = {"Y": r"\d{4}", "p": "[AaPp][Mm]", "f": r"(?P<f>\d{1,9})", "z": r"Z|[+-]\d\d:?\d\d"}
    pieces = [
        f"(?:{patterns.get(name, '[0-9]{1,2}')})" if name else re.sub(r"(?:\\?\s)+", r"\\s+", re.escape(literal))
        for name, literal in _DIRECTIVE.findall(form)
    ]
    return re.compile("".join(pieces))


def _read_cells(cells: NDArray[np.uint8], parts: _Layout) -> Times:
    """Return the times of texts of full width, ``cells uint8[k, width]``."""
    good = np.ones(len(cells), dtype=np.bool_)
    values: dict[str, NDArray[np.int64]] = {}
    at = 0
    for name, width, literal in parts:
        part = cells[:, at : at + width]
        at += width
        if not name:
            good &= (part == np.frombuffer(literal, dtype=np.uint8)).all(axis=1)
        elif name == "p":
            # In lower case: PM, pm and Pm are all written.
            letters = part | 0x20
            good &= np.isin(letters[:, 0], np.frombuffer(b"ap", dtype=np.uint8)) & (letters[:, 1] == ord("m"))
            values["p"] = (letters[:, 0] == ord("p")).astype(np.int64)
        elif name == "z":
            values["z"], is_zone = _offsets(part)
            good &= is_zone
        elif name == "f":
            value, is_number = _numbers(part)
            values["f"] = value * 10 ** (9 - width)
            good &= is_number
        else:
            value, is_number = _numbers(part)
            low, high = _RANGES[name]
            good &= is_number & (value >= low) & (value <= high)
            # Any number in range where the text is none, so that a date can be computed.
            values[name] = np.where(good, value, low)
    return _combine(values, good)


def _numbers(cells: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the numbers of columns of digits, int64[k], and which are numbers, bool[k]."""
    digits = cells.astype(np.int64) - ord("0")
    are_digits = np.asarray(((digits >= 0) & (digits <= 9)).all(axis=1), dtype=np.bool_)
    return digits @ 10 ** np.arange(cells.shape[1] - 1, -1, -1), are_digits


def _offsets(cells: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the seconds by which zones are ahead of UTC, int64[k], and which are zones, bool[k]."""
    if cells.shape[1] == 1:
        is_utc: NDArray[np.bool_] = np.equal(cells[:, 0], ord("Z"))  # as in Python; ISO 8601 reads z, too, one by one
        return np.zeros(len(cells), dtype=np.int64), is_utc
    (hours, are_hours), (minutes, are_minutes) = _numbers(cells[:, 1:3]), _numbers(cells[:, -2:])
    sign = cells[:, 0]
    good = are_hours & are_minutes & np.isin(sign, np.frombuffer(b"+-", dtype=np.uint8)) & (hours < 24) & (minutes < 60)
    if cells.shape[1] == 6:
        good &= cells[:, 3] == ord(":")
    return (hours * 60 + minutes) * np.where(sign == ord("-"), -60, 60), good


def _combine(values: Mapping[str, NDArray[np.int64]], good: NDArray[np.bool_]) -> Times:
    def value(name: str, default: int) -> NDArray[np.int64]:
        return values.get(name, np.full(len(good), default, dtype=np.int64))

    # Parts that the form leaves out are those of 1900-01-01 00:00:00, as in Python's `strptime`, which reads the rest.
    months = (value("Y", 1900) - 1970) * 12 + value("m", 1) - 1
    first_day = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    next_month = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    day = first_day + value("d", 1) - 1
    hour = value("H", 0)
    # 12 AM is hour 0, and 12 PM is hour 12.
    if "I" in values:
        hour = values["I"] % 12 + 12 * value("p", 0)
    # 30 February has digits in range: only the length of its month rejects it.
    seconds = ((day * 24 + hour) * 60 + value("M", 0)) * 60 + value("S", 0) - value("z", 0)
    return Times(seconds, value("f", 0).astype(np.int32), ~(good & (day < next_month)))
