"""One step of training: the passes over a rank's samples, the sums over ranks, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from terarec.batch import Batch, slice_samples
from terarec.dist.ranks import Ranks, sum_gradients
from terarec.dist.shard import ShardedCollection
from terarec.errors import ConfigError, TrainingError
from terarec.models.contract import training_loss
from terarec.nn.normalization import BatchNorm1d
from terarec.nn.objectives import Objective
from terarec.nn.precision import autocast
from terarec.optim import LossScaler
from terarec.spec import TrainingSpec
from terarec.storage import BudgetError
from terarec.train.optimizers import Optimizers

FIRST_DYNAMIC_SCALE = 65536.0
"""First scale of `torch.amp.GradScaler`."""


class TrainingStep:
    """Computes the gradients of batches, and updates the layers and the touched rows by them.

    Layers and losses that compare samples see those of all ranks from then on (`share_batches`).

    Attributes:
        module: The model, compiled where the run requests it.
        scaler: The scale of the loss.
        output: Output of the model for the last batch.
        loss: The loss of the last step, a scalar on the model's device; None before the first.
        is_interrupted: Whether a rank had received a signal before it summed the gradients of a step.
        exchanges_keys: Whether ranks exchange the keys of the next step during a step.

    Args:
        model: The model, on `device`.
        spec: Settings of the training.
        optimizers: Optimizers of its parameters and tables.
        objective: Loss of models that have none of their own.
        ranks: Processes that train together.
        device: Device of the model.
        check_loss: Whether a loss that is NaN or infinite raises.

    Raises:
        ConfigError: With several ranks a layer that has the statistics of one.
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
        # Before the model is compiled and its parameters are listed: it may replace layers.
        share_batches(model, objective, ranks)
        self.module = cast(nn.Module, torch.compile(model)) if spec.compile else model
        self.output: object = None
        self.loss: Tensor | None = None
        self.is_interrupted = False
        self._is_scale_dynamic = spec.loss_scale == "dynamic"
        self.scaler = LossScaler(
            FIRST_DYNAMIC_SCALE if isinstance(spec.loss_scale, str) else spec.loss_scale,
            dynamic=self._is_scale_dynamic,
            device=device.type,
        )
        self._model, self._spec, self._optimizers, self._objective = model, spec, optimizers, objective
        self._ranks, self._device = ranks, device
        self._checks_loss = check_loss and not self._is_scale_dynamic
        self._parameters = list(model.parameters())
        self._stepped = tuple(optimizers)
        self._exchanged = [module for module in model.modules() if isinstance(module, ShardedCollection)]
        self.exchanges_keys = bool(self._exchanged) and ranks.size > 1
        self._own_next: tuple[Batch, Batch] | None = None
        self._number = self._epoch = 0

    def run(
        self,
        batches: Sequence[Batch],
        sizes: Sequence[int],
        *,
        number: int,
        epoch: int,
        following: Batch | None,
        is_own: bool,
        is_interrupted: bool,
    ) -> None:
        """Run a step; see `Trainer.train_step`, also for errors.

        Args:
            batches: Batches whose gradients are added up.
            sizes: Samples of each on all ranks.
            number: Number of the step, from 1.
            epoch: Number of the epoch, from 1.
            following: First batch of the next step; None if unknown.
            is_own: Whether batches hold the samples of this rank alone.
            is_interrupted: Whether this rank has received a signal.
        """
        self.output = None  # frees the last step's tensors before this one's are made
        if not self._model.training:
            self._model.train()
        self._optimizers.zero_grad()
        before, self._number, self._epoch = self.loss, number, epoch
        self._ranks.step = number
        total = sum(sizes)
        try:
            if self._ranks.size == 1:
                parts = [self._backward(batch, batch.batch_size / total) for batch in batches]
            else:
                parts = [
                    self._backward_of_share(batch, size, size / total, then, is_own=is_own)
                    for batch, size, then in zip(batches, sizes, (*batches[1:], following), strict=True)
                ]
        except BudgetError as error:
            raise error.during(f"step {number}") from None
        loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        if self._ranks.size > 1:
            loss = self._sum_over_ranks(loss, is_interrupted=is_interrupted)
        # Reading the loss of this step would wait for the GPU; that of the step before is there by now.
        if self._checks_loss and self._device.type != "cpu" and before is not None:
            self._check_finite(before, number - 1)
        if self._spec.clip_norm is not None:
            # The norm of scaled gradients would be wrong. It includes the rows of tables, by the parameters that
            # represent them.
            self.scaler.unscale_(self._stepped)
            clip_grad_norm_(self._parameters, self._spec.clip_norm)
        is_done = self.scaler.step(self._stepped)
        self.scaler.update()
        # A skipped step is not a step of a schedule.
        if is_done:
            self._optimizers.advance("step")
        self.loss = loss

    def _backward(self, batch: Batch, share: float) -> Tensor:
        """Add the gradients of `batch`, which is `share` of the step's samples; return its share of the loss."""
        with autocast(self._spec.precision, self._device):
            output = self.module(batch)
            loss = training_loss(self._model, output, batch, self._objective)
        if share != 1.0:
            loss = loss * share
        if self._ranks.size > 1 and not batch.batch_size:
            loss = loss.nan_to_num()  # the mean of no samples
        value = loss.detach()
        if self._checks_loss and self._device.type == "cpu" and self._ranks.size == 1:
            # Before the backward pass, and so before any update: the error leaves the weights as they were.
            self._check_finite(value, self._number)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.output = output
        return value

    def _backward_of_share(
        self, batch: Batch, size: int, share: float, following: Batch | None, *, is_own: bool
    ) -> Tensor:
        """Call `_backward` for this rank's samples of a batch of `size`, while the keys of the following one travel."""
        known = self._own_next
        # The keys of this batch were announced during the previous step, unless the caller passes another batch.
        own = known[1] if known is not None and known[0] is batch else self._own_share(batch, is_own=is_own)
        # All ranks call the collectives in the same order, also a rank without samples.
        for collection in self._exchanged:
            collection.start(own.sparse)
        if following is not None:
            self._own_next = (following, self._own_share(following, is_own=is_own))
            for collection in self._exchanged:
                collection.announce(self._own_next[1].sparse)
        return self._backward(own, share * loss_share(self._model, self._objective, own.batch_size, size))

    def _own_share(self, batch: Batch, *, is_own: bool) -> Batch:
        if is_own:
            return batch
        part = self._ranks.share(batch.batch_size)
        return slice_samples(batch, part.start, part.stop)

    def _sum_over_ranks(self, loss: Tensor, *, is_interrupted: bool) -> Tensor:
        """Sum the gradients of layers over the ranks, and return the sum of the loss, and note signals of any rank."""
        # A signal reaches ranks at different steps. They travel with the gradients, so that all stop after the same
        # one.
        numbers = torch.stack([loss.float().cpu(), torch.tensor(float(is_interrupted))])
        summed = sum_gradients(self._ranks, self._parameters, also=numbers)
        assert summed is not None, "numbers were given"
        self.is_interrupted |= bool(summed[1] > 0)
        if self._checks_loss:
            self._check_finite(summed[0], self._number)
        return summed[0]

    def _check_finite(self, loss: Tensor, step: int) -> None:
        value = loss.item()
        if not math.isfinite(value):
            # A caller that continues must not find half of a step in the gradients.
            self._optimizers.zero_grad()
            raise TrainingError(
                f"step {step} (epoch {self._epoch})",
                f"the loss is {value}, expected a finite number; a lower learning rate may help",
            )


def share_batches(model: nn.Module, objective: Objective, ranks: Ranks) -> None:
    """Let layers and losses that compare the samples of a batch, of which each rank has a part, see those of all.

    torch's batch norm of columns is replaced by `terarec.nn.normalization.BatchNorm1d` with the same parameters.

    Raises:
        ConfigError: Another batch norm of torch.
    """
    if ranks.size > 1:
        for parent in list(model.modules()):
            for name, module in parent.named_children():
                if type(module) is nn.BatchNorm1d:
                    parent._modules[name] = BatchNorm1d.like(module)
    for module in model.modules():
        is_other = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, BatchNorm1d)
        if is_other and ranks.size > 1:
            raise ConfigError(
                "ranks",
                f"got {ranks.size} processes for {type(module).__name__}, which has the statistics of one, expected "
                "BatchNorm1d",
            )
    comparing: list[Any] = [objective, *model.modules()]
    for held in comparing:
        if hasattr(held, "batch_ranks"):
            held.batch_ranks = ranks if ranks.size > 1 else None


def loss_share(model: nn.Module, objective: Objective, own: int, whole: int) -> float:
    """Return the factor of a rank's loss in that of the batch: its share of the samples, or 1 for losses that add up.

    Args:
        model: The model.
        objective: Loss of models that have none of their own.
        own: Samples of this rank.
        whole: Samples of the batch.
    """
    source = model if hasattr(model, "training_loss") else objective
    if getattr(source, "adds_up", False):
        return 1.0
    return own / whole if whole else 0.0
