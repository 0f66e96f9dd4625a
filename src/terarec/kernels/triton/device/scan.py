"""Which rows have a low score, in their order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _is_low(scores, limit, spared, i, num_rows):
    is_row = i < num_rows
    score = tl.load(scores + i, mask=is_row, other=0)
    is_spared = tl.load(spared + i, mask=is_row, other=1)
    return is_row & (score <= tl.load(limit)) & (is_spared == 0)


@triton.jit(do_not_specialize=["num_rows"])
def count_low_kernel(scores, limit, spared, counts, num_rows, BLOCK: tl.constexpr):
    """Write counts int64[blocks]: the rows of each block whose score is at most the one at `limit`, but the spared."""
    block = tl.program_id(0).to(tl.int64)
    is_low = _is_low(scores, limit, spared, block * BLOCK + tl.arange(0, BLOCK), num_rows)
    tl.store(counts + block, tl.sum(is_low.to(tl.int64), 0))


@triton.jit(do_not_specialize=["num_rows"])
def write_low_kernel(scores, limit, spared, ends, low, num_rows, BLOCK: tl.constexpr):
    """Write the rows that `count_low_kernel` counted to low int64[M]; ends int64[blocks] are the sums of its counts."""
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    is_low = _is_low(scores, limit, spared, i, num_rows)
    number = tl.cumsum(is_low.to(tl.int64), 0)
    begin = tl.load(ends + block) - tl.sum(is_low.to(tl.int64), 0)
    tl.store(low + begin + number - 1, i, mask=is_low)
