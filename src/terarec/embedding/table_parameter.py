"""`TableParameter`, the empty parameter that represents the tables of a collection in ``model.parameters()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terarec.embedding.row_gradient import RowGradient
from terarec.errors import ConfigError

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
            result = func(*args, **kwargs)
            is_data = name == "__get__" and getattr(func, "__self__", None) is _DATA
            is_of_tables = bool(args) and isinstance(args[0], TableParameter)
            if isinstance(result, Tensor) and is_of_tables and (name in _SAME or is_data):
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


_DATA = Tensor.__dict__.get("data", getattr(torch._C.TensorBase, "data", None))


def _rebuild(dtype: torch.dtype, device: torch.device, requires_grad: bool) -> TableParameter:
    return TableParameter(torch.empty(0, dtype=dtype, device=device), requires_grad)


def _computes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> bool:
    """Return whether a call computed with weights, but for a dense optimizer's step on this parameter alone."""
    operands = [held for held in (*args, *kwargs.values()) if isinstance(held, TableParameter)]
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
