"""What every implementation of a kernel takes and raises. Plain tensors and numbers: names stay on the floors above.

A layout array is int64[S, 4] in host memory with a row for each feature: the first arena row of its table, the rows of
its table, its pooling, one of `SUM`, `MEAN`, `NONE`, `SQRTN` (the sum divided by the root of the number of keys) and
`MAX`, and the number of its table in the layout. `NONE` holds for all features of a layout or for none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from terarec.errors import ConfigError, KeyOutOfRangeError

SUM, MEAN, NONE, SQRTN, MAX = 0, 1, 2, 3, 4

ROW_TAIL_BYTES = 8
"""Bytes after the codes of a quantized row: its scale and its offset, float32, little-endian."""

RuleKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "nesterov", "rmsprop", "adamw", "ftrl"]
RULE_KINDS: tuple[RuleKind, ...] = get_args(RuleKind)
UpdateMode = Literal["local", "global", "lazy_global"]
UPDATE_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
LAST_UPDATE = "last_update"
"""Name of the state that counts, int32[V]: the step that touched a row last, 0 for none."""

_CAUGHT_UP = ("momentum", "nesterov", "rmsprop", "adam", "adamw")  # kinds whose rows miss something while untouched
_STATES: dict[RuleKind, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum",),
    "nesterov": ("momentum",),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "rmsprop": ("exp_avg_sq",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "ftrl": ("sum", "linear"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRule:
    """How rows move; w is a row, g the sum of its gradients, all powers and roots elementwise.

    * "sgd": w <- w - lr g
    * "momentum": m <- beta1 m + g;  w <- w - lr m
    * "nesterov": m <- beta1 m + g;  w <- w - lr (g + beta1 m)
    * "adagrad": s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps)
    * "rowwise_adagrad": s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps)
    * "rmsprop": v <- beta2 v + (1 - beta2) g^2;  w <- w - lr g / (sqrt(v) + eps)
    * "adam": m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;
      w <- w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps + eps_hat / sqrt(1 - beta2^t)), t being the
      caller's step: eps_hat is added to sqrt(v) itself
    * "adamw": w <- (1 - lr weight_decay) w, then as "adam"
    * "ftrl": n' = n + g^2;  z <- z + g - (sqrt(n' + eps) - sqrt(n + eps)) w / lr;  n <- n';
      w <- 0 where abs(z) <= l1, else (sign(z) l1 - z) / ((sqrt(n + eps) + beta) / lr + l2)

    With `lr_in_momentum` m holds movements, which steps of other rates leave alone: "momentum": m <- beta1 m - lr g;
    w <- w + m.  "nesterov": m <- beta1 m - lr g;  w <- w + beta1 m - lr g. These are the formulas above for a rate of
    -1 and the gradient -lr g.

    Before that g passes, in this order: g <- grad_scale g;  g <- clamp(g, -clip_value, clip_value);
    g <- g min(1, clip_norm / norm(g));  and, but for "ftrl", g <- g + l2 w + l1 sign(w).

    Which rows move: "local": those with a key in the batch. "global": all rows of the tables that are looked up, with
    g = 0 for a row without a key. "lazy_global": as "local", but a row first catches up the k steps in which "global"
    would have moved it since its last one, p, at the present learning rate:

    * momentum: w <- w - lr c m;  m <- beta1^k m, where c = beta1 + ... + beta1^k; "nesterov": c is beta1 times that
    * rmsprop: v <- beta2^k v
    * adamw: w <- (1 - lr weight_decay)^k w, then as "adam"
    * adam: w <- w - lr / (1 - beta1^p) c m / (sqrt(v / (1 - beta2^p)) + eps + eps_hat / sqrt(1 - beta2^p));
      m <- beta1^k m;  v <- beta2^k v. As this has no closed form, v and the bias corrections are held at step p, as
      HugeCTR's LazyGlobal does.

    Attributes:
        kind: one of the above.
        mode: which rows move.
        lr: learning rate; a table's factor multiplies it.
        eps: see the formulas.
        eps_hat: of "adam" and "adamw".
        beta1: momentum, or decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        beta: of "ftrl".
        l1: regularisation, coupled into the gradient; proximal for "ftrl".
        l2: regularisation, coupled into the gradient; proximal for "ftrl".
        weight_decay: of "adamw".
        grad_scale: multiplies gradients first; one over the loss scale.
        clip_value: bound of every element of a row's gradient.
        clip_norm: bound of the norm of a row's gradient.
        lr_in_momentum: whether the momentum of "momentum" and "nesterov" adds up movements instead of gradients.
    """

    kind: RuleKind
    mode: UpdateMode = "local"
    lr: float
    eps: float = 0.0
    eps_hat: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    clip_value: float = math.inf
    clip_norm: float = math.inf
    lr_in_momentum: bool = False

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, RULE_KINDS)
        _check_choice("mode", self.mode, UPDATE_MODES)
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0):
            raise ConfigError(f"RowRule: got beta1 {self.beta1!r} and beta2 {self.beta2!r}, expected 0 <= beta < 1")
        if not math.isfinite(self.lr):
            raise ConfigError(f"RowRule.lr: got {self.lr!r}, expected a finite number")
        for name in ("eps", "eps_hat", "beta", "l1", "l2", "weight_decay"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"RowRule.{name}: got {getattr(self, name)!r}, expected a finite number >= 0")
        for name in ("clip_value", "clip_norm"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"RowRule.{name}: got {getattr(self, name)!r}, expected a number > 0")
        if self.lr_in_momentum and self.kind not in ("momentum", "nesterov"):
            raise ConfigError(
                f"RowRule.lr_in_momentum: got kind {self.kind!r}, expected 'momentum' or 'nesterov' with it"
            )
        if self.kind == "ftrl" and self.lr <= 0.0:
            raise ConfigError(f"RowRule.lr: got {self.lr!r}, expected a number > 0 for 'ftrl', which divides by it")
        if self.mode == "lazy_global" and self.is_coupled:
            raise ConfigError(
                f"RowRule: got mode 'lazy_global' with l1 {self.l1!r} and l2 {self.l2!r}, expected 0 for both: steps "
                "missed under coupled regularisation have no closed form"
            )

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
        """What the formulas above take for lr."""
        return -1.0 if self.lr_in_momentum else self.lr

    def scales(self, step: int) -> tuple[float, float]:
        """What a step multiplies by: Adam its first moment and the root of its second, momentum its gradient."""
        if self.lr_in_momentum:
            return -self.lr, 1.0
        if self.kind not in ("adam", "adamw"):
            return 1.0, 1.0
        return 1.0 / (1.0 - self.beta1**step), 1.0 / math.sqrt(1.0 - self.beta2**step)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The states beside the weights, in the order in which kernels take them."""
        return (*_STATES[self.kind], LAST_UPDATE) if self.catches_up else _STATES[self.kind]

    @property
    def catches_up(self) -> bool:
        """Whether a touched row first makes up for the steps that it missed, which its `LAST_UPDATE` tells."""
        return self.mode == "lazy_global" and self.kind in _CAUGHT_UP

    @property
    def sweeps(self) -> bool:
        """Whether rows without a key move, too."""
        return self.mode == "global" and (self.kind in (*_CAUGHT_UP, "ftrl") or self.is_coupled)


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"RowRule.{field}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


class LaidGradient(NamedTuple):
    """What came back for one lookup.

    Attributes:
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], or float32[N, D] for a layout without pooling.
        layout: the layout array.
        key_weights: float32[N] that multiplied the keys' vectors, or None.
    """

    keys: Tensor
    offsets: Tensor
    grad: Tensor
    layout: Tensor
    key_weights: Tensor | None = None


class Extents(NamedTuple):
    """What a layout asks of the tensors of a lookup.

    Attributes:
        num_features: S.
        width: D.
        num_rows: the least V.
        is_pooled: whether the features' bags are pooled.
        takes_key_weights: whether weights may multiply the keys' vectors.
    """

    num_features: int
    width: int
    num_rows: int
    is_pooled: bool
    takes_key_weights: bool


class BadKeyError(KeyOutOfRangeError):
    """A key outside its table, by the number of its feature; `ops` turns it into one that has the names.

    Attributes:
        feature: number of the feature in its layout.
        position: of the key among all keys of its lookup.
        key: the key.
        rows: of the feature's table.
        gradient: number of the `LaidGradient` that holds the key, for a row update.
    """

    def __init__(self, feature: int, position: int, key: int, rows: int, gradient: int = 0) -> None:
        super().__init__(f"feature {feature}: got key {key} at position {position}, expected 0 <= key < {rows}")
        self.feature = feature
        self.position = position
        self.key = key
        self.rows = rows
        self.gradient = gradient


def bad_offsets(index: int, value: int, num_keys: int) -> ConfigError:
    """The error for ``offsets[index] == value``, which falls, or leaves the keys, or does not cover them."""
    return ConfigError(f"offsets[{index}]: got {value}, expected offsets rising from 0 to the {num_keys} keys")
