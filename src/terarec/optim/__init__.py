"""Optimizers: exact updates of touched rows for tables, `torch.optim` for the dense layers."""

from terarec.optim.dense import build_dense_optimizer
from terarec.optim.row_optimizer import RowOptimizer, RowParameters

__all__ = ["RowOptimizer", "RowParameters", "build_dense_optimizer"]
