"""Bounds of loops that are known only on the device."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETS = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def times(count):
    """`count` as a bound of ``range``: itself, or the number in it where Triton 3.6 interprets with NumPy 2.4.

    The interpreter holds a scalar as an array of one element, which that NumPy does not take for a number.
    """
    if INTERPRETS:
        return count.handle.data.item()
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return count
