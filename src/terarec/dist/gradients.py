# SPDX-License-Identifier: Apache-2.0
"""The sums of layers' gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from terarec.dist.ranks import PendingResult, Ranks
from terarec.errors import ConfigError

PART_BYTES = 4 << 20
"""Float32 gradients of a part: enough for the bandwidth of links, and three parts of DLRM's layers."""


def sum_gradients(ranks: Ranks, parameters: Sequence[nn.Parameter], *, also: Tensor | None = None) -> Tensor | None:
    """Replace the gradients of layers by their sums over the ranks, after a backward pass; see `GradientSums`.

    Args:
        ranks: The ranks.
        parameters: Parameters of the layers, on all ranks the same; those of tables, which are empty, are left out.
        also: Further numbers float32[n] to sum, such as the loss.

    Returns:
        The sums of `also`.
    """
    return GradientSums(ranks, parameters).finish(also)


class GradientSums:
    """Replaces the gradients of layers by their sums over the ranks, part by part, also during a backward pass.

    A loss that is the mean over the samples of all ranks has the sum of the gradients of each rank's share of it; a
    rank without samples adds zeros. A parameter without a gradient on any rank keeps none. Parts have the same
    parameters in each step, so that a sum has one order.

    Args:
        ranks: The ranks. For `during_backward` with an order of collectives of their own (`Ranks.twin`), since a rank
            may begin a part before or after other collectives of its backward pass.
        parameters: Parameters of the layers, on all ranks the same; those of tables, which are empty, are left out.
        part_bytes: Bytes from which on a part is full.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter], *, part_bytes: int = PART_BYTES) -> None:
        self.ranks = ranks
        self._parameters = parameters
        self._part_bytes = part_bytes
        self._parts: list[list[nn.Parameter]] = []
        self._missing: list[set[int]] = []
        self._pending: list[PendingResult] = []

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Begin each part but the last as soon as the backward pass inside has computed its gradients.

        Raises:
            ConfigError: A parameter gets a further gradient after its part has begun.
        """
        self._cut()
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, number, index))  # type: ignore[no-untyped-call]
            for number, part in enumerate(self._parts[:-1])  # the last goes with the numbers of `finish`
            for index, parameter in enumerate(part)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, also: Tensor | None = None) -> Tensor | None:
        """Replace the gradients by their sums, and return the sums of `also`, further numbers float32[n]."""
        # The gradients are those of the whole batch already.
        if self.ranks.size == 1:
            return also
        if not self._parts:
            self._cut()
        parts, pending = self._parts, self._pending
        while len(pending) < len(parts):
            self._begin(also if len(pending) == len(parts) - 1 else None)
        self._parts, self._pending = [], []
        summed = None
        for part, result in zip(parts, pending, strict=True):
            sizes = [len(part), *(parameter.numel() for parameter in part)]
            total = result.wait()
            counts, *sums, summed = torch.split(total, [*sizes, total.numel() - sum(sizes)])
            for number, (parameter, values) in enumerate(zip(part, sums, strict=True)):
                if parameter.grad is None:
                    # Read only here, since that waits for a device: what has a gradient on this rank has one on some.
                    if not counts[number].item():
                        continue
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(values.view(parameter.shape))
        return None if also is None else summed

    def _cut(self) -> None:
        """Cut the parameters into parts in the order in which a backward pass comes to them: the last layers first."""
        self._pending, self._parts, size = [], [[]], 0
        if self.ranks.size > 1:
            for parameter in reversed(self._parameters):
                if not parameter.requires_grad or not parameter.numel():
                    continue
                if size >= self._part_bytes:
                    self._parts.append([])
                    size = 0
                self._parts[-1].append(parameter)
                size += parameter.numel() * torch.float32.itemsize
        self._missing = [set(range(len(part))) for part in self._parts]

    def _note(self, number: int, index: int, parameter: Tensor) -> None:
        """Note that a parameter of a part has its gradient; begin this part if no earlier one is left."""
        self._missing[number].discard(index)
        if number < len(self._pending):
            raise ConfigError(
                "layers",
                f"got a further gradient of a parameter of shape {tuple(parameter.shape)}, whose sum over the ranks "
                "has begun, expected one in a backward pass, as with use_reentrant=False of torch.utils.checkpoint",
            )
        while len(self._pending) < len(self._parts) - 1 and not self._missing[len(self._pending)]:
            self._begin()

    def _begin(self, also: Tensor | None = None) -> None:
        part = self._parts[len(self._pending)]
        device = (part[0] if part else torch.empty(0) if also is None else also).device
        # Optimizers leave alone what has no gradient, but not what has zeros: where no rank has one, none may get one.
        missing = [number for number, parameter in enumerate(part) if parameter.grad is None]
        has_gradient = torch.ones(len(part), device=device)
        for number in missing:
            has_gradient[number] = 0.0
        numbers = [has_gradient]
        for parameter in part:
            grad = parameter.grad
            # Summed in float32 also for layers in 16 bits, whose sums would be rounded once for each rank.
            numbers.append(
                torch.zeros(parameter.numel(), device=device) if grad is None else grad.detach().float().reshape(-1)
            )
        if also is not None:
            numbers.append(also.detach().float().reshape(-1).to(device))
        self._pending.append(self.ranks.begin_all_reduce_("sum of the layers' gradients", torch.cat(numbers)))
