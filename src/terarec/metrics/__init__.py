# SPDX-License-Identifier: Apache-2.0
"""Metrics: streaming classes, sets of metrics by name with groups and slices, and the evaluation of retrieval."""

from terarec.metrics.auc import AUC
from terarec.metrics.calibration import Calibration, calibration_curve
from terarec.metrics.hugectr import NDCG, HitRate
from terarec.metrics.means import SMAPE, AverageLoss
from terarec.metrics.metric_set import MetricSet
from terarec.metrics.ranking import evaluate_retrieval
from terarec.metrics.registry import find_metric, metric_names

__all__ = [
    "AUC",
    "NDCG",
    "SMAPE",
    "AverageLoss",
    "Calibration",
    "HitRate",
    "MetricSet",
    "calibration_curve",
    "evaluate_retrieval",
    "find_metric",
    "metric_names",
]
