"""Cleaning of raw values, in files of every format and in served records: white space and texts for missing values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

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

    def texts(self, texts: Any) -> Any:
        """Return an Arrow array of texts, null where they mean a missing value."""
        if self.trim:
            texts = pc.utf8_trim(texts, SPACE)
        missing = pc.is_in(texts, value_set=pa.array(["", *self.missing], type=texts.type))
        return pc.if_else(missing, pa.scalar(None, type=texts.type), texts)
