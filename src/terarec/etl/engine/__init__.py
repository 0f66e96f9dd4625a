"""The single-machine engine: fits a workflow's operators on the training part, then encodes and writes every row."""

from terarec.etl.engine.phases import OnProgress, PhaseReport, PrepareReport, Progress
from terarec.etl.engine.score import EncodedBlock, EncodedFiles

__all__ = [
    "EncodedBlock",
    "EncodedFiles",
    "OnProgress",
    "PhaseReport",
    "PrepareReport",
    "Progress",
]
