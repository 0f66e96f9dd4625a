# SPDX-License-Identifier: Apache-2.0
"""Random lookups for the tests of the embedding ops."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from terarec.ops import BagLayout
from terarec.spec import Pooling

IMPLEMENTATIONS = ["cpu", "ref", *(["triton"] if find_spec("triton") else [])]
"""All there are here; Triton's interpret their kernels, so that tests of many keys leave them out."""
TABLE_ROWS = (1000, 13, 1)
FEATURE_TABLE = (0, 1, 0, 2)  # the first and third feature share a table


@dataclass(frozen=True)
class Lookup:
    weights: Tensor
    keys: Tensor
    offsets: Tensor
    layout: BagLayout
    key_weights: Tensor


def make_layout(width: int, pooling: tuple[Pooling, ...] | Pooling = "sum") -> BagLayout:
    features = len(FEATURE_TABLE)
    return BagLayout(
        table_names=("large", "small", "one"),
        table_base=(0, 1000, 1013),
        table_rows=TABLE_ROWS,
        feature_names=("a", "b", "c", "d"),
        feature_table=FEATURE_TABLE,
        pooling=(pooling,) * features if isinstance(pooling, str) else pooling,
        width=width,
    )


def one_feature(rows: int, width: int) -> BagLayout:
    """One feature that sums rows of a table of its own."""
    return BagLayout(
        table_names=("t",),
        table_base=(0,),
        table_rows=(rows,),
        feature_names=("f",),
        feature_table=(0,),
        pooling=("sum",),
        width=width,
    )


def make_lookup(layout: BagLayout, batch: int, hotness: int, seed: int = 0) -> Lookup:
    """`hotness` 1 gives bags of one key, more gives bags of 0 to 2 * hotness keys with many repeats."""
    generator = torch.Generator().manual_seed(seed)
    bags = len(layout.feature_names) * batch
    if hotness == 1:
        lengths = torch.ones(bags, dtype=torch.int64)
    else:
        lengths = torch.randint(0, 2 * hotness + 1, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    features = torch.arange(bags).repeat_interleave(lengths) // max(batch, 1)
    rows = layout.array[features, 1]
    keys = (torch.rand(rows.numel(), generator=generator, dtype=torch.float64) ** 2 * rows).long()
    weights = torch.randn(layout.num_rows, layout.width, generator=generator)
    return Lookup(weights, keys, offsets, layout, torch.rand(keys.numel(), generator=generator) + 0.25)
