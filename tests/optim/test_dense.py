import pytest
import torch
from torch import nn

from terarec.errors import ConfigError
from terarec.optim import build_dense_optimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowOptions,
    RowWiseAdaGradSpec,
    SGDSpec,
)

PLAIN = {
    "sgd": (SGDSpec(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2, foreach=False)),
    "adagrad": (
        AdaGradSpec(lr=0.2, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-10, initial_accumulator_value=0.1, foreach=False),
    ),
    "momentum": (
        MomentumSpec(lr=0.2, momentum=0.7),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7, foreach=False),
    ),
    "nesterov": (
        NesterovSpec(lr=0.2, momentum=0.7),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7, nesterov=True, foreach=False),
    ),
    "nesterov without momentum": (
        NesterovSpec(lr=0.2, momentum=0.0),
        lambda p: torch.optim.SGD(p, lr=0.2, foreach=False),
    ),
    "rmsprop": (
        RMSPropSpec(lr=0.2, decay=0.7, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.2, alpha=0.7, eps=1e-3, foreach=False),
    ),
    "adamw": (
        AdamWSpec(lr=0.2, beta1=0.7, beta2=0.8, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.2, betas=(0.7, 0.8), weight_decay=0.3, foreach=False),
    ),
    "adam": (
        AdamSpec(lr=0.2, beta1=0.7, beta2=0.8),
        lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.7, 0.8), foreach=False),
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_follows_the_plain_optimizer(kind: str) -> None:
    spec, make = PLAIN[kind]
    weights = [nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights]
    mine, plain = build_dense_optimizer(spec, weights), make(twins)
    for _ in range(4):
        for weight, twin in zip(weights, twins, strict=True):
            weight.grad = torch.randn(5, 3)
            twin.grad = weight.grad.clone()
        mine.step()
        plain.step()
    torch.testing.assert_close(weights, twins)


def test_a_rule_for_tables_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="got RowWiseAdaGradSpec, expected SGDSpec"):
        build_dense_optimizer(RowWiseAdaGradSpec(), [nn.Parameter(torch.zeros(2))])  # type: ignore[arg-type]


def test_options_for_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="got options for rows, expected none"):
        build_dense_optimizer(SGDSpec(rows=RowOptions()), [nn.Parameter(torch.zeros(2))])
