# SPDX-License-Identifier: Apache-2.0
"""`narrow`: a trained model with narrower numbers, for inference."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import LookupCollection
from terarec.embedding.modules import replace_modules
from terarec.models.contract import device_of
from terarec.spec import Numbers
from terarec.spec.checks import FieldError


class Int8Linear(nn.Module):
    """A fully connected layer in integers: weights of 8 bits with a scale for each output, inputs of 7 for each row.

    It runs on a CPU, without gradients. The result of a row does not depend on the other rows of the call.

    Args:
        layer: The trained layer.
    """

    _bias: Tensor
    _sums: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        if not bool(weight.isfinite().all()):
            raise FieldError("", "precision", "got 'int8' for weights that are not finite, expected finite ones")
        bias = None if layer.bias is None else layer.bias.detach().float()
        # A row of zeros would divide by zero; with the smallest normal number its codes are zeros.
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).double()
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        quantized: Any = torch.ops.quantized
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have other tensors, which this product does not take
            codes = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        # torch's quantized products take weights in this packed form alone, which is not a tensor of a state_dict.
        self._packed = quantized.linear_prepack(codes, None)
        self._product = quantized.linear_dynamic
        self._is_relu = bool(getattr(layer, "relu", False))
        self.register_buffer("_bias", torch.zeros(len(weight)) if bias is None else bias, persistent=False)
        self.register_buffer("_sums", codes.dequantize().sum(1), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply in integers: float[..., n] -> float32[..., m]."""
        if not input.shape[0]:  # which the product does not take
            rows = torch.zeros(1, *input.shape[1:])
            return self.forward(rows)[:0]
        rows = input.float()
        least = rows.amin(-1, keepdim=True)
        extent = (rows.amax(-1, keepdim=True) - least).clamp(min=torch.finfo(torch.float32).tiny)
        # The product takes one scale for all rows, from their least and largest number: every row is mapped onto [0, 1]
        # before, so that this scale is always 1 / 127. Numbers that are not finite make their own row so, by `extent`.
        parts = ((rows - least) / extent).nan_to_num(0.0, 0.0, 0.0)
        product: Tensor = self._product(parts, self._packed, True)
        result = torch.addcmul(self._bias, least, self._sums) + product * extent
        return result.relu() if self._is_relu else result


def narrow(model: nn.Module, numbers: Numbers) -> nn.Module:
    """Return `model` with rows and fully connected layers in narrower numbers; it may be changed itself.

    Args:
        model: A trained model.
        numbers: The numbers. Products in 16 bits are up to `terarec.nn.precision.autocast`.

    Raises:
        ConfigError: Rows that are elsewhere, layers of int8 on another device, or values that are not finite.
    """
    kinds: dict[type[nn.Module], Any] = {}
    if numbers.row_type == "int8":
        if any(isinstance(module, LookupCollection) for module in model.modules()):
            raise FieldError(
                "", "row_type", "got 'int8' for rows of a parameter server, expected a cache of form 'int8'"
            )
        kinds[EmbeddingCollection] = lambda collection: collection.quantized()
    if numbers.precision == "int8":
        if device_of(model).type != "cpu":
            raise FieldError("", "precision", f"got 'int8' on {device_of(model)}, expected the CPU")
        kinds[nn.Linear] = Int8Linear
    replace_modules(
        model,
        {
            module: narrowed(module)
            for module in model.modules()
            for kind, narrowed in kinds.items()
            if isinstance(module, kind)
        },
    )
    return model.eval()
