"""Save and load: atomic, checked, free of placement. The files are described in docs/formats.md."""

from terarec.checkpoint.directory import latest, whole
from terarec.checkpoint.load import Checkpoint, load
from terarec.checkpoint.manifest import MANIFEST
from terarec.checkpoint.save import save
from terarec.checkpoint.state import TrainState

__all__ = ["MANIFEST", "Checkpoint", "TrainState", "latest", "load", "save", "whole"]
