# SPDX-License-Identifier: Apache-2.0
"""Raw texts to values, in files of every format and in served records: white space and missing values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.etl.columns import is_missing
from terarec.kernels.cpu.delimited import DelimitedField, DelimitedLayout, parse_delimited
from terarec.spec import SourceSpec

SPACE = " \t\n\v\f\r"
"""ASCII white space, which is trimmed."""


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
    is_value = np.array([field != "" and not (kind == "number" and field.lower() in _NOT_A_NUMBER) for field in fields])
    return array, is_value & is_missing(array)


_NOT_A_NUMBER = ("nan", "-nan")
