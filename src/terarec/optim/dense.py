"""Dense optimizers from their specs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn, optim

from terarec.errors import ConfigError
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    DenseOptimizerSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    SGDSpec,
)


def build_dense_optimizer(spec: DenseOptimizerSpec, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """The `torch.optim` optimizer that `spec` describes, in its fused form (one pass over memory a parameter).

    Adam on the 1.9 M parameters of DLRM's top MLP: 0.7 ms fused, 4.8 foreach, 9.4 plain (2 Zen 3 cores). RMSprop has
    no fused form.

    Raises:
        ConfigError: a spec that only tables can follow, such as `RowWiseAdaGradSpec`, or that has options for rows.
    """
    if spec.rows is not None:
        raise ConfigError("dense optimizer: got options for rows, expected none: they are for tables")
    if isinstance(spec, SGDSpec):
        return optim.SGD(parameters, lr=spec.lr, fused=True)
    if isinstance(spec, MomentumSpec | NesterovSpec):
        nesterov = isinstance(spec, NesterovSpec) and spec.momentum > 0.0  # torch refuses it without momentum
        return optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, nesterov=nesterov, fused=True)
    if isinstance(spec, AdaGradSpec):
        start = spec.initial_accumulator
        return optim.Adagrad(parameters, lr=spec.lr, eps=spec.eps, initial_accumulator_value=start, fused=True)
    if isinstance(spec, RMSPropSpec):
        return optim.RMSprop(parameters, lr=spec.lr, alpha=spec.decay, eps=spec.eps)
    if isinstance(spec, AdamSpec):
        return optim.Adam(parameters, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
    if isinstance(spec, AdamWSpec):
        betas, decay = (spec.beta1, spec.beta2), spec.weight_decay
        return optim.AdamW(parameters, lr=spec.lr, betas=betas, eps=spec.eps, weight_decay=decay, fused=True)
    raise ConfigError(
        f"dense optimizer: got {type(spec).__name__}, expected SGDSpec, MomentumSpec, NesterovSpec, AdaGradSpec, "
        "RMSPropSpec, AdamSpec or AdamWSpec"
    )
