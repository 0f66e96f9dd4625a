"""What every implementation of a kernel takes and raises. Plain tensors and numbers: names stay on the floors above.

A layout array is int64[S, 4] in host memory with a row for each feature: the first arena row of its table, the rows of
its table, its pooling, one of `SUM`, `MEAN` and `NONE`, and the number of its table in the layout. `NONE` holds for all
features of a layout or for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from terarec.errors import ConfigError, KeyOutOfRangeError

SUM, MEAN, NONE = 0, 1, 2

RuleKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
RULE_KINDS: tuple[RuleKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRule:
    """How the rows that a batch touched move; g is the sum of a row's gradients, w the row.

    * "sgd": w <- w - lr g
    * "adagrad": s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps)
    * "rowwise_adagrad": s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps)
    * "adam": as torch.optim.Adam, the step being the caller's

    Attributes:
        kind: one of the above.
        lr: learning rate.
        eps: added to the root.
        beta1: decay of Adam's first moment, in [0, 1).
        beta2: decay of Adam's second moment, in [0, 1).
    """

    kind: RuleKind
    lr: float
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in RULE_KINDS:
            raise ConfigError(f"RowRule.kind: got {self.kind!r}, expected one of {', '.join(map(repr, RULE_KINDS))}")
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0):
            raise ConfigError(f"RowRule: got beta1 {self.beta1!r} and beta2 {self.beta2!r}, expected 0 <= beta < 1")


class LaidGradient(NamedTuple):
    """What came back for one lookup.

    Attributes:
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], or float32[N, D] for a layout without pooling.
        layout: the layout array.
    """

    keys: Tensor
    offsets: Tensor
    grad: Tensor
    layout: Tensor


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
