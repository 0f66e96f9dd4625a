# SPDX-License-Identifier: Apache-2.0
"""Calls that compilers do not trace: they run outside of a graph, or are constants in it.

Importing this module imports torch's compiler, which takes longer than importing all of terarec. Callers therefore
import it only in branches that run while a graph is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from terarec.kernels.registry import Op, choose
from terarec.ops import onednn
from terarec.ops.layout import BagLayout, single_layout
from terarec.spec import Pooling

P = ParamSpec("P")
Result = TypeVar("Result")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_pair_dots(is_narrow: bool) -> bool:
    """Return whether `pair_dots` has a kernel on this processor, for bfloat16 if `is_narrow`."""
    has_kernel: bool = choose(Op.HAS_PAIR_DOTS, "cpu")(is_narrow)
    return has_kernel


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def least_products(is_narrow: bool, in_width: int) -> int:
    """Return the multiplications of the smallest product by oneDNN, of bfloat16 if `is_narrow`; 0 if there is none."""
    return onednn.least_products(is_narrow, in_width)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eager(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Call `function` outside the compiled graph."""
    return function(*args, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_layout(rows: int, width: int, pooling: Pooling) -> BagLayout:
    """Return `single_layout`, which compilers call and do not trace."""
    return single_layout(rows, width, pooling)
