"""Streaming metrics: update with every batch, compute at any time, merge across ranks."""

from terarec.metrics.auc import AUC
from terarec.metrics.average_loss import AverageLoss
from terarec.metrics.hit_rate import HitRate
from terarec.metrics.logloss import LogLoss
from terarec.metrics.ndcg import NDCG
from terarec.metrics.smape import SMAPE
from terarec.metrics.throughput import Throughput

__all__ = ["AUC", "NDCG", "SMAPE", "AverageLoss", "HitRate", "LogLoss", "Throughput"]
