"""What an optimizer does with the rows of tables beside its formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """Which rows move, and what their gradients go through first.

    A row's gradient is the sum over its occurrences. It is divided by `loss_scale`, scaled to `clip_global_norm`,
    clamped to `clip_value`, scaled to `clip_norm`, and increased by ``l2 w + l1 sign(w)``, in this order.

    Attributes:
        mode: "local": the rows with a key in the batch move. "global": all rows of the tables move, with a gradient of
            zero where no key was, as a dense optimizer moves them. "lazy_global": as "local", but a row first catches
            up the steps that it missed. docs/optimizers.md has the formulas.
        l1: weight of abs(w), whose derivative is added to the gradient.
        l2: weight of w^2 / 2, whose derivative is added to the gradient.
        clip_value: bound of every element of a row's gradient; None for none.
        clip_norm: bound of the L2 norm of each row's gradient; None for none.
        clip_global_norm: bound of the L2 norm of all rows' gradients together; None for none.
        loss_scale: what the loss was multiplied by before the backward pass.
        table_lr: table -> factor of the learning rate; 1 for tables that it does not name.
        frozen: tables whose rows and state stay as they are.
        non_finite: what to do about NaN or infinity in a gradient: "pass" it on to its rows, "raise" an error, or
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
        for table, factor in self.table_lr.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0.0 <= factor < float("inf"):
                checks.refuse(self, "table_lr", f"got {factor!r} for {table!r}, expected a finite number >= 0")
        checks.distinct(self, "frozen", self.frozen)
        if self.mode == "lazy_global" and (self.l1 or self.l2):
            checks.refuse(
                self,
                "mode",
                "got 'lazy_global' with l1 or l2, expected 'local' or 'global' with them: steps missed "
                "under regularisation have no closed form",
            )
