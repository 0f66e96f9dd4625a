# SPDX-License-Identifier: Apache-2.0
"""What steps reject: columns of other types when a workflow is planned, values when it runs."""

import numpy as np
import pyarrow as pa
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType, numbers_of
from terarec.etl.ops import (
    Bucketize,
    Clip,
    Cross,
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
    SplitText,
)
from terarec.kernels.cpu.encoding import InvalidValueError
from tests.errors import at
from tests.etl.column_values import block_of
from tests.etl.ops.fitting import run_record_functions

TYPES = {
    "n": ColumnType("number"),
    "i": ColumnType("integer"),
    "t": ColumnType("text"),
    "h": ColumnType("hex32"),
    "d": ColumnType("id"),
    "l": ColumnType("text", True),
}


def wrong(array: pa.Array) -> list[object]:
    return array.to_pylist()


def short(array: pa.Array) -> pa.Array:
    return array.slice(1)


def texts(array: pa.Array) -> pa.Array:
    return pa.array(["x"] * len(array))


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (FillMissing(columns=("d",), value=0), ("column 'd'", "holds id")),
        (FillMissing(columns=("i",), value=0.5), ("column 'i'", "got 0.5")),
        (FillMissing(columns=("n",), value="x"), ("column 'n'", "got 'x'")),
        (FillMissing(columns=("h",), value="xyz"), ("column 'h'", "got 'xyz'")),
        (Clip(columns=("t",), low=0), ("column 't'", "holds text")),
        (Clip(columns=("i",), low=0.5), ("column 'i'", "got 0.5")),
        (LogOp(columns=("h",)), ("column 'h'", "holds hex32")),
        (Bucketize(columns=("t",), boundaries=(1.0,)), ("column 't'", "holds text")),
        (HashBucket(columns=("n",), buckets=2), ("column 'n'", "holds number")),
        (GivenIds(columns=("n",), rows=(2,)), ("column 'n'", "holds number")),
        (Cross(columns=("t", "l"), output="c"), ("column 'l'", "holds lists of text")),
        (ListSlice(columns=("t",), stop=2), ("column 't'", "holds one text a row")),
        (Pad(columns=("l",), length=2, value=1.0), ("column 'l'", "got 1.0")),
        (Explode(columns=("t",)), ("column 't'", "holds one text a row")),
        (
            SplitText(columns=("l",), separator=",", outputs=("a",), types=("text",)),
            ("column 'l'", "expected one text a row"),
        ),
        (KeepRows(column="n", values=("1",)), ("column 'n'", "holds number")),
        (KeepRows(column="t", at_least=1.0), ("column 't'", "holds text")),
        (KeepRows(column="i", values=("x",)), ("column 'i'", "got 'x'")),
        (
            LambdaOp(columns=("t",), outputs=("a",), function="no.such:f", output_type="text"),
            ("function 'no.such:f'", "No module named 'no'"),
        ),
        (
            LambdaOp(columns=("t",), outputs=("a",), function="json:nothing", output_type="text"),
            ("function 'json:nothing'", "no attribute"),
        ),
    ],
)
def test_columns_of_other_types(step: Operator, place: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        step.output_types(TYPES)


def test_integers_of_more_digits_than_python_reads() -> None:
    step = SplitText(columns=("t",), separator=",", outputs=("n",), types=("integer",))
    zeros = block_of(t=("text", ["0" * 5000 + "7", "-" + "0" * 5000, "-" + "0" * 5000 + "12"]))
    assert step.transform(zeros, None).columns["n"].to_pylist() == [7, 0, -12]
    assert run_record_functions(step, None, zeros) == [("n", [7, 0, -12])]
    nines = block_of(t=("text", ["9" * 5000]))
    with pytest.raises(FormatError, check=at("column 't', row 0")):
        step.transform(nines, None)
    with pytest.raises(InvalidValueError):
        run_record_functions(step, None, nines)


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (LogOp(columns=("x",), shift=2.5), ("column 'x', row 12",)),
        (
            SplitText(columns=("t",), separator=",", outputs=("a",), types=("integer",)),
            ("column 't', row 11", "got '1.5,b'"),
        ),
        (
            SplitText(columns=("t",), separator=",", outputs=("a", "b"), types=("text", "number")),
            ("column 't', row 11", "got '1.5,b'"),
        ),
        (
            Explode(columns=("l", "m")),
            ("column 'm', row 11",),
        ),
        (GivenIds(columns=("i",), rows=(9,)), ("column 'i', row 10",)),
        (GivenIds(columns=("i",), rows=(10,)), ("column 'i', row 11",)),
        (GivenIds(columns=("k",), rows=(8,)), ("column 'k', row 12", "got -1")),
        (
            GivenIds(columns=("k",), rows=(None,), max_length=1),
            ("column 'k', row 12", "got a list of 2"),
        ),
    ],
)
def test_values_with_their_rows(step: Operator, place: tuple[str, ...]) -> None:
    block = block_of(
        10,
        x=("number", [1.0, None, -2.5]),
        t=("text", ["1", "1.5,b", None]),
        l=("text", [["a"], ["b", "c"], []]),
        m=("text", [["a"], ["b"], []]),
        i=("integer", [9, None, 0]),
        k=("integer", [[7], [], [3, -1]]),
    )
    with pytest.raises(FormatError, check=at(*place)):
        step.transform(block, None)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        ("wrong", "tests.etl.ops.test_rejections:wrong"),
        ("short", "tests.etl.ops.test_rejections:short"),
        ("texts", "tests.etl.ops.test_rejections:texts"),
    ],
)
def test_functions_that_return_something_else(function: str, where: str) -> None:
    step = LambdaOp(columns=("x",), outputs=("y",), function=f"{__name__}:{function}", output_type="number")
    with pytest.raises(ConfigError, check=at(where)):
        step.transform(block_of(x=("number", [1.0, 2.0])), None)


def test_the_logarithm_has_an_inverse() -> None:
    code = LogOp(columns=("x",), shift=3.0)
    made = code.transform(block_of(x=("number", [0.0, 1.5, -2.9])), None)
    numbers = code.inverse("x", numbers_of(made.columns["x"]), None)  # type: ignore[attr-defined]
    np.testing.assert_allclose(numbers, [0.0, 1.5, -2.9], atol=1e-12)
