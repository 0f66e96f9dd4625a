"""Gradients of the layers, which every rank has whole: summed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.dist.ranks import Ranks


def sum_gradients(ranks: Ranks, parameters: Sequence[nn.Parameter], *, also: Tensor | None = None) -> Tensor | None:
    """Replace the gradients of layers by their sums over the ranks, in one collective.

    A loss that is the mean over the samples of all ranks has the sum of the gradients of each rank's share of it; a rank
    without samples adds zeros. A parameter without a gradient on any rank keeps none.

    Args:
        ranks: The ranks.
        parameters: Parameters of the layers, on all ranks the same; those of tables, which are empty, are left out.
        also: float32[n], further numbers to sum, such as the loss.

    Returns:
        The sums of `also`.
    """
    if ranks.size == 1:
        return also
    held = [parameter for parameter in parameters if parameter.numel() and parameter.requires_grad]
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in held])
    numbers = torch.empty(0) if also is None else also.detach().float().reshape(-1).cpu()
    parts = [has_gradient, numbers]
    for parameter in held:
        grad = parameter.grad
        parts.append(torch.zeros(parameter.numel()) if grad is None else grad.detach().float().reshape(-1))
    total = ranks.all_reduce_("sum of the layers' gradients", torch.cat(parts))
    sizes = [has_gradient.numel(), numbers.numel(), *(parameter.numel() for parameter in held)]
    counts, also_summed, *summed = torch.split(total, sizes)
    for parameter, count, values in zip(held, counts.tolist(), summed, strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values.view(parameter.shape))
    return None if also is None else also_summed


def check_alike(ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
    """Check that the layers have the same weights on all ranks.

    Raises:
        CollectiveError: They differ from those of rank 0.
    """
    sums = {
        str(number): [list(parameter.shape), float(parameter.detach().double().sum())]
        for number, parameter in enumerate(parameters)
        if parameter.numel()
    }
    ranks.check_same("weights of the layers", sums)
