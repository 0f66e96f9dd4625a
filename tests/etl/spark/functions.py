"""Functions that a `LambdaOp` of the tests calls."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc


def worth(price: Any, stock: Any) -> Any:
    """Price x stock of Arrow arrays."""
    return pc.multiply(price, stock.cast("float64"))


def spark_worth(price: Any, stock: Any) -> Any:
    """The same of Spark's columns."""
    return price * stock
