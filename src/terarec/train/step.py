# SPDX-License-Identifier: Apache-2.0
"""One step of training: the passes over its batches, and the update. `terarec.train.ranks_step` does it on ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from terarec.batch import Batch
from terarec.dist.streams import has_streams
from terarec.errors import ConfigError, TrainingError
from terarec.memory import BudgetError
from terarec.models.contract import logits_of, num_counted, training_loss
from terarec.nn.objectives import Objective
from terarec.nn.precision import autocast
from terarec.optim import LossScaler
from terarec.spec import TrainingSpec
from terarec.train.optimizers import Optimizers

FIRST_DYNAMIC_SCALE = 65536.0
"""First scale of `torch.amp.GradScaler`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """Input of a step.

    Attributes:
        number: Number of the step, from 1.
        epoch: Number of the epoch, from 1.
        batches: Batches whose gradients are added up.
        sizes: Samples of each on all ranks.
        is_own: Whether batches hold the samples of this rank alone.
        following: First batch of the next step, whose keys ranks exchange during this one; None if unknown.
        is_interrupted: Whether this rank has received a signal.
    """

    number: int
    epoch: int
    batches: Sequence[Batch]
    sizes: Sequence[int]
    is_own: bool
    following: Batch | None
    is_interrupted: bool


class TrainingStep:
    """Computes the gradients of batches, and updates the layers and the touched rows by them.

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
        device: Device of the model.
        check_loss: Whether a loss that is NaN or infinite raises.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TrainingSpec,
        optimizers: Optimizers,
        objective: Objective,
        *,
        device: torch.device,
        check_loss: bool,
    ) -> None:
        self.module = cast(nn.Module, torch.compile(model)) if spec.compile else model
        self.output: object = None
        self.loss: Tensor | None = None
        self.is_interrupted = self.exchanges_keys = False
        is_scale_dynamic = spec.loss_scale == "dynamic"
        self.scaler = LossScaler(
            FIRST_DYNAMIC_SCALE if isinstance(spec.loss_scale, str) else spec.loss_scale,
            dynamic=is_scale_dynamic,
            device=device.type,
        )
        self._model, self._spec, self._optimizers, self._objective = model, spec, optimizers, objective
        self._device = device
        self._checks_loss = check_loss and not is_scale_dynamic
        self._unchecked: list[tuple[HostCopy, Batch]] = []
        self._counted: list[Tensor] = []
        self._parameters = list(model.parameters())
        self._stepped = tuple(optimizers)

    def run(self, step: StepInput) -> None:
        """Run a step; see `Trainer.train_step`, also for errors."""
        # Frees the last step's tensors before this one's are made.
        self.output = None
        self._unchecked, self._counted = [], []
        if not self._model.training:
            self._model.train()
        self._optimizers.zero_grad()
        try:
            loss = self._add_gradients(step)
        except BudgetError as error:
            raise error.during(f"step {step.number}") from None
        self._check_before_update(step)
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

    def _add_gradients(self, step: StepInput) -> Tensor:
        """Add the gradients of the batches; return the mean loss of their samples."""
        total = sum(step.sizes)
        losses = [self._backward(batch, batch.batch_size / total, step, nullcontext()) for batch in step.batches]
        return self._mean_over_counted(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), step)

    def _mean_over_counted(self, loss: Tensor, step: StepInput) -> Tensor:
        """Make gradients and loss those of one mean, where the losses of batches are means over other numbers."""
        if not self._counted:
            return loss
        factor = self._counted_divisor(step) / torch.stack(self._counted).sum().clamp_min(1)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss * factor

    def _counted_divisor(self, step: StepInput) -> Tensor:
        # The whole number is not known before the last batch. This one keeps gradients about as large as those of it.
        return self._counted[0].clamp_min(1) * len(step.batches)

    def _backward(
        self,
        batch: Batch,
        share: float,
        step: StepInput,
        during: AbstractContextManager[object],
        *,
        part: float = 1.0,
    ) -> Tensor:
        """Add the gradients of `batch`; return its share of the loss."""
        with autocast(self._spec.precision, self._device):
            output = self.module(batch)
            loss = training_loss(self._model, output, batch, self._objective, share=part)
        counted = num_counted(self._model, self._objective) if len(step.batches) > 1 else None
        if counted is not None:
            self._counted.append(counted)
            loss = loss * (counted / self._counted_divisor(step))
        elif share != 1.0:
            loss = loss * share
        loss = self._checked(loss, batch, step)
        if not loss.requires_grad:
            frozen = ", ".join(map(repr, self._spec.freeze)) or "none"
            raise ConfigError(
                "training.freeze", f"got {frozen}: the loss depends on no parameter that is trained, expected one"
            )
        with during:
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.output = output
        return loss.detach()

    def _checked(self, loss: Tensor, batch: Batch, step: StepInput) -> Tensor:
        """Check the loss of `batch` where this need not wait, and return it."""
        if self._checks_loss and self._device.type == "cpu":
            # Before the backward pass, and so before any update: the error leaves the weights as they were.
            self._check_finite(loss.detach(), step.number, step.epoch, batch)
        elif self._checks_loss:
            self._unchecked.append((HostCopy(loss.detach()), batch))
        return loss

    def _check_before_update(self, step: StepInput) -> None:
        """Check the losses that are on a device."""
        unchecked, self._unchecked = self._unchecked, []
        for copy, batch in unchecked:
            self._check_finite(copy.value(), step.number, step.epoch, batch)

    def _check_finite(self, loss: Tensor, step: int, epoch: int, batch: Batch | None = None) -> None:
        value = loss.item()
        if not math.isfinite(value):
            # A caller that continues must not find half of a step in the gradients.
            self._optimizers.zero_grad()
            with autocast(self._spec.precision, self._device):
                layer = None if batch is None else first_non_finite(self._model, batch)
            origin = "" if layer is None else f", first in {layer}"
            if batch is not None and layer is None:
                origin = (
                    ", of finite outputs of all layers in evaluation: by the loss, or by what training alone computes"
                )
            raise TrainingError(
                f"step {step} (epoch {epoch})",
                f"the loss is {value}{origin}, expected a finite number; a lower learning rate may help",
                layer=layer,
            )


class HostCopy:
    """Numbers on their way from a device, behind the work that gives them.

    While the host waits for them the device does what was launched since.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._ready = numbers, None
        if has_streams(numbers.device):
            # Only a copy to pinned memory lets the host go on.
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._ready = torch.accelerator.current_stream(numbers.device).record_event()

    def value(self) -> Tensor:
        """Wait for the numbers, and return them."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._numbers


def first_non_finite(model: nn.Module, batch: Batch) -> str | None:
    """Return the name of the first layer that gives a value that is not finite for `batch`; None for no layer.

    Layers are those that end first, so that a layer inside another one counts. The model runs in evaluation mode, which
    reads rows of tables and keeps none, and is in its former mode afterwards.
    """
    names: list[str] = []
    was_training = model.training
    model.eval()
    try:
        with ExitStack() as hooks, torch.no_grad():
            for name, module in model.named_modules():
                kind = type(module).__name__
                note = partial(_note, names, f"{name} ({kind})" if name else kind)
                hooks.callback(module.register_forward_hook(note).remove)
            logits_of(model, model(batch))
    # The layers are found for an error that is reported in any case, also where another error ends them.
    except Exception:
        pass
    finally:
        model.train(was_training)
    return names[0] if names else None


def _note(names: list[str], name: str, _module: nn.Module, _inputs: object, output: object) -> None:
    if not names and not all(bool(tensor.isfinite().all()) for tensor in _tensors(output)):
        names.append(name)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
