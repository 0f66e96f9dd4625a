# SPDX-License-Identifier: Apache-2.0
"""An update takes what it needs in passing from the memory of results that no one uses any more."""

import pytest
import torch

from terarec.ops import bag_lookup
from terarec.ops.row_update import BagGradient, row_rule, row_update_
from tests.ops.bags import one_feature

WIDTH, BATCH = 64, 130_000  # a result of 32 MiB: those from 4 MiB on lie in the core's own memory


@pytest.mark.parametrize("rows", [3_000, 60_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_results_in_use_keep_their_values_and_lent_memory_is_returned(set_threads, rows, threads):
    set_threads(threads)
    generator = torch.Generator().manual_seed(rows)
    layout = one_feature(rows, WIDTH)
    keys, offsets = torch.randint(rows, (BATCH,), generator=generator), torch.arange(BATCH + 1)
    gradient = BagGradient(keys, offsets, torch.randn(BATCH, WIDTH, generator=generator), layout)
    weights = torch.randn(rows, WIDTH, generator=generator)
    updated = weights.index_add(0, keys, gradient.grad, alpha=-0.5)
    values, moved = weights[keys], weights.clone()

    in_use = bag_lookup(moved, keys, offsets, layout, implementation="cpu")
    idle = bag_lookup(moved, keys, offsets, layout, implementation="cpu")
    place = idle.data_ptr()
    del idle
    row_update_(moved, [], [gradient], row_rule("sgd", lr=0.5), step=1, implementation="cpu")
    again = bag_lookup(moved, keys, offsets, layout, implementation="cpu")
    assert again.data_ptr() == place
    assert torch.equal(in_use, values)
    torch.testing.assert_close(moved, updated)
    assert torch.equal(again, moved[keys])
