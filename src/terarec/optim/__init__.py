"""Optimizers: exact updates of touched rows for tables, `torch.optim` for the dense layers, and schedules for both."""

from terarec.optim.dense import build_dense_optimizer
from terarec.optim.dense_state import dense_states
from terarec.optim.row_optimizer import RowOptimizer
from terarec.optim.row_parameters import RowParameters
from terarec.optim.schedule import LearningRateSchedule

__all__ = ["LearningRateSchedule", "RowOptimizer", "RowParameters", "build_dense_optimizer", "dense_states"]
