"""Metrics: streaming classes, sets of metrics by name with groups and slices, and the evaluation of retrieval."""

from terarec.metrics.accuracy import Accuracy
from terarec.metrics.auc import AUC
from terarec.metrics.average_loss import AverageLoss
from terarec.metrics.hit_rate import HitRate
from terarec.metrics.logloss import LogLoss, NormalizedEntropy
from terarec.metrics.metric_set import MetricSet
from terarec.metrics.ndcg import NDCG
from terarec.metrics.registry import Metric, find_metric, metric_names
from terarec.metrics.regression import MAE, MSE, RMSE, SMAPE
from terarec.metrics.results import LabelValues, MetricValues, Results, SliceResults, SliceValues
from terarec.metrics.retrieval import ItemLists, RetrievalResults, evaluate_retrieval
from terarec.metrics.throughput import Throughput

__all__ = [
    "AUC",
    "MAE",
    "MSE",
    "NDCG",
    "RMSE",
    "SMAPE",
    "Accuracy",
    "AverageLoss",
    "HitRate",
    "ItemLists",
    "LabelValues",
    "LogLoss",
    "Metric",
    "MetricSet",
    "MetricValues",
    "NormalizedEntropy",
    "Results",
    "RetrievalResults",
    "SliceResults",
    "SliceValues",
    "Throughput",
    "evaluate_retrieval",
    "find_metric",
    "metric_names",
]
