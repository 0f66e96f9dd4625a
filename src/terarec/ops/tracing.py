"""Whether an op has to go through torch's dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor


def is_traced(rows: Tensor) -> bool:
    """Whether a compiler, a mode or a tensor of another class has to see an op on `rows`.

    All other calls run the kernel at once: the dispatcher of Python ops costs some 20 us a call (Zen 3).
    """
    return type(rows) is not Tensor or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
