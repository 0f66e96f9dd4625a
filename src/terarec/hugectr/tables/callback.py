"""TrainingCallback (23.06 on)."""

from __future__ import annotations

from collections.abc import Mapping


class TrainingCallback:
    """Base of what a script wants to be told during `Model.fit` with iterations.

    A subclass overrides what it needs; a method that returns True ends the training.
    """

    def on_training_start(self) -> None:
        """Before the first iteration."""

    def on_training_end(self, current_iter: int) -> None:
        """After the last one, which was the `current_iter`-th."""

    def on_eval_start(self, current_iter: int) -> bool:
        """Before an evaluation after `current_iter` iterations."""
        return False

    def on_eval_end(self, current_iter: int, eval_results: Mapping[str, float]) -> bool:
        """After it, with its metrics by name."""
        return False
