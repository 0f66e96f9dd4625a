"""A program's tile of bags of one feature: programs (tile of samples, feature, block of columns)."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels import contract

NOTHING = tl.constexpr(2**63 - 1)  # what a word of the status holds while nothing is wrong
MEAN = tl.constexpr(contract.MEAN)
SQRTN = tl.constexpr(contract.SQRTN)
MAX = tl.constexpr(contract.MAX)


@triton.jit
def bag_tile(offsets, status, num_keys, batch, BAGS: tl.constexpr):
    """Sample, first key and number of keys of each of the program's bags; offsets that do not hold go to the status."""
    sample = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = sample < batch
    bag = tl.program_id(1).to(tl.int64) * batch + sample
    start = tl.load(offsets + bag, mask=is_bag, other=0)
    end = tl.load(offsets + bag + 1, mask=is_bag, other=0)
    is_last = bag + 1 == tl.num_programs(1).to(tl.int64) * batch
    is_wrong = (end < start) | (is_last & (end != num_keys))
    wrong = tl.where(is_bag & is_wrong, bag + 1, NOTHING)
    wrong = tl.where(is_bag & (bag == 0) & (start != 0), 0, wrong)
    first_wrong = tl.min(wrong, 0)
    if first_wrong < NOTHING:
        tl.atomic_min(status, first_wrong)
    is_whole = (start >= 0) & (start <= end) & (end <= num_keys)
    return sample, start, tl.where(is_whole, end - start, 0)


@triton.jit
def feature_layout(layout, COLUMNS: tl.constexpr):
    """First arena row, rows and pooling of the program's feature."""
    line = layout + tl.program_id(1) * COLUMNS
    return tl.load(line), tl.load(line + 1), tl.load(line + 2)


@triton.jit
def load_keys(keys, position, is_key, rows, bad):
    """The keys at ``position [BAGS]``, whether each has a row, and `bad` with the positions of those that have none."""
    key = tl.load(keys + position, mask=is_key, other=0)
    is_row = is_key & (key >= 0) & (key < rows)
    return key, is_row, tl.minimum(bad, tl.where(is_key & (is_row == 0), position, NOTHING))


@triton.jit
def report_bad_keys(status, bad):
    """Tell the status of the first of the positions ``bad [BAGS]``, `NOTHING` where all is well."""
    first_bad = tl.min(bad, 0)
    if first_bad < NOTHING:
        tl.atomic_min(status + 1, first_bad)


@triton.jit
def bag_factor(pooling, total, squares):
    """What the sum of each bag is multiplied by: float32 [BAGS].

    Args:
        pooling: code of the feature.
        total: sums of the keys' weights, or numbers of keys.
        squares: sums of their squares, or numbers of keys.
    """
    divisor = tl.where(pooling == MEAN, total, tl.where(pooling == SQRTN, tl.sqrt_rn(squares), 1.0))
    one = tl.full(divisor.shape, 1.0, tl.float32)
    return tl.where(divisor == 0.0, 0.0, tl.div_rn(one, tl.where(divisor == 0.0, 1.0, divisor)))
