# SPDX-License-Identifier: Apache-2.0
"""Optimizers: exact updates of touched rows for tables, `torch.optim` for the dense layers, and schedules for both."""

from terarec.optim.dense import build_dense_optimizer
from terarec.optim.freezing import freeze, unfreeze
from terarec.optim.loss_scaler import LossScaler
from terarec.optim.row_optimizer import RowOptimizer
from terarec.optim.schedules import LearningRateSchedule, build_schedulers, load_scheduler_states, scheduler_states

__all__ = [
    "LearningRateSchedule",
    "LossScaler",
    "RowOptimizer",
    "build_dense_optimizer",
    "build_schedulers",
    "freeze",
    "load_scheduler_states",
    "scheduler_states",
    "unfreeze",
]
