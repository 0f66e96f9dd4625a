"""When a run writes checkpoints, and what goes into them."""

from __future__ import annotations

from pathlib import Path

import torch

from terarec.checkpoint import Checkpoint, TrainState, save
from terarec.models.artifact import load_weights
from terarec.models.state import dense_state, tables
from terarec.train.callback import Callback
from terarec.train.trainer import BatchReader, Trainer


class Checkpointing(Callback):
    """Saves every ``checkpoint_every`` steps or at every epoch's end, when a signal stops the run, and at the end.

    Args:
        directory: ``RUN/checkpoints``.
        every: steps between checkpoints; None for epochs' ends.
        keep: how many of the newest stay.
        newest: the checkpoint that the run continues from, if any.
    """

    def __init__(self, directory: Path, *, every: int | None, keep: int) -> None:
        self.directory = directory
        self.every = every
        self.keep = keep
        self.newest: Path | None = None
        self._saved_step = -1

    def on_start(self, trainer: Trainer) -> None:
        """A resumed step has its checkpoint already."""
        self._saved_step = trainer.step if self.newest is not None else -1

    def on_step(self, trainer: Trainer) -> None:
        """Save if the step is due."""
        if self.every is not None and trainer.step % self.every == 0:
            self._save(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Save unless steps are counted instead."""
        if self.every is None:
            self._save(trainer)

    def on_interrupt(self, trainer: Trainer) -> None:
        """Save what would be lost."""
        self._save(trainer)

    def on_finish(self, trainer: Trainer) -> None:
        """Save the last step."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._saved_step != trainer.step:
            self.newest = save(self.directory, capture(trainer), keep=self.keep)
            self._saved_step = trainer.step


def capture(trainer: Trainer) -> TrainState:
    """The state of a running `Trainer.fit` between two steps; nothing is copied."""
    assert trainer.reader is not None, "only a running fit has a reader to save"
    rows = trainer.row_optimizer
    return TrainState(
        step=trainer.step,
        dense=dense_state(trainer.model),
        tables=tables(trainer.model),
        optimizer=trainer.dense_optimizer.state_dict(),
        rng=torch.get_rng_state(),
        progress={
            "trainer": trainer.state_dict(),
            "reader": trainer.reader.state_dict(),
            "row_optimizer": None if rows is None else rows.step_state(),
        },
    )


def restore(trainer: Trainer, reader: BatchReader, checkpoint: Checkpoint) -> None:
    """Bring `trainer` and its train reader to where `checkpoint` was saved.

    Raises:
        ConfigError: model, optimizers or reader were described otherwise.
        FormatError: a damaged file.
    """
    load_weights(trainer.model, checkpoint, with_state=True)
    trainer.dense_optimizer.load_state_dict(checkpoint.optimizer())
    progress = checkpoint.progress
    if trainer.row_optimizer is not None:
        trainer.row_optimizer.load_step_state(progress["row_optimizer"])
    reader.load_state_dict(progress["reader"])
    trainer.load_state_dict(progress["trainer"])
    torch.set_rng_state(checkpoint.rng)
