"""Where each key's row is, and where its gradient is."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.bags import NOTHING, bag_scale, bag_tile, feature_layout, report_bad_keys


@triton.jit(do_not_specialize=["num_keys", "batch", "first_source", "no_row"])
def locate_kernel(
    keys,  # int64[N]
    offsets,  # int64[S * B + 1]
    layout,  # int64[S, COLUMNS]
    rows_out,  # int32|int64[N]: arena row of each key
    sources_out,  # int64[N]: row of the gradients [B * S, D], or [N, D] without pooling, that holds the key's
    scales_out,  # float32[N]: factor of that gradient; not written for a plain layout
    status,
    num_keys,
    batch,
    first_source,
    no_row,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_POOLED: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):
    """Locate the keys of a tile of bags; a bad key's row is `no_row`, which no arena has."""
    sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
    base, rows, pooling = feature_layout(layout, COLUMNS)
    source = first_source + sample * tl.num_programs(1) + tl.program_id(1)
    scale = bag_scale(pooling, length)
    bad = tl.full((BAGS,), NOTHING, tl.int64)
    longest = tl.max(length, 0)
    j = 0
    while j < longest:
        is_key = j < length
        position = start + j
        key = tl.load(keys + position, mask=is_key, other=0)
        is_row = (key >= 0) & (key < rows)
        bad = tl.minimum(bad, tl.where(is_key & (is_row == 0), position, NOTHING))
        row = tl.where(is_row, base + key, no_row)
        tl.store(rows_out + position, row.to(rows_out.dtype.element_ty), mask=is_key)
        if IS_POOLED:
            tl.store(sources_out + position, source, mask=is_key)
        else:
            tl.store(sources_out + position, first_source + position, mask=is_key)
        if IS_PLAIN == 0:
            tl.store(scales_out + position, scale, mask=is_key)
        j += 1
    report_bad_keys(status, bad)
