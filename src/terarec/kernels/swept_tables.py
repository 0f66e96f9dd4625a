"""The tables all of whose rows move under a rule that sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.kernels.contract import LaidGradient


def swept_ranges(gradients: Sequence[LaidGradient], table_lr: Tensor | None) -> list[tuple[int, int, float]]:
    """First arena row, rows and factor of the learning rate of the tables that are looked up and learn.

    Args:
        gradients: of one or more lookups in one arena.
        table_lr: float32[T] in host memory, factors by table of the layouts; 0: the table stays. None for ones.

    Returns:
        In the order of their rows, tables without rows left out; one for tables that share theirs.
    """
    tables = {tuple(line) for gradient in gradients for line in gradient.layout[:, [0, 1, 3]].tolist()}
    by_base = {base: (rows, 1.0 if table_lr is None else float(table_lr[table])) for base, rows, table in tables}
    return [(base, rows, factor) for base, (rows, factor) in sorted(by_base.items()) if factor and rows]
