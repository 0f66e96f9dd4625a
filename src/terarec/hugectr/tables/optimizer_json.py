"""How optimizers are written in JSON."""

from __future__ import annotations

from terarec.hugectr.enums import Optimizer_t

HYPERPARAMETERS: dict[Optimizer_t, tuple[str, tuple[str, ...]]] = {
    Optimizer_t.Ftrl: ("ftrl_hparam", ("beta", "lambda1", "lambda2")),
    Optimizer_t.Adam: ("adam_hparam", ("beta1", "beta2", "epsilon")),
    Optimizer_t.RMSProp: ("rmsprop_hparam", ()),
    Optimizer_t.AdaGrad: ("adagrad_hparam", ("initial_accu_value", "epsilon")),
    Optimizer_t.MomentumSGD: ("momentum_sgd_hparam", ("momentum_factor",)),
    Optimizer_t.Nesterov: ("nesterov_hparam", ("momentum_factor",)),
    Optimizer_t.SGD: ("sgd_hparam", ("atomic_update",)),
}
"""For every kind of optimizer the object with its parameters, and their keys, which are those of CreateOptimizer."""

SCHEDULE = ("learning_rate", "warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
"""Keys of the learning rate, which training files up to 3.0 have in the same object."""
