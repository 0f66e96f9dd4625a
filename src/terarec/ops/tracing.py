"""Whether an op has to go through torch's dispatcher."""

from __future__ import annotations

from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling


def is_traced(rows: Tensor) -> bool:
    """Whether a compiler, a mode or a tensor of another class has to see an op on `rows`.

    All other calls run the kernel at once: the dispatcher of Python ops costs some 20 us a call (Zen 3).
    """
    return type(rows) is not Tensor or is_compiling() or _len_torch_dispatch_stack() > 0
