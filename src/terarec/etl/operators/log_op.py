"""Logarithms of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block
from terarec.etl.operators.contract import State
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.operators.values import refused
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import LogOp


class LogOpCode(NumberStepCode[LogOp]):
    """Code of `LogOp` with a given shift."""

    refuses = True

    def shift_of(self, name: str, state: State | None) -> float:
        """The shift of the input `name`."""
        assert self.spec.shift is not None
        return self.spec.shift

    def figures(self, name: str, state: State | None) -> tuple[float, ...]:
        """The shift."""
        return (self.shift_of(name, state),)

    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """ln(x + shift) of x above -shift."""
        (shift,) = figures
        return np.asarray(np.log(numbers + shift))

    def plain_formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """ln(x + shift)."""
        (shift,) = figures
        if np.count_nonzero(numbers <= -shift):
            raise RefusedValueError(0)
        return self.formula(numbers, shift)

    def apply(self, block: Block, state: State | None) -> Block:
        """ln(x + shift).

        Raises:
            FormatError: x + shift is not above 0.
        """
        for name in self.spec.columns:
            shift = self.shift_of(name, state)
            low = block.columns[name].numbers() <= -shift
            if low.any():
                raise refused(block, name, low, accepted_number(shift))
        return NumberStepCode.apply(self, block, state)

    def inverse(self, column: str, encoded: NDArray[np.float64], state: State | None) -> NDArray[np.float64]:
        """exp(y) - shift: the numbers of the input `column` from what came out."""
        return np.exp(encoded) - self.shift_of(column, state)


def accepted_number(shift: float) -> str:
    """Which numbers have a logarithm."""
    return f"more than {-shift!r} for a logarithm (Clip raises lower ones)"
