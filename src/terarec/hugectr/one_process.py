"""Files of a model that several processes train: the first one reads and writes them, with all rows, for all.

The rows come together in a checkpoint that all processes write and that any number of them loads.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from terarec.checkpoint import Checkpoint, load, save
from terarec.dist import Ranks
from terarec.hugectr.compilation import Compiled
from terarec.models.artifact import load_weights
from terarec.train import Trainer
from terarec.train.checkpointing import capture


class Holder(Protocol):
    """A model of a script, which may be compiled."""

    _made: Compiled | None


Model = TypeVar("Model", bound=Holder)
Given = ParamSpec("Given")


def in_one_process(
    *, changes: bool
) -> Callable[[Callable[Concatenate[Model, Given], None]], Callable[Concatenate[Model, Given], None]]:
    """Let the first of several processes alone run a method, on a model that has the rows of all.

    That process needs memory for all rows while the method runs. The folder of the checkpoint is temporary: that of the
    system, or below the working directory where there are several machines, which have to share it.

    Args:
        changes: Whether the method changes weights or optimizer states, which all processes get then.
    """

    def of_method(
        method: Callable[Concatenate[Model, Given], None],
    ) -> Callable[Concatenate[Model, Given], None]:
        @wraps(method)
        def wrapped(model: Model, /, *args: Given.args, **kwargs: Given.kwargs) -> None:
            made = model._made
            if made is None or made.trainer.ranks.size == 1:
                method(model, *args, **kwargs)
                return
            ranks, what = made.trainer.ranks, method.__name__
            folder = _shared_folder(ranks)
            try:
                held = save(folder / "held", capture(made.trainer, {}), writers=ranks)

                def alone() -> None:
                    with torch.random.fork_rng(devices=()):
                        trainer = made.build_alone()
                    _restore(trainer, load(held))
                    model._made = replace(made, trainer=trainer, model=trainer.model)  # type: ignore[arg-type]
                    try:
                        method(model, *args, **kwargs)
                    finally:
                        model._made = made
                    if changes:
                        save(folder / "changed", capture(trainer, {}))

                ranks.on_first(what, alone)
                if changes:
                    _restore(made.trainer, load(folder / "changed" / held.name))
                    ranks.barrier(what)
            finally:
                if ranks.is_first:
                    shutil.rmtree(folder, ignore_errors=True)

        return wrapped

    return of_method


def _shared_folder(ranks: Ranks) -> Path:
    folder = ""
    if ranks.is_first:
        folder = tempfile.mkdtemp(prefix=".terarec-", dir=Path.cwd() if max(ranks.nodes) else None)
    return Path(ranks.gather("folder of a model's rows", folder)[0])


def _restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load weights, optimizer states and counts of steps."""
    load_weights(trainer.model, checkpoint, with_state=True)
    progress: dict[str, Any] = dict(checkpoint.progress)
    if trainer.optimizers.dense is not None:
        trainer.optimizers.dense.load_state_dict(checkpoint.optimizer())
    if trainer.optimizers.rows is not None:
        trainer.optimizers.rows.load_step_state(progress["row_optimizer"])
    trainer.load_state_dict(progress["trainer"])
