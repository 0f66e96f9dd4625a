"""The layers that the converter supports, under the names that scripts read."""

from __future__ import annotations

from terarec.export import EXPORTED_KINDS
from terarec.hugectr.layers import layer_formats

ONNX_LAYER_TYPES = {kind.name for kind, found in layer_formats().items() if found.layer in EXPORTED_KINDS}
"""Members of `Layer_t` that ONNX files can hold."""

EXEMPTION_LAYER_TYPES = {kind.name for kind in layer_formats()} - ONNX_LAYER_TYPES
"""The others, which `convert` rejects."""
