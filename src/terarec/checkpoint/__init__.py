"""Save and load: atomic, checked, free of placement. The files are described in docs/formats.md."""

from terarec.checkpoint.directory import find, latest, mark_best, whole
from terarec.checkpoint.manifest import MANIFEST
from terarec.checkpoint.read import Checkpoint, load
from terarec.checkpoint.state import TrainState
from terarec.checkpoint.write import save

__all__ = ["MANIFEST", "Checkpoint", "TrainState", "find", "latest", "load", "mark_best", "save", "whole"]
