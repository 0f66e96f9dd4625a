"""The eviction scan on the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from terarec.kernels.triton.device.scan import count_low_kernel, write_low_kernel
from terarec.kernels.triton.placement import on_its_device

_BLOCK = 1024


@on_its_device
def rows_at_most(scores: Tensor, limit: float, spared: Tensor) -> Tensor:
    """The rows with a score of at most `limit`, but those that are spared, in rising order; waits for their number.

    Args:
        scores: of any numbers [n].
        limit: a number.
        spared: bool[n].

    Returns:
        int64[m].
    """
    num_rows = scores.shape[0]
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    blocks = triton.cdiv(num_rows, _BLOCK)
    what = (scores.contiguous(), torch.tensor(limit, dtype=scores.dtype).to(scores.device), spared.to(torch.uint8))
    counts = torch.empty(blocks, dtype=torch.int64, device=scores.device)
    count_low_kernel[(blocks,)](*what, counts, num_rows, BLOCK=_BLOCK)
    ends = counts.cumsum(0)
    low = torch.empty(int(ends[-1]), dtype=torch.int64, device=scores.device)
    write_low_kernel[(blocks,)](*what, ends, low, num_rows, BLOCK=_BLOCK)
    return low
