# SPDX-License-Identifier: Apache-2.0
"""Optimizers. Most specs describe the dense and the sparse side alike; `rows` is for tables alone.

g is the gradient (of a row of a table: the sum over its occurrences), w the weights, t the number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """Options for which rows are updated, and for their gradients.

    A row's gradient is the sum over its occurrences. It is divided by `loss_scale`, scaled to `clip_global_norm`,
    clamped to `clip_value`, scaled to `clip_norm`, and increased by ``l2 w + l1 sign(w)``, in this order.

    Attributes:
        mode: "local": the rows with a key in the batch move. "global": all rows of the tables move, with a gradient of
            zero where no key was, as a dense optimizer moves them. "lazy_global": as "local", but a row first catches
            up the steps that it missed. docs/optimizers.md has the formulas.
        l1: Weight of abs(w), whose derivative is added to the gradient.
        l2: Weight of w^2 / 2, whose derivative is added to the gradient.
        clip_value: Bound of every element of a row's gradient; None for none.
        clip_norm: Bound of the L2 norm of each row's gradient; None for none.
        clip_global_norm: Bound of the L2 norm of all rows' gradients together; None for none.
        loss_scale: Factor of the loss before the backward pass.
        table_lr: Table -> factor of the learning rate; 1 for tables that it does not name.
        frozen: Tables whose rows and state stay as they are.
        non_finite: Handling of NaN or infinity in a gradient: "pass" it on to its rows, "raise" an error, or
            "skip" the step. Rows and state stay as they were in both other cases.
    """

    mode: Literal["local", "global", "lazy_global"] = "local"
    l1: float = 0.0
    l2: float = 0.0
    clip_value: float | None = None
    clip_norm: float | None = None
    clip_global_norm: float | None = None
    loss_scale: float = 1.0
    table_lr: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    non_finite: Literal["pass", "raise", "skip"] = "pass"

    def __post_init__(self) -> None:
        checks.one_of(self, "mode", ("local", "global", "lazy_global"))
        checks.one_of(self, "non_finite", ("pass", "raise", "skip"))
        checks.finite_float(self, "l1", low=0.0)
        checks.finite_float(self, "l2", low=0.0)
        checks.finite_float(self, "loss_scale", low=0.0, open_low=True)
        for bound in ("clip_value", "clip_norm", "clip_global_norm"):
            if getattr(self, bound) is not None:
                checks.finite_float(self, bound, low=0.0, open_low=True)
        checks.instance(self, "table_lr", Mapping, "a factor for each table, such as {'item': 0.1}")
        checks.instance(self, "frozen", tuple | list, "names of tables, such as ['item']")
        factors = checks.number(0.0)
        for table, factor in self.table_lr.items():
            if not factors.accepts(factor):
                checks.reject(self, "table_lr", f"got {factor!r} for {table!r}, expected {factors.accepted}")
        checks.distinct(self, "frozen", self.frozen)
        if self.mode == "lazy_global" and (self.l1 or self.l2):
            checks.reject(
                self,
                "mode",
                "got 'lazy_global' with l1 or l2, expected 'local' or 'global' with them: steps missed "
                "under regularisation have no closed form",
            )


# With 1 an average would never move, and Adam's correction of its bias would divide by zero.
_BELOW_ONE = 0.9999999


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDSpec:
    """w <- w - lr g."""

    kind: ClassVar[str] = "sgd"
    lr: float = 0.1
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumSpec:
    """m <- momentum m + g;  w <- w - lr m, as torch.optim.SGD with momentum (Sutskever et al. 2013).

    With `lr_in_momentum` m <- momentum m - lr g;  w <- w + m, as in the paper and in HugeCTR: the same while lr stays,
    but where it changes past gradients keep the rate of their step.
    """

    kind: ClassVar[str] = "momentum"
    lr: float = 0.1
    momentum: float = 0.9
    lr_in_momentum: bool = False
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "momentum", low=0.0, high=_BELOW_ONE)
        checks.one_of(self, "lr_in_momentum", (False, True))


@dataclass(frozen=True, kw_only=True, slots=True)
class NesterovSpec:
    """m <- momentum m + g;  w <- w - lr (g + momentum m), as torch.optim.SGD with nesterov.

    With `lr_in_momentum` m <- momentum m - lr g;  w <- w + momentum m - lr g, as HugeCTR has it: see `MomentumSpec`.
    """

    kind: ClassVar[str] = "nesterov"
    lr: float = 0.1
    momentum: float = 0.9
    lr_in_momentum: bool = False
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "momentum", low=0.0, high=_BELOW_ONE)
        checks.one_of(self, "lr_in_momentum", (False, True))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaGradSpec:
    """s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps), as torch.optim.Adagrad without decay (Duchi et al. 2011)."""

    kind: ClassVar[str] = "adagrad"
    lr: float = 0.01
    # torch's default.
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "eps", low=0.0)
        checks.finite_float(self, "initial_accumulator", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdaGradSpec:
    """s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps). For tables only."""

    kind: ClassVar[str] = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "eps", low=0.0)
        checks.finite_float(self, "initial_accumulator", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSPropSpec:
    """v <- decay v + (1 - decay) g^2;  w <- w - lr g / (sqrt(v) + eps), as torch.optim.RMSprop (Tieleman 2012)."""

    kind: ClassVar[str] = "rmsprop"
    lr: float = 0.01
    decay: float = 0.99
    eps: float = 1e-8
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "decay", low=0.0, high=_BELOW_ONE)
        checks.finite_float(self, "eps", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSpec:
    """Adam (Kingma & Ba 2015), as torch.optim.Adam: eps is added to the root of the corrected second moment.

    With `eps_hat` eps is the paper's epsilon hat, which is added before the correction, as TensorFlow, Keras and
    HugeCTR have it:  w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps). A first step is then up to
    1 / sqrt(1 - beta2) times smaller for gradients near eps.

    On tables the bias correction counts the optimizer's steps, whichever rows they touched.
    """

    kind: ClassVar[str] = "adam"
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_hat: bool = False
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "beta1", low=0.0, high=_BELOW_ONE)
        checks.finite_float(self, "beta2", low=0.0, high=_BELOW_ONE)
        checks.finite_float(self, "eps", low=0.0)
        checks.one_of(self, "eps_hat", (False, True))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWSpec:
    """w <- (1 - lr weight_decay) w, then Adam's step, as torch.optim.AdamW (Loshchilov & Hutter 2019)."""

    kind: ClassVar[str] = "adamw"
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        _check_rate_and_rows(self)
        checks.finite_float(self, "beta1", low=0.0, high=_BELOW_ONE)
        checks.finite_float(self, "beta2", low=0.0, high=_BELOW_ONE)
        checks.finite_float(self, "eps", low=0.0)
        checks.finite_float(self, "weight_decay", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRLSpec:
    """FTRL-Proximal (McMahan et al. 2013), with HugeCTR's eps.

    n' = n + g^2;  z <- z + g - (sqrt(n' + eps) - sqrt(n + eps)) w / lr;  n <- n';
    w <- 0 where abs(z) <= l1, else (sign(z) l1 - z) / ((sqrt(n + eps) + beta) / lr + l2).
    """

    kind: ClassVar[str] = "ftrl"
    lr: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    # The epsilon of float32, as in HugeCTR.
    eps: float = 1.1920929e-07
    initial_accumulator: float = 0.0
    rows: RowOptions | None = None

    def __post_init__(self) -> None:
        # The weights of a row are computed from z by a division by the rate.
        _check_rate_and_rows(self, above_zero=True)
        for number in ("beta", "l1", "l2", "eps", "initial_accumulator"):
            checks.finite_float(self, number, low=0.0)
        if self.rows is not None and (self.rows.l1 or self.rows.l2):
            checks.reject(self, "rows", "got l1 or l2 there, expected FTRL's own l1 and l2")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptimizerSpec:
    """Any optimizer of `torch.optim`, by the name of its class. For layers only.

    Attributes:
        name: Name of the class, such as "NAdam".
        lr: Learning rate.
        options: Further arguments of the class, such as {"weight_decay": 0.01}; lists are read as tuples.
    """

    kind: ClassVar[str] = "torch"
    name: str
    lr: float = 0.001
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.name(self)
        checks.finite_float(self, "lr", low=0.0)
        checks.instance(self, "options", Mapping, "arguments by name such as {'weight_decay': 0.01}")
        for argument in self.options:
            # Parameters are those of the model, and a schedule needs to find the rate under one name.
            if argument in ("params", "lr") or not isinstance(argument, str):
                checks.reject(
                    self, "options", f"got {argument!r}, expected names of arguments other than params and lr"
                )


def _check_rate_and_rows(spec: object, *, above_zero: bool = False) -> None:
    checks.finite_float(spec, "lr", low=0.0, open_low=above_zero)
    checks.instance(spec, "rows", RowOptions | None, "RowOptions or None")


OptimizerSpec = SGDSpec | MomentumSpec | NesterovSpec | AdaGradSpec | RMSPropSpec | AdamSpec | AdamWSpec | FTRLSpec
"""The rules that layers and tables both follow."""
DenseOptimizerSpec = OptimizerSpec | TorchOptimizerSpec
SparseOptimizerSpec = OptimizerSpec | RowWiseAdaGradSpec
