"""The single-machine engine: fits a workflow's operators on the training part, then encodes and writes every row."""

from terarec.etl.engine.local import fit, prepare
from terarec.etl.engine.report import OnProgress, PhaseReport, PrepareReport, Progress
from terarec.etl.engine.score import EncodedBlock, EncodedFiles

__all__ = [
    "EncodedBlock",
    "EncodedFiles",
    "OnProgress",
    "PhaseReport",
    "PrepareReport",
    "Progress",
    "fit",
    "prepare",
]
