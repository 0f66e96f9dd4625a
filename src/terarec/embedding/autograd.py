# SPDX-License-Identifier: Apache-2.0
"""The tables of a collection in autograd: the empty parameter that represents them, and the gradients of lookups.

`TableParameter` represents all tables in ``model.parameters()``. The autograd functions below pass the gradient of
looked-up vectors to the row optimizer (`terarec.embedding.row_gradient`) instead of to that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terarec.embedding.row_gradient import PendingGradients, RowGradient
from terarec.embedding.tables import whole_table
from terarec.errors import ConfigError, StorageError
from terarec.memory import Pin
from terarec.ops.bag_lookup import bag_lookup, key_weight_gradient
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient
from terarec.storage.kinds import AnyArena
from terarec.storage.static import StaticTable

# Functions whose result represents the same tables.
_SAME = {"detach", "clone", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous"}
# Functions that return a tensor without computing with weights.
_HARMLESS = {
    *("__get__", "requires_grad_", "share_memory_", "pin_memory", "expand_as", "view_as"),
    *("zeros_like", "empty_like", "ones_like", "full_like", "type_as"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}
# What torch's optimizers do to a parameter, together with its gradient and state. All of these are empty for tables.
_PARAMETER_UPDATES = {"add_", "sub_", "mul_", "lerp_", "addcmul_", "addcdiv_", "copy_", "add", "sub", "mul", "lerp"}
# Those of the fused and foreach optimizers that moving averages and norms of weights use, too.
_OF_AVERAGES = ("_foreach_lerp_", "_foreach_copy_", "_foreach_norm")


class TableParameter(nn.Parameter):
    """An empty parameter float32[0] for all tables of a collection.

    ``requires_grad`` defines whether the tables are trained, ``dtype`` the type of the vectors that lookups return;
    ``grad`` represents the gradients of rows (see `terarec.embedding.row_gradient`). A dense optimizer of it has no
    effect. Arithmetic on it, such as an L2 penalty over ``model.parameters()`` or a moving average of weights, would
    silently omit the tables, so it raises `ConfigError`.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` unless it computes with weights."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            # Run first and rejected by the result: on an empty tensor every function is harmless.
            result = func(*args, **kwargs)
            is_data = name == "__get__" and getattr(func, "__self__", None) is _DATA
            is_of_tables = bool(args) and isinstance(args[0], TableParameter)
            if isinstance(result, Tensor) and is_of_tables and (name in _SAME or is_data):
                # A copy represents the tables, too, so that arithmetic on it is rejected as well.
                return TableParameter(result.detach(), requires_grad=False)
        if _computes(name, args, kwargs, result):
            raise ConfigError(
                f"{name} on the parameter that represents embedding tables",
                "it has no weights; expected collection.table(name) for a penalty or a computation, the options l2, "
                "weight_decay or clip_norm of the row optimizer's spec, or the parameters without it (those with "
                "numel() > 0)",
            )
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        """Return a copy without gradients."""
        if id(self) not in memo:
            memo[id(self)] = _rebuild(self.dtype, self.device, self.requires_grad)
        copied: TableParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle type, device and whether the tables are trained."""
        return _rebuild, (self.dtype, self.device, self.requires_grad)


# Reading ``.data`` comes as a call of ``__get__`` of this descriptor.
_DATA = Tensor.__dict__.get("data", getattr(torch._C.TensorBase, "data", None))


def _rebuild(dtype: torch.dtype, device: torch.device, requires_grad: bool) -> TableParameter:
    return TableParameter(torch.empty(0, dtype=dtype, device=device), requires_grad)


def _computes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> bool:
    """Return whether a call computed with weights, other than a dense optimizer's step on this parameter alone."""
    operands = [operand for operand in (*args, *kwargs.values()) if isinstance(operand, TableParameter)]
    if len(operands) > 1:
        return name not in ("view_as", "expand_as", "__set__", "is_same_size", "_has_compatible_shallow_copy_type")
    if name.startswith(("_fused_", "_foreach_")):
        return torch.is_grad_enabled() or name.startswith(_OF_AVERAGES)
    is_other_tensors = not isinstance(args[0], TableParameter) if args else True
    if not isinstance(result, Tensor) or name in _HARMLESS or (name in _SAME and is_other_tensors):
        return False
    if torch.is_grad_enabled() or name not in _PARAMETER_UPDATES:
        return True
    # A moving average that is kept elsewhere, `average.mul_(0.9).add_(parameter, alpha=0.1)`, and back into the
    # parameter. An optimizer changes other tensors in place by the gradient alone, and adds weight decay out of place.
    is_copied_from_elsewhere = name == "copy_" and not isinstance(args[1], RowGradient)
    is_added_in_place = name.endswith("_") and is_other_tensors and not isinstance(args[0], RowGradient)
    return is_copied_from_elsewhere or is_added_in_place


Deposit = Callable[[Tensor], None]
"""Function that a backward pass calls with the gradient of a lookup's result."""


class LookupGradients:
    """Keeps gradients of rows for the row optimizer, if the rows are still where the lookup found them."""

    def __init__(self, arenas: Sequence[AnyArena], pending: PendingGradients) -> None:
        self._arenas, self._pending = tuple(arenas), pending

    def of_bags(
        self,
        index: int,
        keys: Tensor,
        offsets: Tensor,
        layout: BagLayout,
        key_weights: Tensor | None,
        slots: Tensor | None,
        pin: Pin | None,
    ) -> Deposit:
        """Return the function that stores the gradient of the vectors of bags; see `BagGradient`.

        Args:
            index: Index of the arena.
            keys: int64[N].
            offsets: int64[S * B + 1].
            layout: Layout of the features.
            key_weights: float32[N] or None.
            slots: int64[N], the rows of the arena's weights, where they are in tiers.
            pin: Pin that keeps the slots.
        """
        # Of the lookup: if rows have been evicted by the backward pass, their numbers mean other keys.
        generation = self._arenas[index].generation

        def deposit(grad: Tensor) -> None:
            # Detached, so that a stored gradient does not keep the graph behind the weights.
            factors = None if key_weights is None else key_weights.detach()
            self.keep(index, generation, pin, BagGradient(keys, offsets, grad, layout, factors, slots))

        return deposit

    def of_table(self, table: StaticTable) -> Deposit:
        """Return the function that stores the gradient of all rows of `table`."""
        version = _version_of(table)

        def deposit(grad: Tensor) -> None:
            if _version_of(table) != version:
                raise StorageError(
                    "backward",
                    f"table {table.name!r} was updated since table({table.name!r}) was called, expected the "
                    "row optimizer's step after the backward pass",
                )
            offsets = torch.tensor([0, len(table)], device=grad.device)
            layout = whole_table(table.arena, table.name)
            self._pending.put(self._arenas.index(table.arena), BagGradient(table.keys(), offsets, grad.float(), layout))

        return deposit

    def keep(self, index: int, generation: int, pin: Pin | None, gradient: BagGradient) -> None:
        """Keep a gradient of rows that were found in a `generation` of their arena."""
        arena = self._arenas[index]
        if arena.generation != generation:
            raise StorageError(
                "backward",
                f"rows of tables {', '.join(arena.table_names)} were evicted and given to other keys since the "
                "forward pass, expected the row optimizer's step before the next forward pass",
            )
        if pin is not None:
            assert arena.tiers is not None, "only lookups in tiers pin rows"
            if not arena.tiers.placement.hold(pin):
                raise StorageError(
                    "backward",
                    f"tables {', '.join(arena.table_names)} were updated since the forward pass and their rows left "
                    "the fast tier, expected one backward pass before the row optimizer's step",
                )
        self._pending.put(index, gradient)


def with_gradient(rows: nn.Parameter, compute: Callable[[], Tensor], deposit: Deposit) -> Tensor:
    """Return the result of `compute` as a function of the parameter `rows`, with its gradient passed to `deposit`.

    The parameter gets no gradient from autograd; `PendingGradients.put` sets its ``.grad``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        result: Tensor = _KeepGradient.apply(rows, compute, deposit)  # type: ignore[no-untyped-call]
    return result


class _KeepGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, compute: Callable[[], Tensor], deposit: Deposit) -> Tensor:
        # Vectors that the loss does not use get no gradient, instead of zeros of their size.
        ctx.set_materialize_grads(False)
        ctx.deposit = deposit
        # Within `forward` autograd records nothing, so the lookup gets no backward pass of its own.
        return compute()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.deposit(grad)
        return None, None, None


def look_up_with_weights(
    rows: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    *,
    key_weights: Tensor,
    deposit: Deposit | None,
    pin: object = None,
) -> Tensor:
    """Return the pooled vectors, through which autograd reaches `key_weights` but not `rows`.

    Args:
        rows: Weights [V, D] of an arena, which must not change before the backward pass.
        keys: int64[N].
        offsets: int64[S * B + 1].
        layout: Layout of the features.
        key_weights: float32[N].
        deposit: Function that the backward pass calls with the gradient of the result; None if rows are not trained.
        pin: Object that lives as long as the backward pass may come.

    Returns:
        float32[B, S * D].
    """
    vectors: Tensor = _WeightedLookup.apply(  # type: ignore[no-untyped-call]
        key_weights, rows, keys, offsets, layout, deposit, pin
    )
    return vectors


class _WeightedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key_weights: Tensor,
        rows: Tensor,
        keys: Tensor,
        offsets: Tensor,
        layout: BagLayout,
        deposit: Deposit | None,
        pin: object,
    ) -> Tensor:
        ctx.save_for_backward(key_weights, rows, keys, offsets)
        ctx.layout, ctx.deposit, ctx.pin = layout, deposit, pin
        # Detached, so that the lookup does not record a second backward.
        return bag_lookup(rows, keys, offsets, layout, key_weights=key_weights.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key_weights, rows, keys, offsets = ctx.saved_tensors
        if ctx.deposit is not None:
            ctx.deposit(grad)
        of_weights = key_weight_gradient(rows, keys, offsets, grad, ctx.layout, key_weights=key_weights)
        return of_weights, None, None, None, None, None, None


def _version_of(table: StaticTable) -> tuple[int, int]:
    """Return the versions that change with an update of a table or a write to its weights."""
    return table.arena.weights._version, table.weights._version
