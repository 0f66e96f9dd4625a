"""Metrics: streaming classes, sets of metrics by name with groups and slices, and the evaluation of retrieval."""

from terarec.metrics.auc import AUC
from terarec.metrics.hugectr import NDCG, HitRate
from terarec.metrics.means import MAE, MSE, RMSE, SMAPE, Accuracy, AverageLoss, LogLoss, NormalizedEntropy, Throughput
from terarec.metrics.metric_set import LabelValues, MetricSet, MetricValues, Results, SliceResults, SliceValues
from terarec.metrics.ranking import RetrievalResults, evaluate_retrieval
from terarec.metrics.registry import Metric, find_metric, metric_names

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
