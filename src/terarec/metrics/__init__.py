"""Streaming metrics: update with every batch, compute at any time, merge across ranks."""

from terarec.metrics.auc import AUC
from terarec.metrics.logloss import LogLoss
from terarec.metrics.throughput import Throughput

__all__ = ["AUC", "LogLoss", "Throughput"]
