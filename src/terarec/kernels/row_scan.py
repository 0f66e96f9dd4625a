"""`rows_at_most`: which rows of a long list of scores go."""

from __future__ import annotations

from torch import Tensor

from terarec.kernels.registry import choose


def rows_at_most(scores: Tensor, limit: float, spared: Tensor) -> Tensor:
    """The rows with a score of at most `limit`, but those that are spared, in rising order.

    Args:
        scores: of any numbers [n].
        limit: a number.
        spared: bool[n].

    Returns:
        int64[m].
    """
    rows: Tensor = choose("rows_at_most", scores.device)(scores, limit, spared)
    return rows
