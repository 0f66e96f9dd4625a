# SPDX-License-Identifier: Apache-2.0
"""Gradients for a row optimizer, and the tensor that represents them in ``parameter.grad``.

`PendingGradients` stores the gradients of backward passes. While it has any, ``parameter.grad`` is a `RowGradient`, so
that ``zero_grad()`` of a module or of any optimizer drops the gradients of rows, `torch.nn.utils.clip_grad_norm_` clips
rows and layers by their joint norm, and `torch.amp.GradScaler` checks and unscales both.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terarec.errors import ConfigError
from terarec.ops.row_update import BagGradient, find_non_finite, row_gradient_norm, row_rule

WARNS_AT = 100
"""Number of gradients of one arena without a step at which a warning is logged. A lookup adds one for each kind of
pooling; gradients that are accumulated on purpose are those of a few lookups."""

_LOGGER = logging.getLogger(__name__)
_NORM_RULE = row_rule("sgd", lr=1.0)


class GradientArena(Protocol):
    """The attributes of an arena that `PendingGradients` uses."""

    num_defaults: int

    @property
    def weights(self) -> Tensor:
        """The rows [V, D]."""


class PendingGradients:
    """The gradients of the rows behind one parameter since the last step. Its methods are thread-safe.

    Attributes:
        parameter: Parameter whose ``.grad`` shows whether there are any.
        arenas: Arenas of its rows.
        table_lr: float32[T] for each arena or None; tables with the factor 0 are not part of `norm`.
        is_unscaled: Whether a `torch.amp.GradScaler` has divided the gradients by its scale.
        was_dropped: Whether the last `take` found that a ``zero_grad()`` had dropped all gradients before it.
        over_ranks: Function that adds up a number over the ranks that have further rows of the tables; None for none.
        counted: float32[T] for each arena or None; the rows of tables with the factor 0 are counted on another rank.
        has_norm: Whether `norm` is known: not where some rows of a table have copies on all ranks.
    """

    def __init__(self, parameter: nn.Parameter, arenas: Sequence[GradientArena], names: Sequence[str]) -> None:
        self.parameter = parameter
        self.arenas = tuple(arenas)
        self.table_lr: list[Tensor | None] = [None for _ in self.arenas]
        self._names = tuple(names)
        self._gradients: list[list[BagGradient]] = []
        self._factor = 1.0
        self.over_ranks: Callable[[float], float] | None = None
        self.counted: list[Tensor | None] = [None for _ in self.arenas]
        self.is_unscaled = self.was_dropped = False
        self.has_norm = True
        self._marker: RowGradient | None = None
        self._has_warned = False
        self._lock = threading.RLock()
        self.zero_()

    def gradients(self) -> list[list[BagGradient]]:
        """Return the gradients of each arena: none after ``zero_grad()`` or a change of ``parameter.grad``."""
        with torch._C.DisableTorchFunctionSubclass():
            is_marked = self._marker is not None and self.parameter.grad is self._marker
        return self._gradients if is_marked else self._empty()

    def put(self, arena: int, gradient: BagGradient) -> None:
        """Store `gradient` of an arena until `take`; log one warning if too many are stored.

        Raises:
            ConfigError: The parameter has a ``.grad`` that does not come from lookups.
        """
        # Autograd may pass an expanded gradient, such as that of a sum; kernels read rows side by side.
        if not gradient.grad.is_contiguous():
            gradient = gradient._replace(grad=gradient.grad.contiguous())
        # Without the functions of `TableParameter`, whose ``.grad`` takes microseconds.
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            self._mark()
            if self._factor != 1.0:  # later gradients are not scaled
                self._gradients = [_scaled(mine, self._factor) for mine in self._gradients]
                self._factor = 1.0
            mine = self._gradients[arena]
            mine.append(gradient)
            warns = len(mine) == WARNS_AT and not self._has_warned
            self._has_warned |= warns
        if warns:
            _LOGGER.warning(
                "%s: %d gradients, %s bytes, are stored without a row optimizer's step() or zero_grad(), and each "
                "backward pass adds more; freeze tables that are not trained with requires_grad_(False), or use "
                "torch.no_grad()",
                self._names[arena],
                len(mine),
                f"{sum(one.grad.nbytes for one in mine):,}",
            )

    def take(self) -> tuple[list[list[BagGradient]], float]:
        """Return and remove the gradients of each arena, with the factor to multiply them by.

        Raises:
            ConfigError: The parameter has a ``.grad`` that does not come from lookups.
        """
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            grad = self.parameter.grad
            # ``zero_grad()`` only removes the marker: what was stored before it is dropped here.
            self.was_dropped = grad is None and any(self._gradients)
            if grad is None:
                taken, factor = self._empty(), 1.0
            else:
                self._check(grad)
                taken, factor = self._gradients, self._factor
                self.parameter.grad = None
            self.zero_()
        return taken, factor

    def scale_(self, factor: float) -> None:
        """Multiply the gradients."""
        if math.isfinite(factor):
            self._factor *= factor
        else:  # such as of a norm that is not finite: into the numbers, in which a step looks for it
            self._gradients = [_scaled(mine, factor) for mine in self._gradients]

    def unscale_(self, inverse_scale: float) -> None:
        """Multiply the gradients by the inverse of a loss scale, once.

        A dense optimizer over ``model.parameters()`` and the row optimizer both have the parameter, and a
        `torch.amp.GradScaler` unscales the gradients of each. Its factor is 1 where it only checks them.
        """
        if inverse_scale != 1.0 and not self.is_unscaled:
            self.scale_(inverse_scale)
            self.is_unscaled = True

    def zero_(self) -> None:
        """Remove the gradients; ``parameter.grad`` does not change."""
        self._gradients = self._empty()
        self._factor = 1.0
        self.is_unscaled = False

    def norm(self) -> float:
        """Return the L2 norm over the summed gradients of all rows, without those of frozen tables.

        Where tables are on several ranks, all of these call it and get the same.
        """
        if not self.has_norm:
            raise ConfigError(
                "norm of the gradients of embedding tables",
                "got tables of which some rows have copies on all ranks, expected a placement other than 'hybrid'",
            )
        norms = [
            row_gradient_norm(arena.weights, mine, _NORM_RULE, table_lr=factors, first_row=arena.num_defaults)
            for arena, mine, factors in zip(self.arenas, self.gradients(), self._counted_rates(), strict=True)
        ]
        norm = math.hypot(*norms)
        if self.over_ranks is not None:
            # Norms do not add up, their squares do.
            norm = math.sqrt(self.over_ranks(norm * norm))
        return abs(self._factor) * norm

    def is_finite(self) -> bool:
        """Return whether all gradients are finite numbers; see `norm` for several ranks."""
        is_finite = not any(find_non_finite(mine) for mine in self.gradients())
        return is_finite if self.over_ranks is None else self.over_ranks(float(not is_finite)) == 0.0

    def _counted_rates(self) -> list[Tensor | None]:
        return [
            rates if counted is None else counted if rates is None else rates * counted
            for rates, counted in zip(self.table_lr, self.counted, strict=True)
        ]

    def _mark(self) -> None:
        """Set ``parameter.grad``; remove the gradients from before a ``zero_grad()``."""
        grad = self.parameter.grad
        if grad is not None:
            self._check(grad)
            return
        self.zero_()
        # One marker as long as it fits, as ``parameter.grad`` is compared to it.
        if self._marker is None or not _fits(self._marker, self.parameter):
            self._marker = RowGradient(self)
        self.parameter.grad = self._marker

    def _check(self, grad: Tensor) -> None:
        if grad is not self._marker:
            raise _other_use(self.parameter)

    def _empty(self) -> list[list[BagGradient]]:
        return [[] for _ in self.arenas]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the gradients."""
        return PendingGradients, (self.parameter, self.arenas, self._names)


class RowGradient(Tensor):
    """The ``.grad`` of a parameter that represents rows: a tensor of its shape, without memory.

    It supports what `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and ``zero_grad()`` do to a gradient. A
    dense optimizer of the parameter sees an empty gradient, and so does not update the rows. Any other use raises
    `ConfigError`.
    """

    _pending: weakref.ref[PendingGradients]

    @staticmethod
    def __new__(cls, pending: PendingGradients) -> RowGradient:
        """Create the gradient of ``pending.parameter``."""
        parameter = pending.parameter
        wrapper: RowGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        # Weak, since Python's garbage collector does not see that a parameter holds its gradient.
        wrapper._pending = weakref.ref(pending)
        return wrapper

    @property
    def pending(self) -> PendingGradients:
        """The gradients that this tensor represents."""
        pending = self._pending()
        if pending is None:
            raise ConfigError(
                "gradient of embedding tables", "their module was deleted, expected it to be kept as long"
            )
        return pending

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a text with the number of gradients."""
        return f"RowGradient({sum(map(len, self.pending.gradients()))} lookups)"

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return None: a copy of a module has no gradients of rows."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check for NaN and infinity here: `__torch_dispatch__` sees only the parts of these functions."""
        if func in _FINITE_CHECKS and isinstance(args[0], RowGradient):
            is_finite = args[0].pending.is_finite()
            return torch.tensor([is_finite if func in _IS_FINITE else not is_finite], device=args[0].device)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on the rows' gradients, or without them where it belongs to a dense optimizer."""
        name = func.overloadpacket.__name__
        if name in _NORMS:
            return _norm(func, args, kwargs or {})
        of_rows = any(isinstance(value, RowGradient) for value in _listed(args[0]))
        if name in _SCALINGS and of_rows:
            return _scale(name, args)
        if name in ("zero_", "_foreach_zero_"):
            for gradient in _listed(args[0]):
                gradient.pending.zero_() if isinstance(gradient, RowGradient) else gradient.zero_()
            return args[0] if name == "zero_" else None
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _check_and_unscale(func, *args)
        # Itself, since another object would not count as the marker of `PendingGradients`.
        if name in ("detach", "alias"):
            return args[0]
        # Torch's optimizers work without autograd, and change a gradient in place only with those of other parameters;
        # DistributedDataParallel copies gradients back.
        is_changed = of_rows and name.endswith("_") and not name.startswith("_") and name != "copy_"
        is_optimizers = name in {*_GRADIENT_READS, *_SCALINGS} or name.startswith(("_fused_", "_foreach_"))
        if is_optimizers and not is_changed and (name in _COPIES or not torch.is_grad_enabled()):
            return func(*_without_rows(args), **_without_rows(kwargs or {}))
        if of_rows and name == "add_" and args[0].numel():  # what autograd does where the weight has another use
            raise _other_use(args[0])
        raise ConfigError(
            f"{name} on the .grad of embedding tables",
            "their gradients are kept by row, expected zero_grad(), torch.nn.utils.clip_grad_norm_ (of order 2), "
            "mul_() or div_() by a number, torch.amp.GradScaler, isfinite(), or the options clip_value, clip_norm, l1 "
            "and l2 of the row optimizer's spec",
        )


_IS_FINITE = (torch.isfinite, Tensor.isfinite)
_FINITE_CHECKS = {*_IS_FINITE, torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf}
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm"}
_SCALINGS = {"mul_": False, "div_": True, "_foreach_mul_": False, "_foreach_div_": True}  # name -> whether it divides
_COPIES = {"clone", "zeros_like", "empty_like", "ones_like", "full_like", "_to_copy"}
# What the optimizers of torch do with a gradient and the tensors of its parameter, which are empty for tables.
_GRADIENT_READS = {
    *(*_COPIES, "neg", "add", "add_", "sub", "sub_", "mul", "div"),
    *("lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "copy_"),
}


def _norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if order not in (2, 2.0, None) or any(kwargs.get(name) for name in ("dim", "keepdim")) or len(args) > 2:
        raise ConfigError(
            "norm of the gradients of embedding tables", f"got order {order!r}, expected 2 over all elements"
        )
    norms = [
        torch.tensor(value.pending.norm(), dtype=value.dtype, device=value.device)
        if isinstance(value, RowGradient)
        else torch.linalg.vector_norm(value)
        for value in _listed(args[0])
    ]
    return norms if isinstance(args[0], Sequence) else norms[0]


def _scale(name: str, args: Sequence[Any]) -> Any:
    gradients, factors = _listed(args[0]), args[1]
    many = isinstance(factors, Sequence)
    for mine, factor in zip(gradients, factors if many else [factors] * len(gradients), strict=True):
        if isinstance(mine, RowGradient):
            if isinstance(factor, Tensor) and factor.numel() != 1:
                raise ConfigError(
                    f"{name} on the .grad of embedding tables",
                    f"got a factor {list(factor.shape)}, expected one number",
                )
            # Kept as a factor and applied by the update: no pass over the gradients.
            mine.pending.scale_(1.0 / float(factor) if _SCALINGS[name] else float(factor))
        elif _SCALINGS[name]:
            mine.div_(factor)
        else:
            mine.mul_(factor)
    return None if isinstance(args[0], Sequence) else args[0]


def _check_and_unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    others = [gradient for gradient in gradients if not isinstance(gradient, RowGradient)]
    if others:
        func(others, found_inf, inverse_scale)
    for gradient in gradients:
        if isinstance(gradient, RowGradient):
            if not gradient.pending.is_finite():
                found_inf.fill_(1.0)
            gradient.pending.unscale_(float(inverse_scale))


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Sequence) else [values]


def _without_rows(arguments: Any) -> Any:
    """Return `arguments` with empty tensors in place of gradients of rows."""
    return pytree.tree_map_only(RowGradient, _empty_gradient, arguments)


def _empty_gradient(gradient: RowGradient) -> Tensor:
    if gradient.numel():
        raise _other_use(gradient)
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _other_use(weight: Tensor) -> ConfigError:
    return ConfigError(
        "row optimizer",
        f"a weight {list(weight.shape)} has a .grad, expected gradients of lookups alone: it is also used outside its "
        "embedding module, another optimizer has it, too, or the .grad is older than the row optimizer",
    )


def _fits(marker: RowGradient, parameter: nn.Parameter) -> bool:
    return marker.shape == parameter.shape and marker.dtype == parameter.dtype and marker.device == parameter.device


def _scaled(gradients: Sequence[BagGradient], factor: float) -> list[BagGradient]:
    return [gradient._replace(grad=gradient.grad * factor) for gradient in gradients]
