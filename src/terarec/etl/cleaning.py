"""Raw texts to values, in files of every format and in served records: white space, missing values, and times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.etl.columns import is_missing, null_mask, text_buffers
from terarec.kernels.cpu.delimited import parse_delimited
from terarec.kernels.encoding_types import DelimitedField, DelimitedLayout
from terarec.spec import SourceSpec

SPACE = " \t\n\v\f\r"
"""ASCII white space, which is trimmed."""

FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The times that are accepted as integers, of the years 1 to 9999; milliseconds of any day since 1978 lie beyond."""

SECONDS = "seconds since 1970 in UTC, of the years 1 to 9999 (milliseconds are to be divided by 1000)"
"""Accepted values of an integer that is a time, for errors."""


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Cleaning of texts. The parser of delimited text does the same.

    Attributes:
        trim: Whether white space around a text is dropped.
        missing: Trimmed texts that mean a missing value; "" always does.
    """

    trim: bool = False
    missing: frozenset[str] = frozenset()

    @classmethod
    def of_files(cls, source: SourceSpec) -> Cleaning:
        """Return the cleaning of files with types of their own; a parser has trimmed delimited text."""
        return cls(source.trim and source.cleaning == "values", frozenset(source.missing) - {""})

    @classmethod
    def of_records(cls, source: SourceSpec) -> Cleaning:
        """Return the cleaning of the raw values of records."""
        return cls.of_files(source) if source.cleaning == "values" else cls()

    @property
    def is_needed(self) -> bool:
        """Whether it does more than to take "" as missing."""
        return self.trim or bool(self.missing)

    def value(self, value: Any) -> Any:
        """Return a raw value, None if it is a text that means a missing one."""
        if not isinstance(value, str):
            return value
        text = value.strip(SPACE) if self.trim else value
        return None if text == "" or text in self.missing else text

    def values(self, values: Sequence[Any]) -> list[Any]:
        """Return cleaned raw values."""
        return list(map(self.value, values))

    def texts(self, texts: pa.Array) -> pa.Array:
        """Return an Arrow array of texts, null where they mean a missing value."""
        if self.trim:
            texts = pc.utf8_trim(texts, SPACE)
        missing = pc.is_in(texts, value_set=pa.array(["", *self.missing], type=texts.type))
        return pc.if_else(missing, pa.scalar(None, type=texts.type), texts)


_WIDTHS = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "I": 2, "p": 2}
_RANGES = {"Y": (1, 9999), "m": (1, 12), "d": (1, 31), "H": (0, 23), "M": (0, 59), "S": (0, 59), "I": (1, 12)}
_PART = re.compile(r"%(.)|([^%]+)", re.DOTALL)


def beyond_years(seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of ``seconds int64[n]`` are out of range, bool[n]; see `LAST_SECOND`."""
    bad: NDArray[np.bool_] = (seconds < FIRST_SECOND) | (seconds > LAST_SECOND)
    return bad


def parse_times(texts: pa.LargeStringArray, form: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the seconds int64[n] of texts written as `form`, and which are invalid, bool[n]; 0 there and for a null.

    Args:
        texts: Times as they are written, large_string[n].
        form: Directives %Y %m %d %H %M %S %I %p, and other characters as they are.
    """
    parts = [(name, literal.encode()) for name, literal in _PART.findall(form)]
    width = sum(_WIDTHS[name] if name else len(literal) for name, literal in parts)
    text, offsets = text_buffers(texts)
    good = np.equal(np.diff(offsets), width)
    seconds = np.zeros(len(texts), dtype=np.int64)
    if good.any():
        # (k, width): times of full width are read as columns of digits, a few calls of NumPy for all rows.
        cells = text[offsets[:-1][good][:, None] + np.arange(width)]
        found, well_written = _read_cells(cells, parts)
        seconds[good] = np.where(well_written, found, 0)
        good[good] = well_written
    # Times of another width, such as 9:05 for 09:05, are parsed by Python; logs repeat their times.
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
        # By Python, as times in records are read.
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
            # In lower case: PM, pm and Pm are all written.
            letters = part | 0x20
            good &= np.isin(letters[:, 0], np.frombuffer(b"ap", dtype=np.uint8)) & (letters[:, 1] == ord("m"))
            values["p"] = (letters[:, 0] == ord("p")).astype(np.int64)
        else:
            digits = part.astype(np.int64) - ord("0")
            value = digits @ 10 ** np.arange(part.shape[1] - 1, -1, -1)
            low, high = _RANGES[name]
            good &= ((digits >= 0) & (digits <= 9)).all(axis=1) & (value >= low) & (value <= high)
            # Any number in range where the text is none, so that a date can be computed.
            values[name] = np.where(good, value, low)
    return _combine(values, good)


def _combine(
    values: Mapping[str, NDArray[np.int64]], good: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
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
    return ((day * 24 + hour) * 60 + value("M", 0)) * 60 + value("S", 0), good & (day < next_month)


_LINE_MARKS = re.compile(r"[\t\r\n]")


def parse_texts(
    texts: pa.LargeStringArray, kind: Literal["integer", "number", "hex32"]
) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """Return the values of m texts, missing for a null or an invalid text, and which are invalid, bool[m]."""
    # Each text is the second field of a line; marks that would end it there occur in no value, nor does "!".
    fields = ["" if text is None else _LINE_MARKS.sub("!", text) for text in texts.to_pylist()]
    content = "".join(f"\t{field}\n" for field in fields).encode()
    layout = DelimitedLayout(fields=(DelimitedField("skip"), DelimitedField(kind)), policy="missing")
    # The parser of delimited text reads them, so that one text is one value in files of every format.
    parsed = parse_delimited(content, layout)
    array = parsed.columns[1]
    if not parsed.faults:
        return array, None
    # A NaN is how tables write a missing number: it is missing, and no fault.
    given = np.array([field != "" and not (kind == "number" and field.lower() in _NOT_A_NUMBER) for field in fields])
    return array, given & is_missing(array)


_NOT_A_NUMBER = ("nan", "-nan")
