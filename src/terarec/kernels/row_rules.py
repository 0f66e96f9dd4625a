"""Row rules: how the rows of tables move under each optimizer, one class for each with its own numbers.

In the formulas w is a row and g the sum of its gradients; powers and roots are elementwise. The compiled core has the
same fields by the same names (`csrc/embedding/row_update.h`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from terarec.errors import ConfigError

RuleKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "nesterov", "rmsprop", "adamw", "ftrl"]
RULE_KINDS: tuple[RuleKind, ...] = get_args(RuleKind)
UpdateMode = Literal["local", "global", "lazy_global"]
UPDATE_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
LAST_UPDATE = "last_update"
"""Name of the state that counts, int32[V]: the step that touched a row last, 0 for none."""

_BELOW = {
    "beta1": 1.0,
    "beta2": 1.0,
    **dict.fromkeys(("eps", "eps_hat", "beta", "l1", "l2", "weight_decay"), math.inf),
}
"""Number -> what it stays below; it is at least 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRule:
    """The base of all rules.

    Before a formula takes g, it passes, in this order: g <- grad_scale g;  g <- clamp(g, -clip_value, clip_value);
    g <- g min(1, clip_norm / norm(g));  and, but for "ftrl", g <- g + l2 w + l1 sign(w).

    Which rows move: "local": those with a key in the batch. "global": all rows of the tables that are looked up, with
    g = 0 for a row without a key. "lazy_global": as "local", but a row first catches up the k steps in which "global"
    would have moved it since its last one, p, at the present learning rate.

    Attributes:
        lr: learning rate; a table's factor multiplies it.
        mode: which rows move.
        l1: regularisation, coupled into the gradient; proximal for "ftrl".
        l2: regularisation, coupled into the gradient; proximal for "ftrl".
        grad_scale: multiplies gradients first; one over the loss scale.
        clip_value: bound of every element of a row's gradient.
        clip_norm: bound of the norm of a row's gradient.
    """

    kind: ClassVar[RuleKind]
    states: ClassVar[tuple[str, ...]] = ()
    """Names of the states beside the weights, float32."""
    has_inertia: ClassVar[bool] = False
    """Whether rows miss something in steps that leave them alone."""

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
        for name, limit in _LIMITS[type(self)]:
            if not 0.0 <= getattr(self, name) < limit:
                raise self._bad(name, f"0 <= {name} < 1" if limit == 1.0 else "a finite number >= 0")
        if not self.clip_value > 0.0:
            raise self._bad("clip_value", "a number > 0")
        if not self.clip_norm > 0.0:
            raise self._bad("clip_norm", "a number > 0")
        if self.kind == "ftrl" and self.lr <= 0.0:
            raise self._bad("lr", "a number > 0 for 'ftrl', which divides by it")
        if self.mode == "lazy_global" and self.is_coupled:
            raise ConfigError(
                f"RowRule: got mode 'lazy_global' with l1 {self.l1!r} and l2 {self.l2!r}, expected 0 for both: steps "
                "missed under coupled regularisation have no closed form"
            )

    def _bad(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"RowRule.{name}: got {getattr(self, name)!r}, expected {expected}")

    @property
    def is_coupled(self) -> bool:
        """Whether the regularisation enters the gradient."""
        return self.kind != "ftrl" and (self.l1 > 0.0 or self.l2 > 0.0)

    @property
    def coupled(self) -> tuple[float, float]:
        """l1 and l2 as they enter the gradient: zeros where they do not."""
        return (self.l1, self.l2) if self.is_coupled else (0.0, 0.0)

    @property
    def is_transformed(self) -> bool:
        """Whether gradients are scaled, clipped or regularised before the formula takes them."""
        return self.grad_scale != 1.0 or min(self.clip_value, self.clip_norm) < math.inf or self.is_coupled

    @property
    def rate(self) -> float:
        """What the formula takes for lr."""
        return self.lr

    def scales(self, step: int) -> tuple[float, float]:
        """Return what a step multiplies by: Adam its first moment and the root of its second, momentum its gradient."""
        return 1.0, 1.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """The states beside the weights, in the order in which kernels take them."""
        return (*self.states, LAST_UPDATE) if self.catches_up else self.states

    @property
    def catches_up(self) -> bool:
        """Whether a touched row first makes up for the steps that it missed, by its `LAST_UPDATE`."""
        return self.mode == "lazy_global" and self.has_inertia

    @property
    def updates_all_rows(self) -> bool:
        """Whether rows without a key move, too."""
        return self.mode == "global" and (self.has_inertia or self.kind == "ftrl" or self.is_coupled)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDRule(RowRule):
    """w <- w - lr g."""

    kind: ClassVar[RuleKind] = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumRule(RowRule):
    """m <- beta1 m + g;  w <- w - lr m.

    With `lr_in_momentum` m holds movements, which steps of other rates leave alone: m <- beta1 m - lr g;  w <- w + m.
    This is the formula above for a rate of -1 and the gradient -lr g.

    To catch up: w <- w - lr c m;  m <- beta1^k m, where c = beta1 + ... + beta1^k.

    Attributes:
        beta1: momentum, in [0, 1).
        lr_in_momentum: whether the momentum adds up movements instead of gradients.
    """

    kind: ClassVar[RuleKind] = "momentum"
    states = ("momentum",)
    has_inertia = True

    beta1: float = 0.0
    lr_in_momentum: bool = False

    @property
    def rate(self) -> float:
        """What the formula takes for lr."""
        return -1.0 if self.lr_in_momentum else self.lr

    def scales(self, step: int) -> tuple[float, float]:
        """Return what a step multiplies its gradient by, and 1."""
        return (-self.lr, 1.0) if self.lr_in_momentum else (1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NesterovRule(MomentumRule):
    """m <- beta1 m + g;  w <- w - lr (g + beta1 m).

    With `lr_in_momentum`: m <- beta1 m - lr g;  w <- w + beta1 m - lr g.

    To catch up: as `MomentumRule`, with beta1 times its c.
    """

    kind: ClassVar[RuleKind] = "nesterov"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaGradRule(RowRule):
    """s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps).

    Attributes:
        eps: see the formula.
    """

    kind: ClassVar[RuleKind] = "adagrad"
    states = ("sum",)

    eps: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdaGradRule(AdaGradRule):
    """s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps)."""

    kind: ClassVar[RuleKind] = "rowwise_adagrad"


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSPropRule(RowRule):
    """v <- beta2 v + (1 - beta2) g^2;  w <- w - lr g / (sqrt(v) + eps).

    To catch up: v <- beta2^k v.

    Attributes:
        eps: see the formula.
        beta2: decay of the second moment, in [0, 1).
    """

    kind: ClassVar[RuleKind] = "rmsprop"
    states = ("exp_avg_sq",)
    has_inertia = True

    eps: float = 0.0
    beta2: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamRule(RowRule):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2; and then the step of the rows.

    w <- w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps + eps_hat / sqrt(1 - beta2^t)), t being the caller's
    step: eps_hat is added to sqrt(v) itself.

    To catch up: w <- w - lr / (1 - beta1^p) c m / (sqrt(v / (1 - beta2^p)) + eps + eps_hat / sqrt(1 - beta2^p));
    m <- beta1^k m;  v <- beta2^k v, with the c of `MomentumRule`. As this has no closed form, v and the bias
    corrections are held at step p, as HugeCTR's LazyGlobal does.

    Attributes:
        eps: see the formula.
        eps_hat: see the formula.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
    """

    kind: ClassVar[RuleKind] = "adam"
    states = ("exp_avg", "exp_avg_sq")
    has_inertia = True

    eps: float = 0.0
    eps_hat: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0

    def scales(self, step: int) -> tuple[float, float]:
        """Return what a step multiplies the first moment and the root of the second by."""
        return 1.0 / (1.0 - self.beta1**step), 1.0 / math.sqrt(1.0 - self.beta2**step)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWRule(AdamRule):
    """w <- (1 - lr weight_decay) w, then as `AdamRule`.

    To catch up: w <- (1 - lr weight_decay)^k w, then as `AdamRule`.

    Attributes:
        weight_decay: see the formula.
    """

    kind: ClassVar[RuleKind] = "adamw"

    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRLRule(RowRule):
    """n' = n + g^2;  z <- z + g - (sqrt(n' + eps) - sqrt(n + eps)) w / lr;  n <- n'; and then the row.

    w <- 0 where abs(z) <= l1, else (sign(z) l1 - z) / ((sqrt(n + eps) + beta) / lr + l2).

    Attributes:
        eps: see the formula.
        beta: see the formula.
    """

    kind: ClassVar[RuleKind] = "ftrl"
    states = ("sum", "linear")

    eps: float = 0.0
    beta: float = 0.0


_CLASSES: dict[str, type[RowRule]] = {
    rule.kind: rule
    for rule in (
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
}
_NUMBERS = {rule: tuple(field.name for field in fields(rule) if field.name != "mode") for rule in _CLASSES.values()}

# A schedule makes a rule a step, so that the fields to check are looked up once.
_LIMITS = {rule: tuple((name, _BELOW[name]) for name in names if name in _BELOW) for rule, names in _NUMBERS.items()}


def rule_class(kind: str) -> type[RowRule]:
    """Return the class of a rule.

    Raises:
        ConfigError: an unknown kind.
    """
    _check_choice("kind", kind, RULE_KINDS)
    return _CLASSES[kind]


def number_names(rule: type[RowRule]) -> tuple[str, ...]:
    """Return the fields of a rule but `mode`: all are numbers."""
    return _NUMBERS[rule]


def row_rule(kind: str, *, mode: UpdateMode = "local", **numbers: float) -> RowRule:
    """Return the rule of a kind.

    Args:
        kind: One of `RULE_KINDS`.
        mode: Rows that move.
        numbers: Fields of the rule's class; "lr" is required.

    Raises:
        ConfigError: an unknown kind or number, or a number out of its range.
    """
    rule = rule_class(kind)
    for name in numbers:
        _check_choice(f"{name} of {kind!r}", name, number_names(rule))
    return rule(mode=mode, **numbers)


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"RowRule.{field}: got {value!r}, expected one of {', '.join(map(repr, choices))}")
