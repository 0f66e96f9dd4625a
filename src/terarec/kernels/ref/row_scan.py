"""The eviction scan."""

from __future__ import annotations

from torch import Tensor


def rows_at_most(scores: Tensor, limit: float, spared: Tensor) -> Tensor:
    """The rows with a score of at most `limit`, but those that are spared, in rising order.

    Args:
        scores: of any numbers [n].
        limit: a number.
        spared: bool[n].

    Returns:
        int64[m].
    """
    return ((scores <= limit) & ~spared).nonzero().squeeze(1)
