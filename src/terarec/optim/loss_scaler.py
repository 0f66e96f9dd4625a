# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for matrix products in 16 bits: gradients of layers and of rows are scaled and stepped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from terarec.errors import ConfigError
from terarec.optim.row_optimizer import RowOptimizer


class LossScaler:
    """Scales a loss before its backward pass, and the gradients back before the step.

    The calls of a step are ``scale(loss).backward()``, ``unscale_()`` if gradients are clipped or read, ``step()`` and
    ``update()``. An optimizer may be a `RowOptimizer` or any of torch. All optimizers step, or none does: none where a
    row optimizer skips its step, or where the scale is dynamic and a gradient of any of them is not finite.

    A dynamic scale is that of `torch.amp.GradScaler` (Micikevicius et al. 2018, arXiv 1710.03740): multiplied by
    `backoff` after a step that was skipped, and by `growth` after `growth_interval` steps in a row that were not.

    Args:
        scale: Factor of the loss; of a dynamic scale the first one.
        dynamic: Whether the scale follows the gradients.
        device: Type of the device that the loss is on, such as "cuda".
        growth: Factor of a dynamic scale after `growth_interval` steps.
        backoff: Factor of a dynamic scale after a step that was skipped.
        growth_interval: Number of steps without an infinity after which a dynamic scale grows.

    Raises:
        ConfigError: A scale that is not a finite number above 0, or numbers that `torch.amp.GradScaler` rejects.
    """

    def __init__(
        self,
        scale: float = 1.0,
        *,
        dynamic: bool = False,
        device: str = "cpu",
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not 0.0 < scale < float("inf"):
            raise ConfigError("loss scale", f"got {scale!r}, expected a finite number > 0")
        self._static = float(scale)
        self._is_unscaled = False
        self._scaler: torch.amp.GradScaler | None = None
        if dynamic:
            if not (growth > 1.0 and 0.0 < backoff < 1.0 and growth_interval >= 1):
                raise ConfigError(
                    "loss scale",
                    f"got growth {growth!r}, backoff {backoff!r} and growth_interval {growth_interval!r}, "
                    "expected growth > 1, 0 < backoff < 1 and growth_interval >= 1",
                )
            self._scaler = torch.amp.GradScaler(
                device,
                init_scale=scale,
                growth_factor=growth,
                backoff_factor=backoff,
                growth_interval=growth_interval,
            )

    @property
    def current(self) -> float:
        """The factor of the next loss."""
        return self._static if self._scaler is None else float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the factor."""
        if self._scaler is not None:
            scaled: Tensor = self._scaler.scale(loss)
            return scaled
        return loss if self._static == 1.0 else loss * self._static

    def unscale_(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Divide the gradients of all `optimizers` by the factor, unless this was done since the last step.

        After it ``torch.nn.utils.clip_grad_norm_`` bounds the true norm of the gradients of layers and rows together.
        """
        if self._is_unscaled:
            return
        self._is_unscaled = True
        if self._scaler is not None:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        elif self._static != 1.0:
            _divide(optimizers, self._static)

    def step(self, optimizers: Sequence[optim.Optimizer]) -> bool:
        """Unscale the gradients if that was not done, and step all `optimizers`, or none.

        Returns:
            Whether they stepped. If not, the gradients wait for ``zero_grad()``.

        Raises:
            TrainingError: As `RowOptimizer.step`; nothing was updated.
        """
        self.unscale_(optimizers)
        # The step ends here, whether it is taken or skipped.
        self._is_unscaled = False
        stepped = not self._found_inf(optimizers)
        if stepped:
            stepped = _step(optimizers)
        return stepped

    def update(self) -> None:
        """Adapt a dynamic scale after a step, by whether its gradients were finite."""
        if self._scaler is None:
            return
        # torch raises in `update` where no optimizer had gradients to check.
        if any(self._checks(state) for state in self._scaler._per_optimizer_states.values()):
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the step counter of a dynamic one, as JSON data."""
        return {"scale": self._static} if self._scaler is None else dict(self._scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`.

        Raises:
            ConfigError: The state of a static scale for a dynamic one, or the other way round. Nothing is changed.
        """
        expected = self.state_dict()
        if set(state) != set(expected):
            got, names = (", ".join(sorted(keys)) for keys in (state, expected))
            raise ConfigError("loss scale", f"got a state with {got}, expected one with {names}")
        if self._scaler is None:
            self._static = float(state["scale"])
        else:
            self._scaler.load_state_dict(dict(state))

    def _found_inf(self, optimizers: Sequence[optim.Optimizer]) -> bool:
        if self._scaler is None:
            return False
        # `GradScaler.step` decides for one optimizer at a time, but here all step or none, so its findings are read.
        states = [self._scaler._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        return any(bool(flag) for state in states for flag in self._checks(state).values())

    @staticmethod
    def _checks(state: Mapping[str, Any]) -> Mapping[Any, Tensor]:
        checks: Mapping[Any, Tensor] = state["found_inf_per_device"]
        return checks


def _divide(optimizers: Sequence[optim.Optimizer], scale: float) -> None:
    rows = [optimizer for optimizer in optimizers if isinstance(optimizer, RowOptimizer)]
    of_rows = {id(parameter) for optimizer in rows for group in optimizer.param_groups for parameter in group["params"]}
    for optimizer in rows:
        optimizer.unscale_(scale)
    # Once each, though optimizers may share a parameter.
    parameters = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    gradients = [p.grad for key, p in parameters.items() if key not in of_rows and p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, scale)


def _step(optimizers: Sequence[optim.Optimizer]) -> bool:
    """Step the row optimizers, which may skip, and if none did so the others."""
    rows = [optimizer for optimizer in optimizers if isinstance(optimizer, RowOptimizer)]
    # First, as they alone may still find a reason to skip; of several, those with a reason before the others move rows.
    rejecting = [of_rows for of_rows in rows if not of_rows.accepts()] if len(rows) > 1 else []
    for of_rows in rejecting or rows:
        of_rows.step()
    if any(of_rows.is_skipped for of_rows in rejecting or rows):
        return False
    for optimizer in optimizers:
        if not isinstance(optimizer, RowOptimizer):
            optimizer.step()
    return True
