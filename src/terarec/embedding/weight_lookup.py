# SPDX-License-Identifier: Apache-2.0
"""Lookups in an ordinary `torch.nn.Parameter`: its bags, its arena for row optimizers, and one autograd function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from terarec.embedding.row_gradient import PendingGradients
from terarec.errors import ConfigError
from terarec.ops.bag_lookup import bag_lookup, key_weight_gradient
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient, dense_gradient, group_keys, per_key, sparse_gradient, state_dtype
from terarec.ragged import Ragged
from terarec.spec.tables import DEFAULT_OPTIMIZER
from terarec.storage.static_keys import FixedRows


def bags_of_input(
    input: Tensor,  # noqa: A002
    offsets: Tensor | None,
    weights: Tensor | None,
    include_last_offset: bool,
) -> tuple[Ragged[Tensor, Tensor], Tensor | None]:
    """Return the bags of keys that the arguments of `torch.nn.EmbeddingBag` describe, and the weights of the keys.

    Args:
        input: Int32 or int64: [N] with `offsets`, [B, L] for bags of L keys, or a jagged nested tensor.
        offsets: Int32 or int64: [B], or [B + 1] with `include_last_offset`.
        weights: Factor of each key's vector, in the shape of `input`.
        include_last_offset: Whether `offsets` includes the end of the last bag.

    Raises:
        ConfigError: Shapes or types that `torch.nn.EmbeddingBag` rejects.
    """
    if weights is not None and weights.shape != input.shape:
        raise ConfigError(
            "per_sample_weights", f"got shape {list(weights.shape)}, expected {list(input.shape)}, the input's"
        )
    if input.is_nested:
        flat = None if weights is None else weights.values().float()
        return Ragged(_as_keys(input.values(), "input"), _as_keys(input.offsets(), "input")), flat  # type: ignore[attr-defined]
    flat = None if weights is None else weights.reshape(-1).float()
    if input.dim() == 2:
        if offsets is not None:
            raise ConfigError("offsets", "got a tensor with an input [B, L], expected None: each row is a bag")
        starts = torch.arange(input.shape[0] + 1, device=input.device)
        return Ragged(_as_keys(input, "input").reshape(-1), starts * input.shape[1]), flat
    if input.dim() != 1 or offsets is None or offsets.dim() != 1:
        received = "none" if offsets is None else f"shape {list(offsets.shape)}"
        got = f"shape {list(input.shape)} with offsets of {received}"
        raise ConfigError("input", f"got {got}, expected [N] with offsets [B], or [B, L] without")
    offsets = _as_keys(offsets, "offsets")
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), input.shape[0])])
    return Ragged(_as_keys(input, "input"), offsets), flat


def single_keys(input: Tensor) -> Ragged[Tensor, Tensor]:  # noqa: A002
    """Return a bag for each key of ``input``, int32 or int64 of any shape."""
    keys = _as_keys(input, "input").reshape(-1)
    return Ragged(keys, torch.arange(keys.shape[0] + 1, device=keys.device))


def without_key(
    bags: Ragged[Tensor, Tensor], key_weights: Tensor | None, key: int
) -> tuple[Ragged[Tensor, Tensor], Tensor | None]:
    """Return `bags` without any occurrence of `key`, and the weights of the other keys; bags may become empty."""
    kept = bags.values != key
    ends = torch.cat([bags.offsets.new_zeros(1), kept.cumsum(0)])
    # The number of kept keys before an old offset is the new one.
    return Ragged(bags.values[kept], ends[bags.offsets]), None if key_weights is None else key_weights[kept]


def _as_keys(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype == torch.int64:
        return tensor
    if tensor.dtype != torch.int32:
        raise ConfigError(name, f"got {str(tensor.dtype).removeprefix('torch.')}, expected int32 or int64")
    return tensor.long()


class ParameterArena(FixedRows):
    """The rows of an ordinary parameter, with their optimizer state.

    Modules that share a weight share its arena (`arena_of`), so that its rows are updated once a step.

    Attributes:
        parameter: [V, D].
        table_names: Empty, since the parameter is named by its path in the model.
        optimizer: Name of the optimizer: "default".
        tiers: None, as all rows are in the memory of the parameter.
        state: Name -> optimizer state; empty until `attach_state`.
        attached: Token of the row optimizer that the state belongs to.
        pending: Gradients since the last step, if a row optimizer updates the rows. ``.grad`` is then a
            `terarec.embedding.row_gradient.RowGradient`.
    """

    table_names: tuple[str, ...] = ()
    optimizer = DEFAULT_OPTIMIZER
    tiers = None

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.state: dict[str, Tensor] = {}
        self.attached: object = None
        self.pending = PendingGradients(parameter, (self,), [f"a weight {list(parameter.shape)}"])

    @property
    def is_attached(self) -> bool:
        """Whether a row optimizer updates the rows."""
        return self.attached is not None

    @property
    def weights(self) -> Tensor:
        """Weights [V, D], sharing memory with the parameter."""
        return self.parameter.detach()

    @property
    def num_rows(self) -> int:
        """Rows V."""
        return self.parameter.shape[0]

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self.parameter.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.parameter.device

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state in place of any former one.

        Args:
            shapes: Name and shape of each state tensor, as ``ops.row_update.state_shapes`` returns them.
            fills: State -> its initial value; 0 for other states.
        """
        if not self.parameter.is_contiguous():
            shape, strides = list(self.parameter.shape), self.parameter.stride()
            raise ConfigError("row optimizer", f"got a weight {shape} of strides {strides}, expected a contiguous one")
        first = fills or {}
        self.state = {
            name: torch.full(shape, first.get(name, 0), dtype=state_dtype(name), device=self.device)
            for name, shape in shapes
        }

    def take_gradients(self) -> tuple[list[BagGradient], float]:
        """Return and remove the gradients since the last step, with the factor to multiply them by.

        Raises:
            ConfigError: The weight has another ``.grad``, or no row optimizer.
        """
        if not self.is_attached:
            raise ConfigError(
                "row optimizer",
                f"a weight {list(self.parameter.shape)} was replaced or made trainable after the "
                "optimizer was created, expected a row optimizer created after that",
            )
        (taken,), factor = self.pending.take()
        return taken, factor

    def follow_device(self) -> None:
        """Move the state to the device of the parameter."""
        self.state = {name: tensor.to(self.device) for name, tensor in self.state.items()}


_ARENAS: WeakValueDictionary[int, ParameterArena] = WeakValueDictionary()  # by id of a parameter, which its arena holds


def arena_of(parameter: nn.Parameter) -> ParameterArena:
    """Return the arena of `parameter`: the same one as long as a reference to it exists."""
    arena = _ARENAS.get(id(parameter))
    if arena is None:
        arena = _ARENAS[id(parameter)] = ParameterArena(parameter)
    return arena


# `TorchVersion` compares releases, not letters.
GRAPHS_HOLD_UPDATES = torch.__version__ >= "2.13"
"""Whether a compiled graph can contain the backward pass. In torch 2.11 in-place changes of an op are lost in the
compiled backward pass of an autograd function: gradients are zero. 2.12 was not tested."""


class GradientRule(NamedTuple):
    """The way in which the gradient of a weight is computed and stored.

    Attributes:
        arena: Arena that stores the gradient if it has a row optimizer; otherwise it is added to ``.grad``.
        sparse: Whether ``.grad`` is a sparse tensor.
        by_frequency: Whether a key's gradient is divided by how often the key occurs in the lookup.
        without_key: Key whose row gets no gradient.
    """

    arena: ParameterArena | None = None
    sparse: bool = False
    by_frequency: bool = False
    without_key: int | None = None

    @property
    def attached(self) -> ParameterArena | None:
        """The arena, if a row optimizer is attached to it."""
        return self.arena if self.arena is not None and self.arena.is_attached else None

    @property
    def is_traceable(self) -> bool:
        """Whether a compiled graph can contain the backward pass: a dense one whose shapes do not depend on keys."""
        return GRAPHS_HOLD_UPDATES and not (
            self.sparse or self.attached or self.by_frequency or self.without_key is not None
        )


def look_up(
    weight: Tensor, bags: Ragged[Tensor, Tensor], key_weights: Tensor | None, layout: BagLayout, rule: GradientRule
) -> Tensor:
    """Return the pooled vectors [B, D] of `bags`, in the type of `weight`.

    Args:
        weight: [V, D].
        bags: Keys of one feature: N in B bags.
        key_weights: float32[N], factors of the keys' vectors, or None.
        layout: Layout of that feature and one table of V rows.
        rule: Way in which the gradient is computed and stored.

    Raises:
        KeyOutOfRangeError: A key outside 0 <= key < V.
        ConfigError: Offsets that decrease or do not cover the keys, or a weight of an unsupported type.
    """
    is_trained = weight.requires_grad or (key_weights is not None and key_weights.requires_grad)
    if not is_trained or not torch.is_grad_enabled():
        return _vectors(weight, bags, key_weights, layout)
    if torch.compiler.is_compiling() and not (rule.is_traceable and _is_linear(layout)):
        from terarec.ops.traced import run_eager  # loads the compiler

        apart: Tensor = run_eager(look_up, weight, bags, key_weights, layout, rule)
        return apart
    result: Tensor = _Lookup.apply(weight, *bags, key_weights, layout, rule)  # type: ignore[no-untyped-call]
    return result


def _vectors(weight: Tensor, bags: Ragged[Tensor, Tensor], key_weights: Tensor | None, layout: BagLayout) -> Tensor:
    keys, offsets = bags
    return bag_lookup(weight.detach(), keys, offsets, layout, key_weights=key_weights).to(weight.dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        weight: Tensor, keys: Tensor, offsets: Tensor, key_weights: Tensor | None, layout: BagLayout, rule: GradientRule
    ) -> Tensor:
        factors = None if key_weights is None else key_weights.detach()
        return _vectors(weight, Ragged(keys, offsets), factors, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, keys, offsets, key_weights, ctx.layout, ctx.rule = inputs
        ctx.dtype = weight.dtype
        # Save the rows only if the backward pass reads them; otherwise they may change in between.
        is_read = not _is_linear(ctx.layout) or ctx.needs_input_grad[3]
        ctx.save_for_backward(keys, offsets, key_weights, weight if is_read else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        keys, offsets, key_weights, weight = ctx.saved_tensors
        rule: GradientRule = ctx.rule
        rows = None if weight is None else weight.detach()
        gradient = BagGradient(keys, offsets, grad.float(), ctx.layout, key_weights)
        of_weight = of_key_weights = None
        if rows is not None and ctx.needs_input_grad[3]:
            of_key_weights = key_weight_gradient(
                rows, keys, offsets, gradient.grad, ctx.layout, key_weights=key_weights
            )
        if ctx.needs_input_grad[0]:
            gradient = _ruled(gradient, rule)
            # Per key where a maximum was taken, since the rows may have moved when the optimizer steps.
            if rule.attached:
                rule.attached.pending.put(0, per_key(gradient, rows))
            else:
                of_weight = (sparse_gradient if rule.sparse else dense_gradient)(gradient, ctx.dtype, rows)
        return of_weight, None, None, of_key_weights, None, None


def _ruled(gradient: BagGradient, rule: GradientRule) -> BagGradient:
    """Return `gradient` without the key `without_key`, and with the factors of `by_frequency`."""
    keys, offsets, factors = gradient.keys, gradient.offsets, gradient.key_weights
    if rule.without_key is not None:
        (keys, offsets), factors = without_key(Ragged(keys, offsets), factors, rule.without_key)
    layout = gradient.layout
    if rule.by_frequency:
        _, places = group_keys(keys, layout.num_rows)
        # How often each key occurs, at each of its occurrences: int64[N].
        shares = places.bincount()[places].float().reciprocal()
        if layout.pooling == ("mean",):  # as a sum with factors, since with factors a mean divides by their sum
            lengths = offsets.diff()
            shares = shares / lengths.repeat_interleave(lengths)
            layout = dataclasses.replace(layout, pooling=("sum",))
        factors = shares if factors is None else shares * factors
    return BagGradient(keys, offsets, gradient.grad, layout, factors)


def _is_linear(layout: BagLayout) -> bool:
    return layout.pooling != ("max",)
