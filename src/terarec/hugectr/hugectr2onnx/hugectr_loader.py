"""Which layers the converter knows, under the names that scripts read."""

from __future__ import annotations

from terarec.export import EXPORTED_KINDS
from terarec.hugectr.layer_kinds import KINDS

ONNX_LAYER_TYPES = {layer.name for layer, kind in KINDS.items() if kind in EXPORTED_KINDS}
"""Members of `Layer_t` that ONNX files can hold."""

EXEMPTION_LAYER_TYPES = {layer.name for layer in KINDS} - ONNX_LAYER_TYPES
"""The others, which `convert` refuses."""
