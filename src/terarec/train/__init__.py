"""Training: one step, the loop around it, a run in a directory, evaluation, prediction, the report."""

from terarec.train.evaluation import Evaluation, Evaluator, evaluate
from terarec.train.loggers import ProgressBar
from terarec.train.optimizers import Optimizers, Schedule
from terarec.train.predict import PredictReport, predict
from terarec.train.run import Run, build
from terarec.train.stopping import FitReport
from terarec.train.trainer import Callback, Trainer

__all__ = [
    "Callback",
    "Evaluation",
    "Evaluator",
    "FitReport",
    "Optimizers",
    "PredictReport",
    "ProgressBar",
    "Run",
    "Schedule",
    "Trainer",
    "build",
    "evaluate",
    "predict",
]
