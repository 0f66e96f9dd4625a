# SPDX-License-Identifier: Apache-2.0
"""Row rules: one class for each optimizer of rows, with its numbers, its states and its formula.

In the formulas w is a row and g the sum of its gradients; powers and roots are elementwise. `RowRule.update_` is the
formula in plain PyTorch: the reference of the fast kernels, and what runs for a rule without them. The compiled core
has the same fields by the same names (`csrc/embedding/row_update.h`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from terarec.errors import ConfigError

UpdateMode = Literal["local", "global", "lazy_global"]
UPDATE_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
LAST_UPDATE = "last_update"
"""Name of the state that counts, int32[V]: the last step that touched a row, 0 for none."""
FAST_KERNELS = ("triton", "cpu")
"""Implementations that have a kernel of each rule of this package."""

_BELOW = {
    "beta1": 1.0,
    "beta2": 1.0,
    **dict.fromkeys(("eps", "eps_hat", "beta", "l1", "l2", "weight_decay"), math.inf),
}
"""Number -> its exclusive upper bound; the lower bound is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRule:
    """The base of all rules.

    Before a formula gets g, it is transformed in this order: g <- grad_scale g;  g <- clamp(g, -clip_value,
    clip_value);  g <- g min(1, clip_norm / norm(g));  and, unless the rule is proximal, g <- g + l2 w + l1 sign(w).

    Rows to update: "local": those with a key in the batch. "global": all rows of the tables that are looked up, with
    g = 0 for a row without a key. "lazy_global": as "local", but a row first catches up the k steps in which "global"
    would have updated it since its last one, p, at the present learning rate.

    Attributes:
        lr: Learning rate; a table's factor multiplies it.
        mode: Rows to update.
        l1: Regularisation, added to the gradient; part of the formula of a proximal rule.
        l2: Regularisation, added to the gradient; part of the formula of a proximal rule.
        grad_scale: Factor of the gradients, applied first.
        clip_value: Bound of every element of a row's gradient.
        clip_norm: Bound of the norm of a row's gradient.
    """

    kind: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()
    """Names of the states, float32[V, D] each, in the order in which kernels take them."""
    row_states: ClassVar[tuple[str, ...]] = ()
    """Those of the states with one number a row, float32[V]."""
    has_inertia: ClassVar[bool] = False
    """Whether a step without a gradient changes a row or its state."""
    is_proximal: ClassVar[bool] = False
    """Whether l1 and l2 are part of the formula; such a rule divides by lr."""
    kernels: ClassVar[tuple[str, ...]] = ()
    """Fast implementations with a kernel of the formula; `update_` runs elsewhere."""

    lr: float
    mode: UpdateMode = "local"
    l1: float = 0.0
    l2: float = 0.0
    grad_scale: float = 1.0
    clip_value: float = math.inf
    clip_norm: float = math.inf

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, UPDATE_MODES)
        if not math.isfinite(self.lr):
            raise self._bad("lr", "a finite number")
        # "not low <= x < high" is also true of NaN, which "x < low or x >= high" would accept.
        for name, limit in _LIMITS[type(self)]:
            if not 0.0 <= getattr(self, name) < limit:
                raise self._bad(name, f"0 <= {name} < 1" if limit == 1.0 else "a finite number >= 0")
        if not self.clip_value > 0.0:
            raise self._bad("clip_value", "a number > 0")
        if not self.clip_norm > 0.0:
            raise self._bad("clip_norm", "a number > 0")
        if self.is_proximal and self.lr <= 0.0:
            raise self._bad("lr", f"a number > 0 for {self.kind!r}, which divides by it")
        if self.mode == "lazy_global" and self.is_coupled:
            raise ConfigError(
                "RowRule",
                f"got mode 'lazy_global' with l1 {self.l1!r} and l2 {self.l2!r}, expected 0 for both: steps "
                "missed under coupled regularisation have no closed form",
            )

    def _bad(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"RowRule.{name}", f"got {getattr(self, name)!r}, expected {expected}")

    @property
    def is_coupled(self) -> bool:
        """Whether the regularisation is added to the gradient."""
        return not self.is_proximal and (self.l1 > 0.0 or self.l2 > 0.0)

    @property
    def coupled(self) -> tuple[float, float]:
        """l1 and l2 that are added to the gradient; zeros if the rule applies them otherwise."""
        return (self.l1, self.l2) if self.is_coupled else (0.0, 0.0)

    @property
    def is_transformed(self) -> bool:
        """Whether gradients are scaled, clipped or regularised before the formula."""
        return self.grad_scale != 1.0 or min(self.clip_value, self.clip_norm) < math.inf or self.is_coupled

    @property
    def rate(self) -> float:
        """The lr of the formula."""
        return self.lr

    def scales(self, step: int) -> tuple[float, float]:
        """Return factors of a step: of Adam's first moment and the root of its second; of momentum's gradient."""
        return 1.0, 1.0

    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        """Apply the formula to rows, in place.

        Args:
            weights: [n, D].
            state: States as `states` names them, [n, D] each, or [n] for those of `row_states`.
            grad: Transformed gradients [n, D].
            lr: Learning rate of each row, [n, 1].
            step: Number of the update, from 1.
        """
        raise NotImplementedError

    def catch_up_(self, weights: Tensor, state: Sequence[Tensor], lr: Tensor, last: Tensor, missed: Tensor) -> None:
        """Apply the steps that rows missed, in place; needed for a rule with inertia.

        Args:
            weights: [n, D].
            state: States as for `update_`.
            lr: Learning rate of each row, [n, 1].
            last: Number of the last step of each row, [n, 1], 0 for none.
            missed: Number of steps since, [n, 1].
        """
        raise NotImplementedError

    def rates(self, sums: Tensor, lr: Tensor) -> Tensor:
        """Return the factor [n, 1] of each row's gradient; needed for a rule with a row state, the sum of mean squares.

        Args:
            sums: The row state, [n].
            lr: Learning rate of each row, [n, 1], or of all.
        """
        raise NotImplementedError

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states in the order in which kernels take them, with `LAST_UPDATE` where rows catch up."""
        return (*self.states, LAST_UPDATE) if self.catches_up else self.states

    @property
    def catches_up(self) -> bool:
        """Whether a touched row first catches up the steps that it missed."""
        return self.mode == "lazy_global" and self.has_inertia

    @property
    def updates_all_rows(self) -> bool:
        """Whether rows without a key are updated, too."""
        return self.mode == "global" and (self.has_inertia or self.is_proximal or self.is_coupled)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDRule(RowRule):
    """w <- w - lr g."""

    kind: ClassVar[str] = "sgd"
    kernels = FAST_KERNELS

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        weights -= lr * grad


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumRule(RowRule):
    """m <- beta1 m + g;  w <- w - lr m.

    With `lr_in_momentum` m holds movements, which steps of other rates leave alone: m <- beta1 m - lr g;  w <- w + m.
    This is the formula above for a rate of -1 and the gradient -lr g.

    To catch up: w <- w - lr c m;  m <- beta1^k m, where c = beta1 + ... + beta1^k.

    Attributes:
        beta1: Momentum, in [0, 1).
        lr_in_momentum: Whether the momentum adds up movements instead of gradients.
    """

    kind: ClassVar[str] = "momentum"
    states = ("momentum",)
    has_inertia = True
    kernels = FAST_KERNELS

    beta1: float = 0.0
    lr_in_momentum: bool = False

    @property
    @override
    def rate(self) -> float:
        return -1.0 if self.lr_in_momentum else self.lr

    @override
    def scales(self, step: int) -> tuple[float, float]:
        return (-self.lr, 1.0) if self.lr_in_momentum else (1.0, 1.0)

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        # With `lr_in_momentum` the rate is a factor of the gradient, and `rate` is -1: one formula serves both forms.
        grad = self.scales(step)[0] * grad
        state[0].mul_(self.beta1).add_(grad)
        weights -= lr * self._movement(grad, state[0])

    @override
    def catch_up_(self, weights: Tensor, state: Sequence[Tensor], lr: Tensor, last: Tensor, missed: Tensor) -> None:
        weights -= lr * self._drift(state[0], missed)
        state[0].mul_(self.beta1**missed)

    def _movement(self, grad: Tensor, momentum: Tensor) -> Tensor:
        return momentum

    def _drift(self, momentum: Tensor, missed: Tensor) -> Tensor:
        return _sum_of_powers(self.beta1, missed) * momentum


def _sum_of_powers(beta: float, count: Tensor) -> Tensor:
    """Return beta + ... + beta^count."""
    # Closed form of the geometric sum: a row may have missed any number of steps.
    total: Tensor = beta * (1.0 - beta**count) / (1.0 - beta)
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class NesterovRule(MomentumRule):
    """m <- beta1 m + g;  w <- w - lr (g + beta1 m).

    With `lr_in_momentum`: m <- beta1 m - lr g;  w <- w + beta1 m - lr g.

    To catch up: as `MomentumRule`, with beta1 times its c.
    """

    kind: ClassVar[str] = "nesterov"
    kernels = FAST_KERNELS

    @override
    def _movement(self, grad: Tensor, momentum: Tensor) -> Tensor:
        return grad + self.beta1 * momentum

    @override
    def _drift(self, momentum: Tensor, missed: Tensor) -> Tensor:
        return self.beta1 * (_sum_of_powers(self.beta1, missed) * momentum)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaGradRule(RowRule):
    """s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps).

    Attributes:
        eps: Constant of the formula above.
    """

    kind: ClassVar[str] = "adagrad"
    states = ("sum",)
    kernels = FAST_KERNELS

    eps: float = 0.0

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        state[0].add_(grad * grad)
        weights -= lr * (grad / (state[0].sqrt() + self.eps))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdaGradRule(AdaGradRule):
    """s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps)."""

    kind: ClassVar[str] = "rowwise_adagrad"
    row_states = ("sum",)
    kernels = FAST_KERNELS

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        state[0].add_((grad * grad).mean(dim=1))
        weights -= self.rates(state[0], lr) * grad

    @override
    def rates(self, sums: Tensor, lr: Tensor) -> Tensor:
        # By way of double: torch's float32 root is off by one unit for a sixth of all numbers, the core's is not.
        rates: Tensor = lr / (sums[:, None].double().sqrt().to(sums.dtype) + self.eps)
        return rates


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSPropRule(RowRule):
    """v <- beta2 v + (1 - beta2) g^2;  w <- w - lr g / (sqrt(v) + eps).

    To catch up: v <- beta2^k v.

    Attributes:
        eps: Constant of the formula above.
        beta2: Decay of the second moment, in [0, 1).
    """

    kind: ClassVar[str] = "rmsprop"
    states = ("exp_avg_sq",)
    has_inertia = True
    kernels = FAST_KERNELS

    eps: float = 0.0
    beta2: float = 0.0

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        state[0].mul_(self.beta2).add_((1.0 - self.beta2) * (grad * grad))
        weights -= lr * (grad / (state[0].sqrt() + self.eps))

    @override
    def catch_up_(self, weights: Tensor, state: Sequence[Tensor], lr: Tensor, last: Tensor, missed: Tensor) -> None:
        state[0].mul_(self.beta2**missed)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamRule(RowRule):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2; and then the step of the rows.

    w <- w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps + eps_hat / sqrt(1 - beta2^t)), t being the caller's
    step: eps_hat is added to sqrt(v) itself.

    To catch up: w <- w - lr / (1 - beta1^p) c m / (sqrt(v / (1 - beta2^p)) + eps + eps_hat / sqrt(1 - beta2^p));
    m <- beta1^k m;  v <- beta2^k v, with the c of `MomentumRule`. As this has no closed form, v and the bias
    corrections are held at step p, as HugeCTR's LazyGlobal does.

    Attributes:
        eps: Constant of the formula above.
        eps_hat: Constant of the formula above.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
    """

    kind: ClassVar[str] = "adam"
    states = ("exp_avg", "exp_avg_sq")
    has_inertia = True
    kernels = FAST_KERNELS

    eps: float = 0.0
    eps_hat: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0

    @override
    def scales(self, step: int) -> tuple[float, float]:
        # In double: 1 - beta2^t is small in the first steps, where float32 would lose digits.
        return 1.0 / (1.0 - self.beta1**step), 1.0 / math.sqrt(1.0 - self.beta2**step)

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        first, second = state[:2]
        # As `torch.optim.Adam`, which interpolates: beta1 m + (1 - beta1) g rounds two products.
        first += (1.0 - self.beta1) * (grad - first)
        second.mul_(self.beta2).add_((1.0 - self.beta2) * (grad * grad))
        first_scale, root_scale = self.scales(step)
        eps = self.eps + self.eps_hat * root_scale
        weights -= lr * first_scale * (first / (second.sqrt() * root_scale + eps))

    @override
    def catch_up_(self, weights: Tensor, state: Sequence[Tensor], lr: Tensor, last: Tensor, missed: Tensor) -> None:
        first, second = state[:2]
        # A row that no step touched has p = 0, for which the bias corrections divide by zero.
        seen = last.clamp(min=1)
        root_scale = (1.0 - self.beta2**seen).sqrt()
        root = second.sqrt() / root_scale
        eps = self.eps + self.eps_hat / root_scale
        drift = _sum_of_powers(self.beta1, missed) * first / (1.0 - self.beta1**seen) / (root + eps)
        weights -= lr * torch.where(last > 0, drift, 0.0)
        first.mul_(self.beta1**missed)
        second.mul_(self.beta2**missed)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWRule(AdamRule):
    """w <- (1 - lr weight_decay) w, then as `AdamRule`.

    To catch up: w <- (1 - lr weight_decay)^k w, then as `AdamRule`.

    Attributes:
        weight_decay: Constant of the formula above.
    """

    kind: ClassVar[str] = "adamw"
    kernels = FAST_KERNELS

    weight_decay: float = 0.0

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        # Decay before the step, and not through the gradient: "decoupled", as in `torch.optim.AdamW`.
        weights *= 1.0 - lr * self.weight_decay
        AdamRule.update_(self, weights, state, grad, lr, step)

    @override
    def catch_up_(self, weights: Tensor, state: Sequence[Tensor], lr: Tensor, last: Tensor, missed: Tensor) -> None:
        weights *= (1.0 - lr * self.weight_decay) ** missed
        AdamRule.catch_up_(self, weights, state, lr, last, missed)


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRLRule(RowRule):
    """n' = n + g^2;  z <- z + g - (sqrt(n' + eps) - sqrt(n + eps)) w / lr;  n <- n'; and then the row.

    w <- 0 where abs(z) <= l1, else (sign(z) l1 - z) / ((sqrt(n + eps) + beta) / lr + l2).

    Attributes:
        eps: Constant of the formula above.
        beta: Constant of the formula above.
    """

    kind: ClassVar[str] = "ftrl"
    states = ("sum", "linear")
    is_proximal = True
    kernels = FAST_KERNELS

    eps: float = 0.0
    beta: float = 0.0

    @override
    def update_(self, weights: Tensor, state: Sequence[Tensor], grad: Tensor, lr: Tensor, step: int) -> None:
        total, linear = state
        before = (total + self.eps).sqrt()
        total += grad * grad
        root = (total + self.eps).sqrt()
        linear += grad - (root - before) / lr * weights
        shrunk = torch.where(linear < 0, -self.l1, self.l1) - linear
        moved = shrunk / ((root + self.beta) / lr + self.l2)
        # Not by the increment of w: FTRL gives weights as a function of its sums, and exact zeros within l1.
        weights.copy_(torch.where(linear.abs() <= self.l1, 0.0, moved))


RULE_CLASSES: tuple[type[RowRule], ...] = (
    SGDRule,
    AdaGradRule,
    RowWiseAdaGradRule,
    AdamRule,
    MomentumRule,
    NesterovRule,
    RMSPropRule,
    AdamWRule,
    FTRLRule,
)
RULES = {rule.kind: rule for rule in RULE_CLASSES}
"""Kind -> class."""
RULE_KINDS = tuple(RULES)
_NUMBERS = {rule: tuple(field.name for field in fields(rule) if field.name != "mode") for rule in RULES.values()}

# A schedule makes a rule a step, so that the fields to check are looked up once.
_LIMITS = {rule: tuple((name, _BELOW[name]) for name in names if name in _BELOW) for rule, names in _NUMBERS.items()}


def rule_class(kind: str) -> type[RowRule]:
    """Return the class of a rule."""
    _check_choice("kind", kind, RULE_KINDS)
    return RULES[kind]


def number_names(rule: type[RowRule]) -> tuple[str, ...]:
    """Return the fields of a rule but `mode`: all are numbers."""
    return _NUMBERS[rule]


def row_rule(kind: str, *, mode: UpdateMode = "local", **numbers: float) -> RowRule:
    """Return the rule of a kind.

    Args:
        kind: One of `RULE_KINDS`.
        mode: Rows to update.
        numbers: Fields of the rule's class; "lr" is required.
    """
    rule = rule_class(kind)
    for name in numbers:
        _check_choice(f"{name} of {kind!r}", name, number_names(rule))
    return rule(mode=mode, **numbers)


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"RowRule.{field}", f"got {value!r}, expected one of {', '.join(map(repr, choices))}")
