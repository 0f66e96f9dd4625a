# SPDX-License-Identifier: Apache-2.0
"""One step of training on several ranks: their shares of the batches, and the sums of their gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from terarec.batch import Batch, slice_samples
from terarec.dist.gradients import GradientSums
from terarec.dist.ranks import Ranks
from terarec.dist.shard import ShardedCollection, named_memory
from terarec.embedding.modules import replace_modules
from terarec.errors import ConfigError
from terarec.models.contract import adds_up
from terarec.nn.normalization import BatchNorm1d
from terarec.nn.objectives import Objective
from terarec.spec import TrainingSpec
from terarec.train.optimizers import Optimizers
from terarec.train.step import HostCopy, StepInput, TrainingStep


class RanksStep(TrainingStep):
    """A step of which each of several ranks computes its share, and all do the same update.

    Args:
        model, spec, optimizers, objective, device, check_loss: As for `TrainingStep`.
        ranks: Processes that train together.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TrainingSpec,
        optimizers: Optimizers,
        objective: Objective,
        *,
        ranks: Ranks,
        device: torch.device,
        check_loss: bool,
    ) -> None:
        super().__init__(model, spec, optimizers, objective, device=device, check_loss=check_loss)
        self._ranks = ranks
        self._exchanged = [module for module in model.modules() if isinstance(module, ShardedCollection)]
        self.exchanges_keys = bool(self._exchanged)
        # Their parts begin during the backward pass, between collectives of the tables.
        self._sums = GradientSums(ranks.twin(), self._parameters)
        self._own_next: tuple[Batch, Batch] | None = None
        self._former: HostCopy | None = None

    @override
    def run(self, step: StepInput) -> None:
        with named_memory(self._model, "layers or updates"):
            super().run(step)

    @override
    def _add_gradients(self, step: StepInput) -> Tensor:
        self._ranks.step = self._sums.ranks.step = step.number
        total, losses, followers = sum(step.sizes), [], (*step.batches[1:], step.following)
        for number, (batch, size, following) in enumerate(zip(step.batches, step.sizes, followers, strict=True), 1):
            own = self._announce(batch, following, step)
            part = own.batch_size / size if size else 0.0
            during = self._sums.during_backward() if number == len(step.batches) else nullcontext()
            losses.append(self._backward(own, size / total, step, during, part=part))
        loss = self._sum_over_ranks(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), step)
        return self._mean_over_counted(loss, step)

    def _announce(self, batch: Batch, following: Batch | None, step: StepInput) -> Batch:
        """Return this rank's samples of `batch`; from now on the keys of the `following` one travel."""
        known = self._own_next
        # The keys of this batch were announced during the previous step, unless the caller passes another batch.
        own = known[1] if known is not None and known[0] is batch else self._own_share(batch, step)
        # All ranks call the collectives in the same order, also a rank without samples.
        for collection in self._exchanged:
            collection.start(own.sparse)
        if following is not None:
            self._own_next = (following, self._own_share(following, step))
            for collection in self._exchanged:
                collection.announce(self._own_next[1].sparse)
        return own

    def _own_share(self, batch: Batch, step: StepInput) -> Batch:
        if step.is_own:
            return batch
        part = self._ranks.share(batch.batch_size)
        return slice_samples(batch, part.start, part.stop)

    @override
    def _checked(self, loss: Tensor, batch: Batch, step: StepInput) -> Tensor:
        # The sum over ranks is checked, so that all of them raise.
        return loss if batch.batch_size else loss.nan_to_num()  # the mean of no samples

    def _sum_over_ranks(self, loss: Tensor, step: StepInput) -> Tensor:
        """Sum the gradients of layers over the ranks, and return the sum of the loss, and note signals of any rank."""
        # A signal reaches ranks at different steps. They travel with the gradients, so that all stop after the same
        # one.
        loss = loss.detach().float()
        numbers = torch.stack([loss, torch.full_like(loss, float(step.is_interrupted))])
        summed = self._sums.finish(numbers)
        assert summed is not None, "numbers were given"
        is_here, copy = self._device.type == "cpu", HostCopy(summed)
        # Those of this step would wait for the device: there, ranks check the loss of the step before and stop by its
        # flag.
        there, self._former = copy if is_here else self._former, copy
        if there is not None:
            whole, flag = there.value()
            if flag > 0:
                # Not once more in the next step, should there be one.
                self.is_interrupted, self._former = (
                    True,
                    HostCopy(torch.stack([summed[0], torch.zeros_like(summed[1])])),
                )
            if self._checks_loss:
                self._check_finite(whole, step.number if is_here else step.number - 1, step.epoch)
        return summed[0]


def share_batches(model: nn.Module, objective: Objective, ranks: Ranks) -> None:
    """Let layers and losses that compare the samples of a batch, of which each rank has a part, see those of all.

    torch's batch norm of columns is replaced by `terarec.nn.normalization.BatchNorm1d` with the same parameters.
    """
    if ranks.size > 1:
        norms = [module for module in model.modules() if type(module) is nn.BatchNorm1d]
        replace_modules(model, {norm: BatchNorm1d.like(norm) for norm in norms})
    for module in model.modules():
        is_other = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, BatchNorm1d)
        if is_other and ranks.size > 1:
            raise ConfigError(
                "ranks",
                f"got {ranks.size} processes for {type(module).__name__}, which has the statistics of one, expected "
                "BatchNorm1d",
            )
    comparing: list[Any] = [objective, *model.modules()]
    for comparer in comparing:
        if hasattr(comparer, "batch_ranks"):
            comparer.batch_ranks = ranks if ranks.size > 1 else None


def loss_share(model: nn.Module, objective: Objective, own: int, whole: int) -> float:
    """Return the factor of a rank's loss in that of the batch: its share of samples, or 1 for losses that add up."""
    if adds_up(model, objective):
        return 1.0
    return own / whole if whole else 0.0
