# SPDX-License-Identifier: Apache-2.0
"""Training: one step, the loop around it, a run in a directory, evaluation, prediction, the report."""

from terarec.train.evaluation import Evaluation, evaluate
from terarec.train.loggers import ProgressBar
from terarec.train.optimizers import Optimizers
from terarec.train.predict import predict
from terarec.train.run import Run, build
from terarec.train.trainer import Callback, Trainer

__all__ = ["Callback", "Evaluation", "Optimizers", "ProgressBar", "Run", "Trainer", "build", "evaluate", "predict"]
