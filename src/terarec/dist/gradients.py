# SPDX-License-Identifier: Apache-2.0
"""The sums of layers' gradients over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.dist.ranks import Ranks


def sum_gradients(ranks: Ranks, parameters: Sequence[nn.Parameter], *, also: Tensor | None = None) -> Tensor | None:
    """Replace the gradients of layers by their sums over the ranks, in one collective.

    A loss that is the mean over the samples of all ranks has the sum of the gradients of each rank's share of it; a
    rank without samples adds zeros. A parameter without a gradient on any rank keeps none.

    Args:
        ranks: The ranks.
        parameters: Parameters of the layers, on all ranks the same; those of tables, which are empty, are left out.
        also: Further numbers float32[n] to sum, such as the loss.

    Returns:
        The sums of `also`.
    """
    if ranks.size == 1:
        return also
    trained = [parameter for parameter in parameters if parameter.numel() and parameter.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    # Optimizers leave alone what has no gradient, but not what has zeros: where no rank has one, none may get one.
    missing = [number for number, parameter in enumerate(trained) if parameter.grad is None]
    has_gradient = torch.ones(len(trained), device=device)
    for number in missing:
        has_gradient[number] = 0.0
    numbers = torch.empty(0, device=device) if also is None else also.detach().float().reshape(-1).to(device)
    # All in one collective: the time of a small collective is its latency, and several in each step would add up.
    parts = [has_gradient, numbers]
    for parameter in trained:
        grad = parameter.grad
        # Summed in float32 also for layers in 16 bits, whose sums would be rounded once for each rank.
        parts.append(
            torch.zeros(parameter.numel(), device=device) if grad is None else grad.detach().float().reshape(-1)
        )
    total = ranks.all_reduce_("sum of the layers' gradients", torch.cat(parts))
    sizes = [has_gradient.numel(), numbers.numel(), *(parameter.numel() for parameter in trained)]
    counts, also_summed, *summed = torch.split(total, sizes)
    for number, (parameter, values) in enumerate(zip(trained, summed, strict=True)):
        if parameter.grad is None:
            # Read only here, since that waits for a device: what has a gradient on this rank has one on some.
            if not counts[number].item():
                continue
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values.view(parameter.shape))
    return None if also is None else also_summed
