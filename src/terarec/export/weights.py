"""Weights of layers as constants of an ONNX graph."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from terarec.export.onnx_graph import OnnxGraph


def constant(graph: OnnxGraph, tensor: Tensor) -> str:
    """`tensor` as a float32 constant."""
    return graph.constant(tensor.detach().float().cpu().numpy())


def indices(graph: OnnxGraph, tensor: Tensor) -> str:
    """`tensor` as an int64 constant."""
    return graph.constant(tensor.detach().cpu().numpy().astype(np.int64))


def linear(graph: OnnxGraph, x: str, layer: nn.Linear, *, has_relu: bool = False) -> str:
    """`layer` on the last dimension of `x`, and ReLU on request."""
    x = graph.node("MatMul", x, constant(graph, layer.weight.t()))
    if layer.bias is not None:
        x = graph.node("Add", x, constant(graph, layer.bias))
    return graph.node("Relu", x) if has_relu else x
