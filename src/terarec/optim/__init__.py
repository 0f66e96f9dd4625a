"""Optimizers: exact updates of touched rows for tables, `torch.optim` for the dense layers, and schedules for both."""

from terarec.optim.dense import build_dense_optimizer, dense_states
from terarec.optim.freezing import freeze, unfreeze
from terarec.optim.loss_scaler import LossScaler
from terarec.optim.row_optimizer import RowOptimizer
from terarec.optim.row_parameters import RowParameters
from terarec.optim.schedules import (
    LearningRateSchedule,
    WarmupDecayLR,
    build_schedulers,
    load_scheduler_states,
    scheduler_states,
)

__all__ = [
    "LearningRateSchedule",
    "LossScaler",
    "RowOptimizer",
    "RowParameters",
    "WarmupDecayLR",
    "build_dense_optimizer",
    "build_schedulers",
    "dense_states",
    "freeze",
    "load_scheduler_states",
    "scheduler_states",
    "unfreeze",
]
