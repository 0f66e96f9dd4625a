"""Calls that a compiler does not trace: outside of its graph, or as a constant in it.

Importing this module imports torch's compiler, which takes longer than importing all of terarec. Callers therefore
import it only in branches that run while a graph is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from terarec.ops.layout import BagLayout, Pooling, single_layout

P = ParamSpec("P")
Result = TypeVar("Result")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eager(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Call `function` outside the compiled graph."""
    return function(*args, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_layout(rows: int, width: int, pooling: Pooling) -> BagLayout:
    """Return `single_layout`, which compilers call and do not trace."""
    return single_layout(rows, width, pooling)
