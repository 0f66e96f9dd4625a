# SPDX-License-Identifier: Apache-2.0
"""hugectr.optimizer of 3.0, and optimizers of every release as terarec's: of dense layers and of embeddings."""

from __future__ import annotations

from dataclasses import replace

from terarec.hugectr.enums import Optimizer_t, Update_t
from terarec.hugectr.objects import OptimizerWithSchedule, OptParamsPy
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    OptimizerSpec,
    RMSPropSpec,
    RowOptions,
    SGDSpec,
    SparseOptimizerSpec,
)

__all__ = [
    "CreateOptimizer",
    "OptimizerWithSchedule",
]

CreateOptimizer = OptimizerWithSchedule


STATES = {
    Optimizer_t.SGD: 0,
    Optimizer_t.AdaGrad: 1,
    Optimizer_t.MomentumSGD: 1,
    Optimizer_t.Nesterov: 1,
    Optimizer_t.RMSProp: 1,
    Optimizer_t.Adam: 2,
    Optimizer_t.Ftrl: 2,
}
"""Number of an optimizer's states for each weight; lazy Adam has one more."""

# Without a gradient the others leave a row as it is, so "global" is "local" for them.
_MOVES_ALL_ROWS = {Optimizer_t.Adam, Optimizer_t.MomentumSGD, Optimizer_t.Nesterov}


def optimizer_rule(params: OptParamsPy, lr: float) -> OptimizerSpec:
    """Return the optimizer of dense layers, and of a collection's tables, which updates the rows of a batch.

    Args:
        params: The `CreateOptimizer` object.
        lr: The first learning rate.
    """
    kind = params.optimizer_type
    if kind is Optimizer_t.SGD:
        return SGDSpec(lr=lr)
    # HugeCTR's momentum holds the learning rate: v = beta v - lr g. torch multiplies the rate at the update, which
    # differs once the rate changes.
    if kind is Optimizer_t.MomentumSGD:
        return MomentumSpec(lr=lr, momentum=params.momentum_factor, lr_in_momentum=True)
    if kind is Optimizer_t.Nesterov:
        return NesterovSpec(lr=lr, momentum=params.momentum_factor, lr_in_momentum=True)
    if kind is Optimizer_t.AdaGrad:
        return AdaGradSpec(lr=lr, eps=params.epsilon, initial_accumulator=params.initial_accu_value)
    if kind is Optimizer_t.RMSProp:
        return RMSPropSpec(lr=lr, decay=0.9, eps=1e-7)  # not to be set there
    if kind is Optimizer_t.Ftrl:
        return FTRLSpec(lr=lr, beta=params.beta, l1=params.lambda1, l2=params.lambda2)
    # HugeCTR adds epsilon to the root of v before the correction of its bias, as TensorFlow does.
    return AdamSpec(lr=lr, beta1=params.beta1, beta2=params.beta2, eps=params.epsilon, eps_hat=True)


def embedding_optimizer(params: OptParamsPy, lr: float) -> SparseOptimizerSpec:
    """Return the optimizer of a `SparseEmbedding`, which may update all rows."""
    rule = optimizer_rule(params, lr)
    if params.update_type is Update_t.LazyGlobal:
        return replace(rule, rows=RowOptions(mode="lazy_global"))
    if params.update_type is Update_t.Global and params.optimizer_type in _MOVES_ALL_ROWS:
        return replace(rule, rows=RowOptions(mode="global"))
    return rule
