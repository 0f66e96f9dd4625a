# SPDX-License-Identifier: Apache-2.0
"""Steps without a state, with what they make of a few rows; the behaviour suite runs on each."""

import math
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from terarec.etl.ops import (
    Bucketize,
    Clip,
    Cross,
    DateParts,
    Explode,
    FillMissing,
    GivenIds,
    HashBucket,
    KeepRows,
    LambdaOp,
    ListSlice,
    LogOp,
    Operator,
    Pad,
    Rename,
    SplitText,
)


@dataclass(frozen=True)
class Case:
    """`inputs`: name -> (kind, values); `expected`: the columns that the step writes; `rows`: ids that are left."""

    name: str
    step: Operator
    inputs: dict[str, tuple[str, list[Any]]]
    expected: dict[str, tuple[str, list[Any]]]
    rows: list[int] | None = None
    gone: tuple[str, ...] = field(default=())


def price_and_half(price: pa.Array, brand: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The price of known brands, and half of it."""
    known = pc.if_else(pc.is_valid(brand), price, pa.scalar(None, pa.float64()))
    return known, pc.divide(known, 2.0)


def length(brand: pa.Array) -> pa.Array:
    """Characters of a text."""
    return pc.cast(pc.utf8_length(brand), pa.int64())


NUMBERS = ("number", [1.0, None, -2.5, 1e6])
INTEGERS = ("integer", [3, None, -7, 2**60])
TEXTS = ("text", ["a", None, "", "ü"])
HEX = ("hex32", [10, None, 0, 2**32 - 1])
LISTS = ("integer", [[1, 2, 3, 4], [], [5], [None, 6, 7]])
TEXT_LISTS = ("text", [["a", "b", "c"], [], ["d"], [None, "e"]])

CASES = [
    Case(
        "date parts",
        DateParts(columns=("t",), parts=("year", "month", "day", "day_of_year", "weekday", "hour", "minute", "second")),
        {"t": ("integer", [0, None, 951_782_399, -1])},  # 2000-02-28 23:59:59
        {
            "t_year": ("integer", [1970, None, 2000, 1969]),
            "t_month": ("integer", [1, None, 2, 12]),
            "t_day": ("integer", [1, None, 28, 31]),
            "t_day_of_year": ("integer", [1, None, 59, 365]),
            "t_weekday": ("integer", [3, None, 0, 2]),
            "t_hour": ("integer", [0, None, 23, 23]),
            "t_minute": ("integer", [0, None, 59, 59]),
            "t_second": ("integer", [0, None, 59, 59]),
        },
    ),
    Case(
        "date parts of lists in local time",
        DateParts(columns=("t",), utc_offset=-3600),
        {"t": ("integer", [[0, None, 7200], []])},
        {"t_hour": ("integer", [[23, None, 1], []]), "t_weekday": ("integer", [[2, None, 3], []])},
    ),
    Case(
        "fill numbers and say where",
        FillMissing(columns=("x",), value=0.5, indicator=True),
        {"x": NUMBERS},
        {"x": ("number", [1.0, 0.5, -2.5, 1e6]), "x_missing": ("number", [0.0, 1.0, 0.0, 0.0])},
    ),
    Case(
        "fill integers under another name",
        FillMissing(columns=("x",), value=-1, outputs=("y",)),
        {"x": INTEGERS},
        {"x": INTEGERS, "y": ("integer", [3, -1, -7, 2**60])},
    ),
    Case("fill text", FillMissing(columns=("x",), value="?"), {"x": TEXTS}, {"x": ("text", ["a", "?", "?", "ü"])}),
    Case("fill hex", FillMissing(columns=("x",), value="fF"), {"x": HEX}, {"x": ("hex32", [10, 255, 0, 2**32 - 1])}),
    Case(
        "fill lists",
        FillMissing(columns=("x",), value=0, indicator=True),
        {"x": LISTS},
        {
            "x": ("integer", [[1, 2, 3, 4], [], [5], [0, 6, 7]]),
            "x_missing": ("number", [[0.0] * 4, [], [0.0], [1.0, 0.0, 0.0]]),
        },
    ),
    Case(
        "clip numbers",
        Clip(columns=("x",), low=-1.0, high=10.0),
        {"x": NUMBERS},
        {"x": ("number", [1.0, None, -1.0, 10.0])},
    ),
    Case("clip integers", Clip(columns=("x",), low=1), {"x": INTEGERS}, {"x": ("integer", [3, None, 1, 2**60])}),
    Case(
        "logarithm of integers",
        LogOp(columns=("x",), shift=8.0),
        {"x": INTEGERS},
        {"x": ("number", [math.log(11.0), None, 0.0, math.log(2.0**60 + 8)])},
    ),
    Case(
        "intervals",
        Bucketize(columns=("x",), boundaries=(-2.5, 1.0, 5.0), outputs=("i",)),
        {"x": NUMBERS},
        {"i": ("id", [3, 0, 2, 4])},
    ),
    Case(
        "buckets of text",
        HashBucket(columns=("x",), buckets=1000),
        {"x": TEXTS},
        {"x": ("id", [717, 0, 0, 149])},
    ),
    Case(
        "buckets of integers",
        HashBucket(columns=("x",), buckets=1000),
        {"x": INTEGERS},
        {"x": ("id", [108, 0, 922, 366])},
    ),
    Case("buckets of hex", HashBucket(columns=("x",), buckets=1000), {"x": HEX}, {"x": ("id", [982, 0, 189, 422])}),
    Case(
        "buckets of lists",
        HashBucket(columns=("x",), buckets=1000),
        {"x": ("text", [["a"], [], ["\u00fc", None]])},
        {"x": ("id", [[717], [], [149, 0]])},
    ),
    Case(
        "given ids and keys",
        GivenIds(columns=("x", "k"), rows=(8, None), outputs=("i", "k")),
        {"x": ("integer", [7, 0, 3, 3]), "k": INTEGERS},
        {"i": ("id", [7, 0, 3, 3]), "k": INTEGERS},
    ),
    Case(
        "given ids in lists",
        GivenIds(columns=("x",), rows=(6,), max_length=2),
        {"x": ("integer", [[5, 0], [], [1]])},
        {"x": ("id", [[5, 0], [], [1]])},
    ),
    Case(
        "cross",
        Cross(columns=("t", "i", "h"), output="c"),
        {"t": TEXTS, "i": INTEGERS, "h": HEX},
        {
            "c": (
                "text",
                ["a\x1f3\x1f0000000a", None, "\x1f-7\x1f00000000", "\u00fc\x1f1152921504606846976\x1fffffffff"],
            )
        },
    ),
    Case(
        "first items", ListSlice(columns=("x",), stop=2), {"x": LISTS}, {"x": ("integer", [[1, 2], [], [5], [None, 6]])}
    ),
    Case(
        "last items of text",
        ListSlice(columns=("x",), start=-2),
        {"x": TEXT_LISTS},
        {"x": ("text", [["b", "c"], [], ["d"], [None, "e"]])},
    ),
    Case(
        "inner items",
        ListSlice(columns=("x",), start=1, stop=-1, outputs=("y",)),
        {"x": LISTS},
        {"x": LISTS, "y": ("integer", [[2, 3], [], [], [6]])},
    ),
    Case(
        "pad",
        Pad(columns=("x",), length=3, value=-1),
        {"x": LISTS},
        {"x": ("integer", [[1, 2, 3], [-1, -1, -1], [5, -1, -1], [None, 6, 7]])},
    ),
    Case(
        "pad text",
        Pad(columns=("x",), length=2, value="-"),
        {"x": TEXT_LISTS},
        {"x": ("text", [["a", "b"], ["-", "-"], ["d", "-"], [None, "e"]])},
    ),
    Case(
        "explode",
        Explode(columns=("x", "y")),
        {"x": LISTS, "y": ("text", [["a", "b", "c", "d"], [], ["e"], ["f", None, "g"]]), "z": NUMBERS},
        {
            "x": ("integer", [1, 2, 3, 4, 5, None, 6, 7]),
            "y": ("text", ["a", "b", "c", "d", "e", "f", None, "g"]),
            "z": ("number", [1.0, 1.0, 1.0, 1.0, -2.5, 1e6, 1e6, 1e6]),
        },
        rows=[0, 1, 2, 3, 2 << 16, 3 << 16, (3 << 16) + 1, (3 << 16) + 2],
    ),
    Case(
        "swap names",
        Rename(names={"x": "y", "y": "x", "z": "w"}),
        {"x": NUMBERS, "y": TEXTS, "z": HEX},
        {"x": TEXTS, "y": NUMBERS, "w": HEX},
        gone=("z",),
    ),
    Case(
        "a function of two columns",
        LambdaOp(columns=("x", "t"), outputs=("p", "h"), function=f"{__name__}:price_and_half", output_type="number"),
        {"x": NUMBERS, "t": ("text", ["a", "b", None, "c"])},
        {"p": ("number", [1.0, None, None, 1e6]), "h": ("number", [0.5, None, None, 5e5])},
    ),
    Case(
        "a function of one column",
        LambdaOp(columns=("x",), outputs=("n",), function=f"{__name__}:length", output_type="integer"),
        {"x": ("text", ["abc", None, "\u00fc"])},
        {"n": ("integer", [3, None, 1])},
    ),
    Case(
        "parts of a text",
        SplitText(columns=("x",), separator="-", outputs=("n", "c"), types=("text", "integer")),
        {"x": ("text", ["N1-0", None, "N2", "-1-rest", "N3-"])},
        {"n": ("text", ["N1", None, "N2", None, "N3"]), "c": ("integer", [0, None, None, 1, None])},
    ),
    Case(
        "hexadecimal and decimal parts",
        SplitText(columns=("x",), separator="::", outputs=("h", "x"), types=("hex32", "number")),
        {"x": ("text", ["fF::-1.5e3", "0::.5"])},
        {"h": ("hex32", [255, 0]), "x": ("number", [-1500.0, 0.5])},
    ),
    Case("rows of some texts", KeepRows(column="x", values=("\u00fc", "b")), {"x": TEXTS}, {}, rows=[3]),
    Case("rows of some integers", KeepRows(column="x", values=("-7", "3")), {"x": INTEGERS}, {}, rows=[0, 2]),
    Case("rows of some hex", KeepRows(column="x", values=("A", "0")), {"x": HEX}, {}, rows=[0, 2]),
    Case("rows within bounds", KeepRows(column="x", at_least=-2.5, at_most=1.0), {"x": NUMBERS}, {}, rows=[0, 2]),
    Case("rows of great integers", KeepRows(column="x", at_least=0.0), {"x": INTEGERS}, {}, rows=[0, 3]),
    Case(
        "rows of integers that float64 does not tell apart",
        KeepRows(column="x", at_least=2**53 + 1, at_most=1e300),
        {"x": ("integer", [2**53, 2**53 + 1, None, 2**63 - 1])},
        {},
        rows=[1, 3],
    ),
]
