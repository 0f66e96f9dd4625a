# SPDX-License-Identifier: Apache-2.0
"""The base class of layers, made from the shapes of their inputs and from their options."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.checks import REQUIRED, Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOption:
    """One option of a kind of layer.

    Attributes:
        name: Key.
        meaning: One line for the documentation.
        rule: Accepted values.
        default: Value where none is given; `REQUIRED` if one must be given.
    """

    name: str
    meaning: str
    rule: Rule
    default: object

    @property
    def accepted(self) -> str:
        """Accepted values in words."""
        return self.rule.accepted

    def value(self, kind: str, value: object) -> object:
        """Return the value of `value` in its own type.

        Raises:
            ConfigError: It is not accepted; the message names `kind`, the option and what is accepted.
        """
        try:
            return self.rule.read(value)
        # `math.isfinite` raises OverflowError for an integer beyond the range of floats.
        except (ValueError, OverflowError):
            raise ConfigError(f"layer {kind}", f"{self.name} is {value!r}, expected {self.accepted}") from None


def integer(name: str, meaning: str, *, default: object = REQUIRED, low: int = 1) -> LayerOption:
    """Return an integer of at least `low`."""
    return LayerOption(name=name, meaning=meaning, rule=checks.integer(low, checks.MOST), default=default)


def number(
    name: str, meaning: str, *, default: object = REQUIRED, low: float = -math.inf, below: float = math.inf
) -> LayerOption:
    """Return a finite number, at least `low` and less than `below`."""
    rule = checks.number(low, below, open_high=below < math.inf)
    return LayerOption(name=name, meaning=meaning, rule=rule, default=default)


def flag(name: str, meaning: str, *, default: object = REQUIRED) -> LayerOption:
    """Return a boolean."""
    return LayerOption(name=name, meaning=meaning, rule=checks.FLAG, default=default)


def choice(name: str, meaning: str, accepted: Collection[object], *, default: object = REQUIRED) -> LayerOption:
    """Return one of a few values."""
    return LayerOption(name=name, meaning=meaning, rule=checks.choice(accepted), default=default)


def list_of(item: LayerOption, *, default: object = REQUIRED, length: int | None = None) -> LayerOption:
    """Return a list (or tuple) of what `item` accepts, of `length` items if that is given."""
    rule = checks.list_of(item.rule, length)
    return LayerOption(name=item.name, meaning=item.meaning, rule=rule, default=default)


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The shape of a tensor whatever the batch: it is [rows * B, ...dims].

    Attributes:
        rows: Rows that each sample has: 1, unless a layer moved a dimension into the first one.
        dims: The lengths after the first dimension.
    """

    rows: int
    dims: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements a sample."""
        return self.rows * math.prod(self.dims)

    def __str__(self) -> str:
        rows = "B" if self.rows == 1 else f"{self.rows}*B"
        return f"[{', '.join([rows, *map(str, self.dims)])}]"


class Layer(nn.Module):
    """Base of the layers: built from the shapes of its inputs and from the options that `OPTIONS` lists.

    A subclass takes ``(shapes, *, <each option>)``; options have their defaults in `OPTIONS` alone, so
    `terarec.nn.registry.build_layer` is the way to make one. ``forward(*bottoms)`` returns a tensor, or a tuple of them
    where there is more than one output. No input is written to.

    Attributes:
        KIND: Name in the registry.
        OPTIONS: Options in addition to the shapes.
        BOTTOMS: Least and greatest number of inputs; no greatest where it is None.
        SHAPES: The shapes in words, for the documentation.
        FORMULA: Formula of the layer, for the documentation.
        output_shapes: Shape of each output; empty for a loss, whose output is a scalar.
        batch_size: Number of samples of every batch, for a layer that takes no other; None for any number.
    """

    KIND: ClassVar[str]
    OPTIONS: ClassVar[tuple[LayerOption, ...]] = ()
    BOTTOMS: ClassVar[tuple[int, int | None]] = (1, 1)
    SHAPES: ClassVar[str]
    FORMULA: ClassVar[str]

    output_shapes: tuple[TensorShape, ...]
    batch_size: int | None = None

    def __init__(self, output_shapes: Sequence[TensorShape]) -> None:
        super().__init__()
        self.output_shapes = tuple(output_shapes)

    @classmethod
    def reject(cls, shapes: Sequence[TensorShape], expected: str, **options: object) -> NoReturn:
        """Raise ConfigError: the layer does not accept these inputs (under these options)."""
        options_text = "".join(f", {name}={value!r}" for name, value in options.items())
        raise ConfigError(
            f"layer {cls.KIND}", f"inputs {', '.join(map(str, shapes))}{options_text}, expected {expected}"
        )

    @classmethod
    def require(cls, condition: bool, shapes: Sequence[TensorShape], expected: str, **options: object) -> None:
        """Call `reject` unless `condition`."""
        if not condition:
            cls.reject(shapes, expected, **options)


class FileTensor(NamedTuple):
    """One tensor of a layer's part of a weight file.

    Attributes:
        tensor: The parameter that holds it, or a buffer where the file has weights that the model does not use.
        view: View of `tensor`, or of a tensor of its shape such as an optimizer's state, the part and orientation that
            the file holds.
    """

    tensor: Tensor
    view: Callable[[Tensor], Tensor]


class WeightedLayer(Layer):
    """A layer with weights: its constructor also takes ``generator``, the source of the first ones."""

    def file_tensors(self) -> list[FileTensor]:
        """Return the weights as files hold them: row-major matrices [in, out], in the order of HugeCTR's files."""
        raise NotImplementedError

    def file_parameters(self) -> list[Tensor]:
        """Return views of the weights, in the order and orientation of `file_tensors`."""
        return [entry.view(entry.tensor.detach()) for entry in self.file_tensors()]

    def set_file_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Set weights in the order and orientation of `file_parameters`.

        Raises:
            ConfigError: The number of tensors or a shape is another; nothing was changed.
        """
        # All shapes are compared before the first copy, so that a layer is never half loaded.
        own = self.file_parameters()
        shapes, expected = [tuple(tensor.shape) for tensor in tensors], [tuple(tensor.shape) for tensor in own]
        if shapes != expected:
            raise ConfigError(f"layer {self.KIND}", f"weights of shapes {shapes}, expected {expected}")
        with torch.no_grad():
            for mine, tensor in zip(own, tensors, strict=True):
                # `mine` is a view, perhaps transposed: the copy converts orientation, type and device at once.
                mine.copy_(tensor)


def as_is(tensor: Tensor) -> Tensor:
    """Return the `view` of a weight that a file holds in the same form."""
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """Return the `view` of a matrix that is kept [out, in] and stored [in, out]."""
    return tensor.t()
