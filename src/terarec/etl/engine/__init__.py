"""The single-machine engine: fits a workflow's operators on the training part, then encodes and writes every row."""

from terarec.etl.engine.encoded_files import EncodedBlock, EncodedFiles
from terarec.etl.engine.local import fit, prepare
from terarec.etl.engine.progress import OnProgress, PhaseReport, Progress
from terarec.etl.engine.report import PrepareReport

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
