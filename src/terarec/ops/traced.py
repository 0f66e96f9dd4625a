"""What compilers call and do not trace: what the processor has, as constants of a graph.

Importing this module imports torch's compiler, which takes longer than importing all of terarec. Callers therefore
import it only in branches that run while a graph is compiled.
"""

from __future__ import annotations

import torch

from terarec.kernels.registry import choose


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_pair_dots() -> bool:
    """Return whether `terarec.ops.pair_dots` has a kernel on this processor."""
    found: bool = choose("has_pair_dots", "cpu")()
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_onednn_bfloat16() -> bool:
    """Return whether oneDNN is on, and multiplies bfloat16 on this processor."""
    from terarec.ops.linear import has_bfloat16

    return bool(torch.backends.mkldnn.enabled) and has_bfloat16()
