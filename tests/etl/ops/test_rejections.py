"""What steps refuse: columns of other types when a workflow is planned, values when it runs."""

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
from tests.etl.column_values import block_of

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
    ("step", "problem"),
    [
        (FillMissing(columns=("d",), value=0), "'d' holds id, expected number or integer or text or hex32"),
        (FillMissing(columns=("i",), value=0.5), "'i': got 0.5, expected a 64-bit integer"),
        (FillMissing(columns=("n",), value="x"), "'n': got 'x', expected a number for a column of number"),
        (FillMissing(columns=("h",), value="xyz"), "'h': got 'xyz', expected up to 8 hexadecimal digits"),
        (Clip(columns=("t",), low=0), "'t' holds text, expected number or integer"),
        (Clip(columns=("i",), low=0.5), "'i': got 0.5, expected a 64-bit integer"),
        (LogOp(columns=("h",)), "'h' holds hex32"),
        (Bucketize(columns=("t",), boundaries=(1.0,)), "'t' holds text"),
        (HashBucket(columns=("n",), buckets=2), "'n' holds number, expected text or integer or hex32"),
        (GivenIds(columns=("n",), rows=(2,)), "'n' holds number, expected integer"),
        (Cross(columns=("t", "l"), output="c"), "'l' holds lists of text, expected one value a row"),
        (ListSlice(columns=("t",), stop=2), "'t' holds one text a row, expected lists"),
        (Pad(columns=("l",), length=2, value=1.0), "'l': got 1.0, expected a text"),
        (Explode(columns=("t",)), "'t' holds one text a row, expected lists"),
        (SplitText(columns=("l",), separator=",", outputs=("a",), types=("text",)), "expected one text a row"),
        (KeepRows(column="n", values=("1",)), "'n' holds number, expected text or integer or hex32"),
        (KeepRows(column="t", at_least=1.0), "'t' holds text, expected number or integer"),
        (KeepRows(column="i", values=("x",)), "got 'x', expected a 64-bit integer"),
        (LambdaOp(columns=("t",), outputs=("a",), function="no.such:f", output_type="text"), "No module named 'no'"),
        (LambdaOp(columns=("t",), outputs=("a",), function="json:nothing", output_type="text"), "no attribute"),
    ],
)
def test_columns_of_other_types(step: Operator, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        step.output_types(TYPES)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (LogOp(columns=("x",), shift=2.5), r"column 'x', row 12: got -2.5, expected more than -2.5"),
        (
            SplitText(columns=("t",), separator=",", outputs=("a",), types=("integer",)),
            r"column 't', row 11: got '1.5,b', expected a 64-bit integer as part 1",
        ),
        (
            SplitText(columns=("t",), separator=",", outputs=("a", "b"), types=("text", "number")),
            r"row 11: got '1.5,b', expected a finite number as part 2",
        ),
        (
            Explode(columns=("l", "m")),
            r"column 'm', row 11: got a list of 1, expected as many items as in column 'l'",
        ),
        (GivenIds(columns=("i",), rows=(9,)), r"column 'i', row 10: got 9, expected an id, 0 <= id < 9"),
        (GivenIds(columns=("i",), rows=(10,)), r"column 'i', row 11: got None, expected an id, 0 <= id < 10"),
        (GivenIds(columns=("k",), rows=(8,)), r"column 'k', row 12: got -1, expected an id, 0 <= id < 8"),
        (
            GivenIds(columns=("k",), rows=(None,), max_length=1),
            r"column 'k', row 12: got a list of 2, expected at most 1 items",
        ),
    ],
)
def test_values_with_their_rows(step: Operator, problem: str) -> None:
    block = block_of(
        10,
        x=("number", [1.0, None, -2.5]),
        t=("text", ["1", "1.5,b", None]),
        l=("text", [["a"], ["b", "c"], []]),
        m=("text", [["a"], ["b"], []]),
        i=("integer", [9, None, 0]),
        k=("integer", [[7], [], [3, -1]]),
    )
    with pytest.raises(FormatError, match=problem):
        step.transform(block, None)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("wrong", "returned list, expected an Arrow array of 2 values"),
        ("short", "returned 1 values, expected an Arrow array of 2 values"),
        ("texts", "returned string, expected values of number"),
    ],
)
def test_functions_that_return_something_else(function: str, problem: str) -> None:
    step = LambdaOp(columns=("x",), outputs=("y",), function=f"{__name__}:{function}", output_type="number")
    with pytest.raises(ConfigError, match=problem):
        step.transform(block_of(x=("number", [1.0, 2.0])), None)


def test_the_logarithm_has_an_inverse() -> None:
    code = LogOp(columns=("x",), shift=3.0)
    made = code.transform(block_of(x=("number", [0.0, 1.5, -2.9])), None)
    numbers = code.inverse("x", numbers_of(made.columns["x"]), None)  # type: ignore[attr-defined]
    np.testing.assert_allclose(numbers, [0.0, 1.5, -2.9], atol=1e-12)
