"""Save and load: atomic, checked, free of placement. The files are described in docs/formats.md."""

from terarec.checkpoint.directory import MANIFEST, find, latest, mark_best, whole
from terarec.checkpoint.save_load import Checkpoint, load, save
from terarec.checkpoint.state import TrainState

__all__ = ["MANIFEST", "Checkpoint", "TrainState", "find", "latest", "load", "mark_best", "save", "whole"]
