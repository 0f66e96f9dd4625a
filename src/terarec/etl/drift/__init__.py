"""How far data have moved from those that a model was trained on. Described in docs/drift.md."""

from terarec.etl.drift.compare import ColumnDrift, DriftReport, compare
from terarec.etl.drift.raw_rows import summarize_raw
from terarec.etl.drift.report import write_drift_report
from terarec.etl.drift.rows import names_apart, summarize_dataset
from terarec.etl.drift.summary import DataSummary, summarize

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
