"""Layers that move, pick or combine elements without weights, in ONNX."""

from __future__ import annotations

from terarec.export.onnx_graph import OnnxGraph
from terarec.export.weights import indices
from terarec.nn.activations import ELU, ReLU
from terarec.nn.concat import Concat
from terarec.nn.elementwise import Add, ElementwiseMultiply, Sub
from terarec.nn.gather import Gather
from terarec.nn.layer import Layer
from terarec.nn.matrix_multiply import MatrixMultiply
from terarec.nn.reduce import ReduceMean, ReduceSum
from terarec.nn.reshape import Reshape
from terarec.nn.reshape_concat import FusedReshapeConcat, FusedReshapeConcatGeneral
from terarec.nn.scale import Scale
from terarec.nn.select import Select
from terarec.nn.slice import Slice


def identity(graph: OnnxGraph, layer: Layer, x: str) -> list[str]:
    """What evaluation leaves as it is."""
    return [x]


def relu(graph: OnnxGraph, layer: ReLU, x: str) -> list[str]:
    """The positive part."""
    return [graph.node("Relu", x)]


def sigmoid(graph: OnnxGraph, layer: Layer, x: str) -> list[str]:
    """The logistic function; the prediction of most losses, too."""
    return [graph.node("Sigmoid", x)]


def elu(graph: OnnxGraph, layer: ELU, x: str) -> list[str]:
    """Exponential linear unit."""
    return [graph.node("Elu", x, alpha=float(layer.alpha))]


def class_probabilities(graph: OnnxGraph, layer: Layer, x: str) -> list[str]:
    """The prediction of a loss of classes."""
    return [graph.node("Softmax", x, axis=1)]


def add(graph: OnnxGraph, layer: Add, *inputs: str) -> list[str]:
    """The sum of all inputs."""
    return [graph.node("Sum", *inputs)]


def sub(graph: OnnxGraph, layer: Sub, left: str, right: str) -> list[str]:
    """The first less the second."""
    return [graph.node("Sub", left, right)]


def elementwise_multiply(graph: OnnxGraph, layer: ElementwiseMultiply, first: str, *others: str) -> list[str]:
    """The product of all inputs."""
    for other in others:
        first = graph.node("Mul", first, other)
    return [first]


def concat(graph: OnnxGraph, layer: Concat, *inputs: str) -> list[str]:
    """Inputs side by side."""
    return [graph.node("Concat", *inputs, axis=layer.axis)]


def reshape(graph: OnnxGraph, layer: Reshape, x: str) -> list[str]:
    """A view, of some of the slots where they are named."""
    for slots in layer.buffers():  # where only some are taken
        x = graph.node("Gather", x, indices(graph, slots), axis=1)
    return [graph.reshape(x, *layer.output_shapes[0].dims)]


def select(graph: OnnxGraph, layer: Select, x: str) -> list[str]:
    """Entries of one dimension."""
    return [graph.node("Gather", x, indices(graph, layer.get_buffer("_index")), axis=layer.dim)]


def gather(graph: OnnxGraph, layer: Gather, x: str) -> list[str]:
    """Rows of the whole batch."""
    return [graph.node("Gather", x, indices(graph, layer.get_buffer("_indices")), axis=0)]


def slices(graph: OnnxGraph, layer: Slice, x: str) -> list[str]:
    """One output for each range of the last dimension."""
    return [graph.slice(x, start, stop, axis=-1) for start, stop in layer.ranges]


def reduce_sum(graph: OnnxGraph, layer: ReduceSum, x: str) -> list[str]:
    """The sum along a dimension, which stays with length 1."""
    return [graph.node("ReduceSum", x, graph.integers(layer.axis), keepdims=1)]


def reduce_mean(graph: OnnxGraph, layer: ReduceMean, x: str) -> list[str]:
    """The mean along a dimension, which stays with length 1."""
    return [graph.node("ReduceMean", x, graph.integers(layer.axis), keepdims=1)]


def scale(graph: OnnxGraph, layer: Scale, x: str) -> list[str]:
    """Elements or rows several times."""
    axis = 1 if layer.axis == 1 else 2
    repeats = [1, 1, 1]
    repeats[axis] = layer.factor
    copies = graph.node("Tile", graph.node("Unsqueeze", x, graph.integers(axis)), graph.integers(*repeats))
    return [graph.reshape(copies, *layer.output_shapes[0].dims)]


def matrix_multiply(graph: OnnxGraph, layer: MatrixMultiply, left: str, right: str) -> list[str]:
    """A product for each sample, or of whole batches where the first input has two dimensions."""
    dims = layer.output_shapes[0].dims
    if layer.is_of_batches:
        return [graph.reshape(graph.node("MatMul", left, graph.node("Flatten", right, axis=1)), *dims)]
    if layer.transpose_b:
        order = [*range(len(dims) - 1), len(dims), len(dims) - 1]
        right = graph.node("Transpose", right, perm=order)
    return [graph.node("MatMul", left, right)]


def fused_reshape_concat_general(graph: OnnxGraph, layer: FusedReshapeConcatGeneral, *inputs: str) -> list[str]:
    """All slots as rows, the inputs' vectors side by side."""
    return [graph.reshape(graph.node("Concat", *inputs, axis=2), *layer.output_shapes[0].dims)]


def fused_reshape_concat(graph: OnnxGraph, layer: FusedReshapeConcat, *inputs: str) -> list[str]:
    """All slots but the last, and the last one."""
    joined = graph.node("Concat", *inputs, axis=2)
    last = layer.output_shapes[0].rows // layer.output_shapes[1].rows
    parts = (graph.slice(joined, 0, last, axis=1), graph.slice(joined, last, last + 1, axis=1))
    return [graph.reshape(part, *layer.output_shapes[0].dims) for part in parts]
