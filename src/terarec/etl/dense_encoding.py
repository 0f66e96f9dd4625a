"""Raw numbers -> float32. Formulas and missing values are described in docs/encoders.md."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.raw_columns import RawColumn
from terarec.kernels.cpu.encoding import log_shift, numbers_of_list
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import DenseEncoder, LogShiftEncoder

ACCEPTED_NUMBER = "a finite number, or nothing where it is missing"


def encode_dense(encoder: DenseEncoder | None, column: RawColumn, out: NDArray[np.float32]) -> None:
    """Encode n raw numbers into ``out float32[n]``; None as encoder takes them as they are.

    Raises:
        ConfigError: a value that is no finite number or too large for float32, or a missing one without an encoder.
    """
    numbers = read_numbers(column)
    if isinstance(encoder, LogShiftEncoder):
        log_shift(numbers, encoder.shift, out)
        return
    missing = np.isnan(numbers)
    if encoder is not None:
        numbers = (np.where(missing, encoder.mean, numbers) - encoder.mean) / encoder.deviation
    elif missing.any():
        raise column.refused(int(np.argmax(missing)), "a finite number")
    with np.errstate(over="ignore"):
        out[:] = numbers
    infinite = np.isinf(out)
    if infinite.any():
        raise column.refused(int(np.argmax(infinite)), "a number that float32 holds once encoded")


def read_numbers(column: RawColumn) -> NDArray[np.float64]:
    """The column as float64[n], NaN where missing.

    Raises:
        ConfigError: a value that is no finite number.
    """
    values = column.values
    if isinstance(values, list):
        try:
            return numbers_of_list(values)
        except RefusedValueError as error:
            raise column.refused(error.row, ACCEPTED_NUMBER) from None
    if isinstance(values, pa.Array):
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise column.mistyped(ACCEPTED_NUMBER)
        values = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    numbers: NDArray[np.float64] = np.ascontiguousarray(values, dtype=np.float64)
    infinite = np.isinf(numbers)
    if infinite.any():
        raise column.refused(int(np.argmax(infinite)), ACCEPTED_NUMBER)
    return numbers
