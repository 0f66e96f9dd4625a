"""Offsets past 2^31 elements and rows: an arena of virtual memory of which a few pages are touched."""

import mmap

import pytest
import torch

from terarec.ops import BagGradient, BagLayout, RowRule, bag_lookup, row_update_

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux


def forged_arena(rows: int, width: int) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, rows * width * 4, flags=flags), dtype=torch.float32).reshape(rows, width)


@pytest.mark.parametrize(("rows", "width"), [(40_000_000, 64), (2**31 + 7, 1)])
def test_rows_past_two_to_the_31_elements(rows, width):
    weights = forged_arena(2 * rows, width)
    layout = BagLayout(
        table_names=("first", "second"),
        table_base=(0, rows),
        table_rows=(rows, rows),
        feature_names=("f", "g"),
        feature_table=(0, 1),
        pooling=("sum", "sum"),
        width=width,
    )
    keys = torch.tensor([0, rows - 1, rows - 1, 5, rows - 1, rows - 2])
    offsets = torch.tensor([0, 2, 3, 5, 6])
    grad = torch.arange(1, 4 * width + 1, dtype=torch.float32).reshape(2, 2 * width)
    gradient = BagGradient(keys, offsets, grad, layout)
    row_update_(weights, (), [gradient], RowRule(kind="sgd", lr=1.0), step=1, implementation="cpu")
    assert torch.equal(weights[0], -grad[0, :width])
    assert torch.equal(weights[rows - 1], -grad[0, :width] - grad[1, :width])
    assert torch.equal(weights[rows + 5], -grad[0, width:])
    assert torch.equal(weights[2 * rows - 1], -grad[0, width:])
    assert torch.equal(weights[2 * rows - 2], -grad[1, width:])
    result = bag_lookup(weights, keys, offsets, layout, implementation="cpu")
    assert torch.equal(result[0, :width], weights[0] + weights[rows - 1])
    assert torch.equal(result[1], torch.cat([weights[rows - 1], weights[2 * rows - 2]]))
