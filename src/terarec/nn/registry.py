# SPDX-License-Identifier: Apache-2.0
"""The layers by name, from which models described as data are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from terarec.errors import ConfigError
from terarec.nn.activations import ELU, Cast, Dropout, PReLUDice, ReLU, Sigmoid
from terarec.nn.arithmetic import Add, ElementwiseMultiply, MatrixMultiply, ReduceMean, ReduceSum, Sub
from terarec.nn.attention import GRU, AttentionScores, AttentionValues, MultiHeadAttention, SequenceMask, Softmax
from terarec.nn.dense import FusedInnerProduct, GroupDense, InnerProduct, MLPLayer, WeightMultiply
from terarec.nn.interaction import FmOrder2, Interaction, MultiCross
from terarec.nn.layer import Layer, LayerOption, TensorShape, WeightedLayer
from terarec.nn.losses import BinaryCrossEntropy, CrossEntropy, Loss, MultiCrossEntropy
from terarec.nn.normalization import BatchNorm, LayerNorm
from terarec.nn.reshaping import (
    Concat,
    FusedReshapeConcat,
    FusedReshapeConcatGeneral,
    Gather,
    Reshape,
    Scale,
    Select,
    Slice,
)
from terarec.spec.checks import REQUIRED, did_you_mean
from terarec.spec.registry import Registry

_MODULES: tuple[type[Layer], ...] = (
    # Trained
    InnerProduct,
    FusedInnerProduct,
    MLPLayer,
    GroupDense,
    MultiCross,
    WeightMultiply,
    BatchNorm,
    LayerNorm,
    GRU,
    # Interactions
    Interaction,
    FmOrder2,
    MultiHeadAttention,
    AttentionScores,
    AttentionValues,
    SequenceMask,
    # Activations
    ReLU,
    Sigmoid,
    ELU,
    PReLUDice,
    Softmax,
    Dropout,
    # Arithmetic
    Add,
    Sub,
    ElementwiseMultiply,
    MatrixMultiply,
    ReduceSum,
    ReduceMean,
    # Shapes
    Concat,
    Reshape,
    Slice,
    Select,
    Gather,
    Scale,
    FusedReshapeConcat,
    FusedReshapeConcatGeneral,
    Cast,
    # Losses
    BinaryCrossEntropy,
    CrossEntropy,
    MultiCrossEntropy,
)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer, as tables and pages need it.

    Attributes:
        kind: Name of the kind.
        module: Class of the layers, whose docstring, `SHAPES`, `FORMULA` and `BOTTOMS` describe it.
    """

    kind: str
    module: type[Layer]

    @property
    def options(self) -> tuple[LayerOption, ...]:
        """Options in addition to the shapes."""
        return self.module.OPTIONS

    @property
    def is_loss(self) -> bool:
        """True if its output is a scalar, and it has `predict`."""
        return issubclass(self.module, Loss)

    @property
    def has_weights(self) -> bool:
        """True if it has ``file_parameters``."""
        return issubclass(self.module, WeightedLayer)


LAYERS = Registry("layer", ((module.KIND, LayerKind(module.KIND, module)) for module in _MODULES))


def build_layer(
    kind: str, shapes: Sequence[TensorShape], options: Mapping[str, object], *, generator: torch.Generator
) -> Layer:
    """Make a layer.

    Args:
        kind: A key of `LAYERS`.
        shapes: Shapes of its inputs.
        options: Values of options by name; the others have their defaults.
        generator: Source of its initial weights.

    Raises:
        ConfigError: There is no such kind or option, a value is not accepted, or the shapes do not fit; the message
            names the kind, the option and all shapes.
    """
    layer_kind = LAYERS.find(kind)
    module = layer_kind.module
    low, high = module.BOTTOMS
    if not low <= len(shapes) <= (len(shapes) if high is None else high):
        # Before the constructor, which unpacks the shapes and would raise an error of Python's own.
        count = f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"
        module.reject(shapes, f"{count} inputs")
    arguments: dict[str, object] = _complete(layer_kind, options)
    if layer_kind.has_weights:
        arguments["generator"] = generator
    # Each class has options of its own, which `_complete` has checked against `OPTIONS`: no signature covers them all.
    return cast(Any, module)(tuple(shapes), **arguments)  # type: ignore[no-any-return]


def _complete(kind: LayerKind, options: Mapping[str, object]) -> dict[str, object]:
    """Return every option of `kind` with its value, the given ones checked."""
    names = [option.name for option in kind.options]
    for name in options:
        if name not in names:
            accepted = f"expected {', '.join(names)}" if names else "it takes none"
            raise ConfigError(
                f"layer {kind.kind}", f"there is no option {name!r}{did_you_mean(name, names)}, {accepted}"
            )
    values = {}
    for option in kind.options:
        if option.name in options:
            values[option.name] = option.value(kind.kind, options[option.name])
        elif option.default is REQUIRED:
            raise ConfigError(f"layer {kind.kind}", f"{option.name} is missing, expected {option.accepted}")
        else:
            values[option.name] = option.default
    return values
