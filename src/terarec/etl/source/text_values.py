"""Texts of other files than delimited ones as integers, numbers and hexadecimal values, by the same parser."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import Column
from terarec.kernels.cpu.delimited import parse_delimited
from terarec.kernels.delimited_types import DelimitedField, DelimitedLayout

_LINE_MARKS = re.compile(r"[\t\r\n]")


def parse_texts(
    texts: pa.LargeStringArray, kind: Literal["integer", "number", "hex32"]
) -> tuple[Column, NDArray[np.bool_] | None]:
    """The values of m texts, null or what is no value of `kind` being missing, and which are no value, bool[m]."""
    # Each text is the second field of a line; marks that would end it there stand in no value, as "!" does in none.
    fields = ["" if text is None else _LINE_MARKS.sub("!", text) for text in texts.to_pylist()]
    content = "".join(f"\t{field}\n" for field in fields).encode()
    layout = DelimitedLayout(fields=(DelimitedField("skip"), DelimitedField(kind)), policy="missing")
    parsed = parse_delimited(content, layout)
    values = parsed.columns[1]
    assert values is not None
    column = Column(kind, values.values, None if kind == "number" else values.missing)
    if not parsed.faults:
        return column, None
    given = np.array([field != "" and not (kind == "number" and field.lower() in _NOT_A_NUMBER) for field in fields])
    return column, given & column.is_missing()


_NOT_A_NUMBER = ("nan", "-nan")
