# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingBag` and `Embedding`, drop-in replacements for torch's modules, and `replace_embeddings`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from terarec.embedding.row_gradient import PendingGradients
from terarec.embedding.weight_lookup import (
    GradientRule,
    ParameterArena,
    arena_of,
    bags_of_input,
    look_up,
    single_keys,
    without_key,
)
from terarec.errors import ConfigError
from terarec.ops.checks import ROW_DTYPES
from terarec.ops.layout import BagLayout, single_layout
from terarec.ops.row_update import BagGradient
from terarec.ragged import Ragged
from terarec.spec import Pooling
from terarec.storage.kinds import AnyTable


class DropIn(nn.Module):
    """A module whose ``weight`` [V, D] is looked up by terarec's kernels. It is a `RowParameters`.

    Once a `terarec.optim.RowOptimizer` trains it, it keeps the gradients of its lookups for the optimizer's next step,
    and ``weight.grad`` is a `terarec.embedding.row_gradient.RowGradient`, which has no memory. A copy of it, deep or
    pickled, is an ordinary module again.
    """

    weight: Tensor
    sparse: bool
    scale_grad_by_freq: bool
    max_norm: float | None
    norm_type: float
    _arena: ParameterArena | None = None
    _layout: BagLayout | None = None

    @property
    def arenas(self) -> tuple[ParameterArena, ...]:
        """The arena of the weight; none if the weight is frozen or not a parameter."""
        if not isinstance(self.weight, nn.Parameter) or not self.weight.requires_grad:
            return ()
        # The parameter may have been replaced, as by `load_state_dict(assign=True)`; an arena belongs to one.
        if self._arena is None or self._arena.parameter is not self.weight:
            self._arena = arena_of(self.weight)
        return (self._arena,)

    @property
    def pending(self) -> PendingGradients:
        """Gradients for the row optimizer."""
        return arena_of(cast(nn.Parameter, self.weight)).pending

    @property
    def tables(self) -> Mapping[str, AnyTable]:
        """No tables: the weight's place in the model is its name."""
        return {}

    def take_gradients(self) -> tuple[list[list[BagGradient]], float]:
        """Return and remove the gradients of the lookups since the last step.

        Returns:
            One list per arena, and the factor to multiply them by.

        Raises:
            ConfigError: A weight without a row optimizer, or one that has another ``.grad``.
        """
        arenas = self.arenas
        if not arenas:
            return [], 1.0
        taken, factor = arenas[0].take_gradients()
        return [taken], factor

    def _is_left_to_torch(self, keys: object) -> bool:
        """Return whether to call torch's own forward: for meta tensors, traces and `torch.func`."""
        if not isinstance(keys, Tensor) or self.weight.is_meta:
            return True
        if torch.compiler.is_compiling():
            return False
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func
        return is_transformed or forward_ad._current_level >= 0 or torch._C._is_tracing()

    def _look_up(
        self,
        bags: Ragged[Tensor, Tensor],
        key_weights: Tensor | None,
        pooling: Pooling,
        without_key: int | None = None,
    ) -> Tensor:
        """Return the pooled vectors of `bags`, after scaling rows down to ``max_norm`` as torch does."""
        # Before the lookup and outside of autograd, as in torch: rows that were scaled down stay so.
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(self.weight.detach(), bags.values, self.max_norm, self.norm_type)
        arena = self._arena
        if arena is not None and arena.parameter is not self.weight:
            arena = None  # the weight was replaced
        rule = GradientRule(arena, self.sparse, self.scale_grad_by_freq, without_key)
        return look_up(self.weight, bags, key_weights, self._layout_for(pooling), rule)

    def _layout_for(self, pooling: Pooling) -> BagLayout:
        rows, width = self.weight.shape
        layout = self._layout
        if layout is None or layout.table_rows != (rows,) or layout.width != width or layout.pooling != (pooling,):
            if torch.compiler.is_compiling():
                from terarec.ops.traced import constant_layout  # loads the compiler

                layout = self._layout = constant_layout(rows, width, pooling)
            else:
                layout = self._layout = single_layout(rows, width, pooling)
        return layout

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropIn:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._arena is not None:
            self._arena.follow_device()
        return self

    # An arena would tie the copy to the row optimizer of the original.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_arena", "_layout")}


class EmbeddingBag(DropIn, nn.EmbeddingBag):
    """Replaces `torch.nn.EmbeddingBag`: the same arguments, results, gradients and ``state_dict``.

    Three ways to train it:

    * with any `torch.optim` optimizer: ``weight.grad`` is a dense tensor;
    * with ``sparse=True``: ``weight.grad`` is a coalesced sparse tensor, each touched row in it once;
    * passed, alone or in a model, to `terarec.optim.RowOptimizer`: there is no ``.grad``; the touched rows move
      in place, once a step.

    Differences: every key is checked against the table, offsets must cover all keys, weights are float32, bfloat16 or
    float16, and gradients are not differentiable a second time.

    Args:
        num_embeddings: Rows V.
        embedding_dim: Width D.
        ...: As in `torch.nn.EmbeddingBag`.

    Example:
        >>> bag = terarec.EmbeddingBag(1_000_000, 64, mode="sum", sparse=True)
        >>> bag(torch.tensor([3, 14, 15]), torch.tensor([0, 2]))  # float32[2, 64]
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:  # noqa: A002
        """Return the pooled vectors [B, D].

        Args:
            input: Int32 or int64 keys: [N] with `offsets`, or [B, L].
            offsets: First key of each bag, [B], or [B + 1] with ``include_last_offset``.
            per_sample_weights: A factor of each key's vector, shaped as `input`; for mode "sum" alone.

        Raises:
            KeyOutOfRangeError: A key outside 0 <= key < V.
            ConfigError: Arguments that do not fit each other.
        """
        if self._is_left_to_torch(input):
            return super().forward(input, offsets, per_sample_weights)
        if per_sample_weights is not None and self.mode != "sum":
            raise ConfigError("per_sample_weights", f"got some in mode {self.mode!r}, expected mode 'sum'")
        if self.scale_grad_by_freq and self.mode == "max":
            raise ConfigError("scale_grad_by_freq", "got True in mode 'max', expected mode 'sum' or 'mean'")
        bags, key_weights = bags_of_input(input, offsets, per_sample_weights, self.include_last_offset)
        if self.padding_idx is not None:
            # As in torch, padding is not a part of a sum, a mean or a maximum.
            bags, key_weights = without_key(bags, key_weights, self.padding_idx)
        return self._look_up(bags, key_weights, cast(Pooling, self.mode))


class Embedding(DropIn, nn.Embedding):
    """Replaces `torch.nn.Embedding`: the same arguments, results, gradients and ``state_dict``.

    It is trained in the three ways of `EmbeddingBag`, and differs from torch's module as that one does.

    Args:
        num_embeddings: Rows V.
        embedding_dim: Width D.
        ...: As in `torch.nn.Embedding`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the vectors [*, D] of the keys ``input`` [*], int32 or int64.

        Raises:
            KeyOutOfRangeError: A key outside 0 <= key < V.
        """
        if self._is_left_to_torch(input):
            return super().forward(input)
        # As in torch, the row of `padding_idx` is returned like any other; it only gets no gradient.
        vectors = self._look_up(single_keys(input), None, "sum", self.padding_idx)
        return vectors.reshape(*input.shape, self.weight.shape[1])


_LOGGER = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=nn.Module)
_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {nn.EmbeddingBag: EmbeddingBag, nn.Embedding: Embedding}


def replace_embeddings(model: _Model) -> _Model:
    """Turn every `torch.nn.EmbeddingBag` and `torch.nn.Embedding` in `model` into terarec's, in place.

    The module objects stay and change their class, so that all else stays, too: the weights and optimizers that hold
    them, modules and weights shared by several places, hooks, training flags, references from elsewhere.

    Replacements are logged at level INFO; an embedding module that is not replaced (a subclass, weights of another
    type, a patched ``forward``) at level WARNING, with the reason.

    Args:
        model: Any module; may itself be an embedding module.

    Returns:
        `model`.
    """
    replaced: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.EmbeddingBag | nn.Embedding) or isinstance(module, EmbeddingBag | Embedding):
            continue
        place = name or "the model itself"
        reason = _obstacle(module)
        if reason:
            _LOGGER.warning("replace_embeddings: %s is not replaced: %s", place, reason)
        else:
            # Both classes have one layout in memory: the replacement adds methods and attributes of the class alone.
            module.__class__ = _REPLACEMENTS[type(module)]  # type: ignore[assignment]
            replaced.append(place)
    _LOGGER.info("replace_embeddings: %d modules replaced: %s", len(replaced), ", ".join(replaced) or "none")
    return model


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put another module in place of each of `replacements` inside `model`, under all of its names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def _obstacle(module: nn.EmbeddingBag | nn.Embedding) -> str:
    """Return why `module` cannot be replaced; empty if it can."""
    if type(module) not in _REPLACEMENTS:
        return f"{type(module).__name__} is a subclass, which may compute something else"
    if "forward" in vars(module):
        return "its forward was patched"
    if module.weight.dtype not in ROW_DTYPES:
        return f"its weights are {str(module.weight.dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    return ""
