# SPDX-License-Identifier: Apache-2.0
"""The common part of models whose losses compare items; the dot of two vectors is the score of a user and an item."""

from __future__ import annotations

from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.nn.batch_ranks import BatchRanks
from terarec.nn.losses import mean_of_counted


class Pairs(Protocol):
    """Output for a batch.

    Attributes:
        user: float[B, W].
        item: float[B, W].
    """

    @property
    def user(self) -> Tensor:
        """Vectors of the users."""

    @property
    def item(self) -> Tensor:
        """Vectors of the items."""


class RetrievalModel(nn.Module):
    """Base of the models of retrieval; their ``forward`` returns `Pairs`."""

    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch, over whose samples the loss is a mean."""
    gives_probabilities: ClassVar[bool] = False
    """Whether scores are probabilities of the label; these losses only order the items."""
    takes_probabilities: ClassVar[bool] = True
    """Whether labels are from 0 to 1: all metrics of such scores take these alone."""
    adds_up: ClassVar[bool] = True
    """Whether the loss of a rank is its part of that of the whole batch, and no mean over its own samples."""

    num_counted: Tensor | None = None
    """What the last loss is a mean over, a number of all ranks; None before the first."""
    user_columns: tuple[str, ...]
    """Columns that the vectors of users depend on."""
    item_columns: tuple[str, ...]
    """Columns that the vectors of items depend on."""

    scores_are_dots: ClassVar[bool] = True
    """Whether the score of a pair is the dot of its vectors, by which an index finds items."""

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the users float[B, W]."""
        return cast(Pairs, self(batch)).user

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the items float[B, W]."""
        return cast(Pairs, self(batch)).item

    def output_logits(self, output: Pairs) -> Tensor:
        """Return the score of each sample's own user and item: float[B, 1]."""
        return (output.user * output.item).sum(1, keepdim=True)

    def mean_loss(self, losses: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
        """Return this rank's part of the mean over what counts on all ranks; see `mean_of_counted`."""
        loss, self.num_counted = mean_of_counted(losses, counts, weights, self.batch_ranks)
        return loss

    def draws(self) -> torch.Generator | None:
        """Return the source of random numbers; in evaluation the same each time, whose result is to repeat."""
        return None if self.training else torch.Generator().manual_seed(0)
