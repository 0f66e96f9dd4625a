"""Whether gradients are numbers, and where they are not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from terarec.ops import BagGradient


def find_non_finite(gradients: Sequence[BagGradient]) -> str | None:
    """Names feature and table of the first gradient with NaN or infinity; None if there is none.

    One pass over the gradients that allocates nothing; only after a find is the place looked for.
    """
    for held in gradients:
        if held.grad.numel() == 0:
            continue
        low, high = torch.aminmax(held.grad)  # NaN if any is
        if not (math.isfinite(low) and math.isfinite(high)):
            return _place(held)
    return None


def _place(gradient: BagGradient) -> str:
    layout = gradient.layout
    row, column = (~gradient.grad.isfinite()).nonzero()[0].tolist()
    if layout.is_pooled:
        feature = column // layout.width
        where = f"sample {row}"
    else:
        batch_size = (gradient.offsets.numel() - 1) // len(layout.feature_names)
        ends = gradient.offsets[batch_size::batch_size].contiguous()
        feature = int(torch.searchsorted(ends, row, right=True))
        where = f"key {int(gradient.keys[row])}"
    table = layout.table_names[layout.feature_table[feature]]
    value = float(gradient.grad[row, column])
    return f"feature {layout.feature_names[feature]!r} of table {table!r}: got the gradient {value} for {where}"
