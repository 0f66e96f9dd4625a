"""Tensors as the core takes them: addresses, and numbers of element types."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
"""Element type -> number of the core's RowType; uint8 are rows of codes."""


def address(tensor: Tensor | None) -> int:
    """Where the elements begin; 0 for no tensor."""
    return 0 if tensor is None else tensor.data_ptr()
