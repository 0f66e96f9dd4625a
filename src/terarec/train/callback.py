"""What may watch a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from terarec.train.evaluation import Evaluation
    from terarec.train.trainer import Trainer


class Callback:
    """Called by `Trainer.fit`; every hook does nothing unless overridden.

    What a hook raises ends the training, as it was after the last step: a `Run` still saves that step.

    The trainer's ``step``, ``epoch``, ``samples`` and ``loss`` say how far it is.
    """

    def on_start(self, trainer: Trainer) -> None:
        """`fit` begins, perhaps continuing a restored run."""

    def on_step_start(self, trainer: Trainer) -> None:
        """A batch is there and its step follows; learning rates may still be set for it."""

    def on_step(self, trainer: Trainer) -> None:
        """A step is done, its weights are updated; if an evaluation was due, that is done too."""

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """The validation split was scored after ``trainer.step`` steps; `on_step` of that step follows."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """All batches of an epoch are done; ``trainer.epoch`` counts it already."""

    def on_interrupt(self, trainer: Trainer) -> None:
        """A signal asked to stop; the last step is complete. `on_end` follows."""

    def on_finish(self, trainer: Trainer) -> None:
        """All steps are done. `on_end` follows."""

    def on_error(self, trainer: Trainer) -> None:
        """A hook, the reader or an evaluation raised an exception between two steps. `on_end` follows."""

    def on_end(self, trainer: Trainer) -> None:
        """`fit` ends for whatever reason, an error included: release what was taken."""
