"""Layers with weights, and interactions, in ONNX."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from terarec.export.onnx_graph import OnnxGraph
from terarec.export.weights import constant, linear
from terarec.nn.batch_norm import BatchNorm
from terarec.nn.fm_order2 import FmOrder2
from terarec.nn.group_dense import GroupDense
from terarec.nn.gru import GRU
from terarec.nn.inner_product import FusedInnerProduct, InnerProduct
from terarec.nn.interaction import Interaction
from terarec.nn.layer_norm import LayerNorm
from terarec.nn.mlp import MLPLayer
from terarec.nn.multi_cross import MultiCross
from terarec.nn.prelu_dice import PReLUDice
from terarec.nn.weight_multiply import WeightMultiply


def inner_product(graph: OnnxGraph, layer: InnerProduct, x: str) -> list[str]:
    """X W + b."""
    return [linear(graph, x, layer.linear)]


def fused_inner_product(graph: OnnxGraph, layer: FusedInnerProduct, x: str) -> list[str]:
    """X W + b, and ReLU where the layer has it."""
    return [linear(graph, x, layer.linear, has_relu=layer.has_relu)]


def mlp(graph: OnnxGraph, layer: MLPLayer | GroupDense, x: str, *scratch: str) -> list[str]:
    """Linear layers with ReLU where the layer has it."""
    for part, has_relu in zip(layer.mlp.layers, layer.mlp.relus, strict=True):
        x = linear(graph, x, cast(nn.Linear, part), has_relu=has_relu)
    return [x]


def multi_cross(graph: OnnxGraph, layer: MultiCross, x0: str) -> list[str]:
    """One cross layer after the other, in either version."""
    x = x0
    weights = iter(layer.file_parameters())
    for _ in range(len(layer.bias)):
        if layer.weight is None:
            inner = graph.node("MatMul", x, constant(graph, next(weights)))
            crossed = graph.node("MatMul", inner, constant(graph, next(weights)))
            crossed = graph.node("Mul", x0, graph.node("Add", crossed, constant(graph, next(weights))))
        else:
            dot = graph.node("MatMul", x, constant(graph, next(weights).t()))
            crossed = graph.node("Add", graph.node("Mul", x0, dot), constant(graph, next(weights)))
        x = graph.node("Add", crossed, x)
    return [x]


def batch_norm(graph: OnnxGraph, layer: BatchNorm, x: str) -> list[str]:
    """With the running statistics, as in evaluation."""
    arrays = (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
    return [
        graph.node("BatchNormalization", x, *(constant(graph, array) for array in arrays), epsilon=float(layer.eps))
    ]


def layer_norm(graph: OnnxGraph, layer: LayerNorm, x: str) -> list[str]:
    """Over the last dimension."""
    gamma, beta = constant(graph, layer.gamma), constant(graph, layer.beta)
    return [graph.node("LayerNormalization", x, gamma, beta, axis=-1, epsilon=float(layer.eps))]


def prelu_dice(graph: OnnxGraph, layer: PReLUDice, x: str) -> list[str]:
    """With the statistics of the batch at hand, as the layer has them in evaluation, too."""
    mean = graph.node("ReduceMean", x, graph.integers(0), keepdims=1)
    centred = graph.node("Sub", x, mean)
    var = graph.node("ReduceMean", graph.node("Mul", centred, centred), graph.integers(0), keepdims=1)
    deviation = graph.node("Sqrt", graph.node("Add", var, graph.number(layer.eps)))
    gate = graph.node("Sigmoid", graph.node("Div", centred, deviation))
    shut = graph.node("Mul", graph.node("Sub", graph.number(1.0), gate), graph.number(layer.alpha))
    return [graph.node("Mul", x, graph.node("Add", gate, shut))]


def gru(graph: OnnxGraph, layer: GRU, x: str) -> list[str]:
    """Gates in ONNX's order: update, reset, new."""
    own = layer.gru

    def gates(array: NDArray[Any]) -> NDArray[Any]:
        reset, update, new = np.split(array, 3)
        return np.concatenate([update, reset, new])[None]

    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w, r, *biases = (gates(own.get_parameter(name).detach().cpu().numpy()) for name in names)
    steps = graph.node("Reshape", x, graph.integers(layer.sequence_length, -1, layer.vector_size))
    constants = (graph.constant(array) for array in (w, r, np.concatenate(biases, axis=1)))
    states = graph.node("GRU", steps, *constants, hidden_size=own.hidden_size, linear_before_reset=1)
    return [graph.reshape(states, own.hidden_size)]


def weight_multiply(graph: OnnxGraph, layer: WeightMultiply, x: str) -> list[str]:
    """Each number times its vector."""
    vectors = graph.node("Mul", graph.node("Unsqueeze", x, graph.integers(2)), constant(graph, layer.weight))
    return [graph.reshape(vectors, layer.weight.numel())]


def fm_order2(graph: OnnxGraph, layer: FmOrder2, x: str) -> list[str]:
    """Half of the squared sum less the sum of squares."""
    vectors = graph.reshape(x, layer.num_vectors, layer.out_dim)
    total = graph.node("ReduceSum", vectors, graph.integers(1), keepdims=0)
    squares = graph.node("ReduceSumSquare", vectors, graph.integers(1), keepdims=0)
    return [graph.node("Mul", graph.node("Sub", graph.node("Mul", total, total), squares), graph.number(0.5))]


def interaction(graph: OnnxGraph, layer: Interaction, first: str, others: str) -> list[str]:
    """The first vector, the lower triangle of all dots, row by row, and a zero."""
    own = graph.node("Unsqueeze", first, graph.integers(1))
    vectors = graph.node("Concat", own, others, axis=1)
    dots = graph.node("MatMul", vectors, graph.node("Transpose", vectors, perm=[0, 2, 1]))
    count = layer.dots.num_vectors
    rows, columns = np.tril_indices(count, -1)
    triangle = graph.node("Gather", graph.reshape(dots, count * count), graph.integers(*rows * count + columns), axis=1)
    with_zero = graph.node("Pad", triangle, graph.integers(0, 0, 0, 1))
    return [graph.node("Concat", first, with_zero, axis=1)]
