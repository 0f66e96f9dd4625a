# SPDX-License-Identifier: Apache-2.0
"""Save and load: atomic, checked, independent of device placement. The files are described in docs/formats.md."""

from terarec.checkpoint.directory import complete_checkpoints, find, latest, mark_best
from terarec.checkpoint.save_load import Checkpoint, follow_changes, load, save
from terarec.checkpoint.state import TrainState

__all__ = [
    "Checkpoint",
    "TrainState",
    "complete_checkpoints",
    "find",
    "follow_changes",
    "latest",
    "load",
    "mark_best",
    "save",
]
