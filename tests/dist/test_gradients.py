# SPDX-License-Identifier: Apache-2.0
"""Sums of layers' gradients over ranks, part by part during the backward pass."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terarec.dist import Ranks, sum_gradients
from terarec.dist.gradients import GradientSums
from tests.dist.launch import Raised, raised, run_ranks

SIZE = 3
SUM = "sum of the layers' gradients"


class Layers(nn.Module):
    """Layers of which `lone` is used on rank 1 alone, and `unused` nowhere; gradients of `narrow` have 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.ones(3))
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.narrow = nn.Parameter(torch.rand(5).bfloat16())
        self.rows = nn.Parameter(torch.empty(0))
        self.lone = nn.ParameterList([torch.rand(5)])  # the first whose sum begins

    def forward(self, rank: int, seen: Any = lambda grad: None) -> Tensor:
        """Return the loss; `seen` is called before the gradients of the first layer are computed."""
        x = torch.rand(6, 4, generator=torch.Generator().manual_seed(rank))
        hidden = self.first(x)
        hidden.register_hook(seen)
        hidden = self.second(hidden.tanh()) * self.narrow.float()
        return (self.last(hidden * self.lone[0] if rank == 1 else hidden)).sigmoid().sum()


def gradients(model: nn.Module) -> dict[str, list[float] | None]:
    return {
        name: None if p.grad is None else p.grad.double().flatten().tolist() for name, p in model.named_parameters()
    }


def summed(ranks: Ranks) -> Any:
    """Return this rank's gradients, their sums in one part and in several, and the bytes sent before the first layer.

    The gradients of two backward passes add up, the second of which sends.
    """
    model = Layers()
    for _ in range(2):
        model(ranks.rank).backward()
    own = gradients(model)
    also = sum_gradients(ranks, list(model.parameters()), also=torch.tensor([1.0, ranks.rank]))
    at_once, bytes_at_once = gradients(model), ranks.sent_bytes[SUM]
    assert also is not None

    model = Layers()
    model(ranks.rank).backward()
    sums, begun = GradientSums(ranks.twin(), list(model.parameters()), part_bytes=40), []
    loss = model(ranks.rank, lambda grad: begun.append(ranks.sent_bytes[SUM] - bytes_at_once))
    with sums.during_backward():
        loss.backward()
        # The exchange of a collection comes between parts, on some ranks earlier than on others.
        ranks.barrier("of other collectives")
    also_later = sums.finish(torch.tensor([1.0, ranks.rank]))
    assert also_later is not None
    total = ranks.sent_bytes[SUM] - bytes_at_once
    return own, at_once, gradients(model), begun, total, also.tolist() == also_later.tolist() == [SIZE, 3.0]


def test_parts_that_begin_in_the_backward_pass_sum_the_gradients_of_all_ranks() -> None:
    results = run_ranks(SIZE, summed)
    assert not isinstance(results[0], Raised), results
    for _, at_once, in_parts, begun, total, has_numbers in results:
        assert has_numbers
        for found in (at_once, in_parts):
            assert found["unused"] is None
            assert len(found["rows"] or []) == 0
            for name, values in found.items():
                parts = [own[name] for own, *_ in results if own[name] is not None]
                if values:
                    rtol = 1e-2 if name == "narrow" else 1e-5
                    np.testing.assert_allclose(values, np.sum(parts, axis=0), rtol=rtol, atol=1e-6)
        assert sum(own["lone.0"] is not None for own, *_ in results) == 1
        assert at_once["lone.0"] is not None
        assert len(begun) == 1
        assert 0 <= begun[0] < total
    # On rank 1, where all parameters of the last layers have gradients, their parts are on their way by then.
    assert results[1][3][0] > 0
    assert results[0][3][0] == 0


def twice(ranks: Ranks) -> Any:
    """Sum gradients that come twice, as those of a layer in two parts of a model that are computed again."""
    layer, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    last = nn.Linear(3, 3)
    sums = GradientSums(ranks, [*last.parameters(), *layer.parameters()], part_bytes=4)
    hidden = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    try:
        with sums.during_backward():
            last(hidden).sum().backward()
    except Exception as error:
        return raised(error), bool(layer.weight._post_accumulate_grad_hooks)
    return None


def test_a_gradient_that_comes_after_its_part_has_begun_is_an_error() -> None:
    for error, has_hooks in run_ranks(2, twice):
        assert error.kind == "ConfigError"
        assert "got a further gradient of a parameter of shape (3" in error.message
        assert not has_hooks
