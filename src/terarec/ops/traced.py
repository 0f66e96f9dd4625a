"""What compilers call and do not trace: what the processor has, as constants of a graph.

Importing this module imports torch's compiler, which takes longer than importing all of terarec. Callers therefore
import it only in branches that run while a graph is compiled.
"""

from __future__ import annotations

import torch

from terarec.kernels.registry import choose
from terarec.ops import onednn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_pair_dots(is_narrow: bool) -> bool:
    """Return whether `terarec.ops.pair_dots` has a kernel on this processor, for bfloat16 if `is_narrow`."""
    found: bool = choose("has_pair_dots", "cpu")(is_narrow)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def least_products(is_narrow: bool, in_width: int) -> int:
    """Return the multiplications of the smallest product by oneDNN, of bfloat16 if `is_narrow`; 0 if there is none."""
    return onednn.least_products(is_narrow, in_width)
