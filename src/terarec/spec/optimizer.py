"""What an optimizer is. The same specs describe the dense and the sparse side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDSpec:
    """w <- w - lr g."""

    kind: ClassVar[str] = "sgd"
    lr: float = 0.1

    def __post_init__(self) -> None:
        checks.finite_float(self, "lr", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaGradSpec:
    """s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps), as torch.optim.Adagrad without decay."""

    kind: ClassVar[str] = "adagrad"
    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        checks.finite_float(self, "lr", low=0.0)
        checks.finite_float(self, "eps", low=0.0)
        checks.finite_float(self, "initial_accumulator", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdaGradSpec:
    """s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps). For tables only."""

    kind: ClassVar[str] = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        checks.finite_float(self, "lr", low=0.0)
        checks.finite_float(self, "eps", low=0.0)
        checks.finite_float(self, "initial_accumulator", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSpec:
    """Adam (Kingma & Ba 2015) with torch.optim.Adam's epsilon, outside the bias correction's root.

    On tables only the touched rows move; the bias correction counts the optimizer's steps, whichever rows they touched.
    """

    kind: ClassVar[str] = "adam"
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks.finite_float(self, "lr", low=0.0)
        checks.finite_float(self, "beta1", low=0.0, high=0.9999999)
        checks.finite_float(self, "beta2", low=0.0, high=0.9999999)
        checks.finite_float(self, "eps", low=0.0)


DenseOptimizerSpec = SGDSpec | AdaGradSpec | AdamSpec
SparseOptimizerSpec = SGDSpec | AdaGradSpec | RowWiseAdaGradSpec | AdamSpec
