"""Trained models in the formats of other runtimes."""

from terarec.export.key_input import NO_KEY, KeyInput
from terarec.export.layers import EXPORTED_KINDS
from terarec.export.onnx_file import export_onnx

__all__ = ["EXPORTED_KINDS", "NO_KEY", "KeyInput", "export_onnx"]
