"""HugeCTR's converter of trained models to ONNX files, as the package ``hugectr2onnx`` that scripts import."""

from terarec.hugectr.hugectr2onnx import converter, hugectr_loader

__all__ = ["converter", "hugectr_loader"]
