"""Times as text -> seconds since 1970 in UTC, by the formats of `datetime.strptime`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.etl.cleaning import FIRST_SECOND, LAST_SECOND
from terarec.etl.columns import is_missing, null_mask, text_buffers
from terarec.kernels.cpu.delimited import parse_delimited
from terarec.kernels.delimited_types import DelimitedField, DelimitedLayout

_WIDTHS = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "I": 2, "p": 2}
_RANGES = {"Y": (1, 9999), "m": (1, 12), "d": (1, 31), "H": (0, 23), "M": (0, 59), "S": (0, 59), "I": (1, 12)}
_PART = re.compile(r"%(.)|([^%]+)", re.DOTALL)


def beyond_years(seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of ``seconds int64[n]`` are no time, bool[n]; see `LAST_SECOND`."""
    bad: NDArray[np.bool_] = (seconds < FIRST_SECOND) | (seconds > LAST_SECOND)
    return bad


def parse_times(texts: pa.LargeStringArray, form: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the seconds int64[n] of texts written as `form`, and which are invalid, bool[n]; 0 there and for a null.

    Args:
        texts: large_string[n].
        form: Directives %Y %m %d %H %M %S %I %p, and other characters as they are.
    """
    parts = [(name, literal.encode()) for name, literal in _PART.findall(form)]
    width = sum(_WIDTHS[name] if name else len(literal) for name, literal in parts)
    text, offsets = text_buffers(texts)
    good = np.equal(np.diff(offsets), width)
    seconds = np.zeros(len(texts), dtype=np.int64)
    if good.any():
        cells = text[offsets[:-1][good][:, None] + np.arange(width)]
        found, well_written = _read_cells(cells, parts)
        seconds[good] = np.where(well_written, found, 0)
        good[good] = well_written
    # What is written in another width, such as 9:05 for 09:05, is left to Python; logs repeat their times.
    others = texts.filter(pa.array(~good))
    if len(others) > others.null_count:
        known = {value: _seconds(value, form) for value in pc.unique(others).to_pylist() if value}
        found_others = [known.get(value) for value in others.to_pylist()]
        seconds[~good] = [value or 0 for value in found_others]
        good[~good] = [value is not None for value in found_others]
    bad, missing = ~good, null_mask(texts)
    if missing is not None:
        bad &= ~missing
    return seconds, bad


def _seconds(text: str, form: str) -> int | None:
    try:
        return int(datetime.strptime(text, form).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def _read_cells(
    cells: NDArray[np.uint8], parts: list[tuple[str, bytes]]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the seconds int64[k] of times of full width, ``cells uint8[k, width]``, and which are valid, bool[k]."""
    good = np.ones(len(cells), dtype=np.bool_)
    values: dict[str, NDArray[np.int64]] = {}
    at = 0
    for name, literal in parts:
        part = cells[:, at : at + (_WIDTHS[name] if name else len(literal))]
        at += part.shape[1]
        if not name:
            good &= (part == np.frombuffer(literal, dtype=np.uint8)).all(axis=1)
        elif name == "p":
            letters = part | 0x20
            good &= np.isin(letters[:, 0], np.frombuffer(b"ap", dtype=np.uint8)) & (letters[:, 1] == ord("m"))
            values["p"] = (letters[:, 0] == ord("p")).astype(np.int64)
        else:
            digits = part.astype(np.int64) - ord("0")
            value = digits @ 10 ** np.arange(part.shape[1] - 1, -1, -1)
            low, high = _RANGES[name]
            good &= ((digits >= 0) & (digits <= 9)).all(axis=1) & (value >= low) & (value <= high)
            values[name] = np.where(good, value, low)
    return _combine(values, good)


def _combine(
    values: Mapping[str, NDArray[np.int64]], good: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    def value(name: str, default: int) -> NDArray[np.int64]:
        return values.get(name, np.full(len(good), default, dtype=np.int64))

    months = (value("Y", 1900) - 1970) * 12 + value("m", 1) - 1
    first_day = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    next_month = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    day = first_day + value("d", 1) - 1
    hour = value("H", 0)
    if "I" in values:
        hour = values["I"] % 12 + 12 * value("p", 0)
    return ((day * 24 + hour) * 60 + value("M", 0)) * 60 + value("S", 0), good & (day < next_month)


_LINE_MARKS = re.compile(r"[\t\r\n]")


def parse_texts(
    texts: pa.LargeStringArray, kind: Literal["integer", "number", "hex32"]
) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """Return the values of m texts, missing for a null or an invalid text, and which are invalid, bool[m]."""
    # Each text is the second field of a line; marks that would end it there stand in no value, as "!" does in none.
    fields = ["" if text is None else _LINE_MARKS.sub("!", text) for text in texts.to_pylist()]
    content = "".join(f"\t{field}\n" for field in fields).encode()
    layout = DelimitedLayout(fields=(DelimitedField("skip"), DelimitedField(kind)), policy="missing")
    parsed = parse_delimited(content, layout)
    array = parsed.columns[1]
    if not parsed.faults:
        return array, None
    given = np.array([field != "" and not (kind == "number" and field.lower() in _NOT_A_NUMBER) for field in fields])
    return array, given & is_missing(array)


_NOT_A_NUMBER = ("nan", "-nan")
