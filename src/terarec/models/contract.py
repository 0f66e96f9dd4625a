# SPDX-License-Identifier: Apache-2.0
"""The interface of a model besides ``forward``, for training, evaluation and serving.

A model is a module that turns a `Batch` into logits float[B, C]. One whose ``forward`` returns something else has
``output_logits(output) -> Tensor``; one with a loss of its own has ``training_loss(output, batch) -> Tensor``, and one
with a term that training alone adds to the loss, a mean over the samples, ``auxiliary_loss(output, batch) -> Tensor``.
One that is to know the items of each user has ``learn_positives(batches)``, which a run calls with the train split
before it trains. A loss of its own, as an objective, may have ``takes_probabilities = True``, so that its labels are
from 0 to 1, and ``adds_up = True``, where the loss of a rank is its part of that of the whole batch, and no mean over
its own samples. One that is a mean over a part of the samples, or over positions or pairs, may keep the number of
these, of all ranks, as ``num_counted`` after each call, so that several batches of a step have one mean. A module with
buffers that have an element for each id, such as counts, names them in ``id_buffers``: where ids are added, these
elements begin at 0. One with lists that have a value for each key of another list names them in ``beside``, column
-> that of the other list; one that reads keys that it does not look up, such as times, names their columns in
``key_columns``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.nn.objectives import Objective


class VectorModel(Protocol):
    """A model that retrieves: the score of a pair is the dot product of the vectors of user and item.

    It may name the columns that the vectors depend on as ``user_columns`` and ``item_columns``; without, records are to
    have all columns, and those of the other side are zeros, or missing.
    """

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the users float[B, D]; columns of items are not read."""

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the items float[B, D]; columns of users are not read."""


def training_loss(
    model: nn.Module, output: object, batch: Batch, objective: Objective, *, share: float = 1.0
) -> Tensor:
    """Return the scalar that training minimises: the model's own loss if it has one, else the objective's.

    Args:
        model: The model.
        output: Output of its ``forward`` for `batch`.
        batch: The batch.
        objective: The loss for models that return logits.
        share: Part of the whole batch that `batch` is, where ranks have the others: the factor of what is a mean.

    Raises:
        ConfigError: Logits of another shape than the objective takes, or no logits.
    """
    # By attribute and not by a base class, so that any `torch.nn.Module` is a model.
    own = getattr(model, "training_loss", None)
    loss: Tensor = objective.loss(logits_of(model, output), batch) if own is None else own(output, batch)
    if share != 1.0 and not adds_up(model, objective):
        loss = loss * share
    auxiliary = getattr(model, "auxiliary_loss", None)
    return loss if auxiliary is None or not model.training else loss + auxiliary(output, batch) * share


def adds_up(model: nn.Module, objective: Objective) -> bool:
    """Return whether the loss of a rank is its part of that of the whole batch, and no mean over its own samples."""
    return bool(getattr(model if hasattr(model, "training_loss") else objective, "adds_up", False))


def num_counted(model: nn.Module, objective: Objective) -> Tensor | None:
    """Return what the last loss is a mean over, a number of all ranks; None where it is one over samples.

    Nor has a loss one such number that has a term over the samples besides.
    """
    if getattr(model, "auxiliary_loss", None) is not None:
        return None
    found: Tensor | None = getattr(model if hasattr(model, "training_loss") else objective, "num_counted", None)
    return found


def check_labels(model: nn.Module, objective: Objective, labels: Sequence[str], batch: Batch) -> None:
    """Check that the loss takes the labels of a batch in host memory, where this waits for no device.

    `labels` are numbers where there are no names.

    Raises:
        ConfigError: A label outside [0, 1] for a loss of probabilities, which falls without an end for it.
    """
    source = model if hasattr(model, "training_loss") else objective
    if not getattr(source, "takes_probabilities", False):
        return
    is_bad = (batch.label < 0) | (batch.label > 1)
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        name = labels[column] if labels else str(column)
        other = ", or for numbers the objective 'regression'" if source is objective else ""
        raise ConfigError(
            f"label {name!r}",
            f"got {batch.label[row, column]:g}, expected 0 to 1: in the workflow a label with at_least or positives"
            f"{other}",
        )


def logits_of(model: nn.Module, output: object) -> Tensor:
    """Return the logits float[B, C] in the output of ``forward`` of `model`.

    Raises:
        ConfigError: There are none.
    """
    find = getattr(model, "output_logits", None)
    logits = output if find is None else find(output)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            type(model).__name__,
            f"got {type(logits).__name__} from it, expected logits [B, C], or a method "
            "output_logits(output) that returns them",
        )
    return logits


def device_of(model: nn.Module) -> torch.device:
    """Return where the parameters of `model`, and so its tables, are; the CPU for a model without any."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def score_names(labels: Sequence[str], num_scores: int) -> tuple[str, ...]:
    """Return the names of a sample's scores in files.

    They are ``score`` for one, ``score_<label>`` for one a label, and ``score_<class>`` for those of classes.
    """
    if num_scores == 1:
        return ("score",)
    names = labels if len(labels) == num_scores else map(str, range(num_scores))
    return tuple(f"score_{name}" for name in names)
