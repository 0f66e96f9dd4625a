"""Trained models in the formats of other runtimes."""

from terarec.export.artifact import EXPORT_FILE, ExportReport, export_model, export_run
from terarec.export.key_input import NO_KEY, KeyInput
from terarec.export.layers import EXPORTED_KINDS
from terarec.export.onnx_file import export_onnx

__all__ = [
    "EXPORTED_KINDS",
    "EXPORT_FILE",
    "NO_KEY",
    "ExportReport",
    "KeyInput",
    "export_model",
    "export_onnx",
    "export_run",
]
