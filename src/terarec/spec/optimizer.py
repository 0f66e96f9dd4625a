# SPDX-License-Identifier: Apache-2.0
"""Optimizers. Most specs describe the dense and the sparse side alike; `rows` is for tables alone.

g is the gradient (of a row of a table: the sum over its occurrences), w the weights, t the number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

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
    l1: checks.NonNegative = 0.0
    l2: checks.NonNegative = 0.0
    clip_value: checks.Positive | None = None
    clip_norm: checks.Positive | None = None
    clip_global_norm: checks.Positive | None = None
    loss_scale: checks.Positive = 1.0
    table_lr: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    non_finite: Literal["pass", "raise", "skip"] = "pass"

    def __post_init__(self) -> None:
        checks.check_fields(self)
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
_BelowOne = Annotated[float, checks.number(0.0, 0.9999999)]
_RowOptions = Annotated[RowOptions, partial(checks.instance, kinds=RowOptions, expected="RowOptions or None")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDSpec(checks.Checked):
    """w <- w - lr g."""

    kind: ClassVar[str] = "sgd"
    lr: checks.NonNegative = 0.1
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumSpec(checks.Checked):
    """m <- momentum m + g;  w <- w - lr m, as torch.optim.SGD with momentum (Sutskever et al. 2013).

    With `lr_in_momentum` m <- momentum m - lr g;  w <- w + m, as in the paper and in HugeCTR: the same while lr stays,
    but where it changes past gradients keep the rate of their step.
    """

    kind: ClassVar[str] = "momentum"
    lr: checks.NonNegative = 0.1
    momentum: _BelowOne = 0.9
    lr_in_momentum: bool = False
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NesterovSpec(checks.Checked):
    """m <- momentum m + g;  w <- w - lr (g + momentum m), as torch.optim.SGD with nesterov.

    With `lr_in_momentum` m <- momentum m - lr g;  w <- w + momentum m - lr g, as HugeCTR has it: see `MomentumSpec`.
    """

    kind: ClassVar[str] = "nesterov"
    lr: checks.NonNegative = 0.1
    momentum: _BelowOne = 0.9
    lr_in_momentum: bool = False
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaGradSpec(checks.Checked):
    """s <- s + g^2;  w <- w - lr g / (sqrt(s) + eps), as torch.optim.Adagrad without decay (Duchi et al. 2011)."""

    kind: ClassVar[str] = "adagrad"
    lr: checks.NonNegative = 0.01
    # torch's default.
    eps: checks.NonNegative = 1e-10
    initial_accumulator: checks.NonNegative = 0.0
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdaGradSpec(checks.Checked):
    """s <- s + mean(g^2), one number a row;  w <- w - lr g / (sqrt(s) + eps). For tables only."""

    kind: ClassVar[str] = "rowwise_adagrad"
    lr: checks.NonNegative = 0.01
    eps: checks.NonNegative = 1e-8
    initial_accumulator: checks.NonNegative = 0.0
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSPropSpec(checks.Checked):
    """v <- decay v + (1 - decay) g^2;  w <- w - lr g / (sqrt(v) + eps), as torch.optim.RMSprop (Tieleman 2012)."""

    kind: ClassVar[str] = "rmsprop"
    lr: checks.NonNegative = 0.01
    decay: _BelowOne = 0.99
    eps: checks.NonNegative = 1e-8
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSpec(checks.Checked):
    """Adam (Kingma & Ba 2015), as torch.optim.Adam: eps is added to the root of the corrected second moment.

    With `eps_hat` eps is the paper's epsilon hat, which is added before the correction, as TensorFlow, Keras and
    HugeCTR have it:  w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps). A first step is then up to
    1 / sqrt(1 - beta2) times smaller for gradients near eps.

    On tables the bias correction counts the optimizer's steps, whichever rows they touched.
    """

    kind: ClassVar[str] = "adam"
    lr: checks.NonNegative = 0.001
    beta1: _BelowOne = 0.9
    beta2: _BelowOne = 0.999
    eps: checks.NonNegative = 1e-8
    eps_hat: bool = False
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWSpec(checks.Checked):
    """w <- (1 - lr weight_decay) w, then Adam's step, as torch.optim.AdamW (Loshchilov & Hutter 2019)."""

    kind: ClassVar[str] = "adamw"
    lr: checks.NonNegative = 0.001
    beta1: _BelowOne = 0.9
    beta2: _BelowOne = 0.999
    eps: checks.NonNegative = 1e-8
    weight_decay: checks.NonNegative = 0.01
    rows: _RowOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRLSpec:
    """FTRL-Proximal (McMahan et al. 2013), with HugeCTR's eps.

    n' = n + g^2;  z <- z + g - (sqrt(n' + eps) - sqrt(n + eps)) w / lr;  n <- n';
    w <- 0 where abs(z) <= l1, else (sign(z) l1 - z) / ((sqrt(n + eps) + beta) / lr + l2).
    """

    kind: ClassVar[str] = "ftrl"
    # The weights of a row are computed from z by a division by the rate.
    lr: checks.Positive = 0.05
    beta: checks.NonNegative = 1.0
    l1: checks.NonNegative = 0.0
    l2: checks.NonNegative = 0.0
    # The epsilon of float32, as in HugeCTR.
    eps: checks.NonNegative = 1.1920929e-07
    initial_accumulator: checks.NonNegative = 0.0
    rows: _RowOptions | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
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
    name: checks.Name
    lr: checks.NonNegative = 0.001
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "options", Mapping, "arguments by name such as {'weight_decay': 0.01}")
        for argument in self.options:
            # Parameters are those of the model, and a schedule needs to find the rate under one name.
            if argument in ("params", "lr") or not isinstance(argument, str):
                checks.reject(
                    self, "options", f"got {argument!r}, expected names of arguments other than params and lr"
                )


OptimizerSpec = SGDSpec | MomentumSpec | NesterovSpec | AdaGradSpec | RMSPropSpec | AdamSpec | AdamWSpec | FTRLSpec
"""The rules that layers and tables both follow."""
DenseOptimizerSpec = OptimizerSpec | TorchOptimizerSpec
SparseOptimizerSpec = OptimizerSpec | RowWiseAdaGradSpec
