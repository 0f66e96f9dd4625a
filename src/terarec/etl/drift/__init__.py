"""Drift of data from a model's training data. See docs/drift.md."""

from terarec.etl.drift.compare import ColumnDrift, DriftReport, compare, write_drift_report
from terarec.etl.drift.summary import DataSummary, names_apart, summarize, summarize_dataset, summarize_raw

__all__ = [
    "ColumnDrift",
    "DataSummary",
    "DriftReport",
    "compare",
    "names_apart",
    "summarize",
    "summarize_dataset",
    "summarize_raw",
    "write_drift_report",
]
