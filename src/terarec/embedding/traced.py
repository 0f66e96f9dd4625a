"""How a compiler takes what it cannot trace: beside its graph, or as a constant in it.

Loading this loads torch's compiler, which takes longer than all of terarec; so what is traced imports it in the branch
that compilers alone walk.
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
    """`single_layout`, which compilers call and do not trace."""
    return single_layout(rows, width, pooling)
