"""The layers that ONNX files can hold: one function a layer, and the table of them by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from terarec.errors import ConfigError
from terarec.export.onnx_graph import OnnxGraph
from terarec.nn.activations import ELU, PReLUDice, ReLU
from terarec.nn.arithmetic import Add, ElementwiseMultiply, MatrixMultiply, ReduceMean, ReduceSum, Sub
from terarec.nn.attention import GRU, AttentionScores, AttentionValues, MultiHeadAttention, SequenceMask, Softmax
from terarec.nn.dense import FusedInnerProduct, GroupDense, InnerProduct, MLPLayer, WeightMultiply
from terarec.nn.interaction import FmOrder2, Interaction, MultiCross
from terarec.nn.layer import Layer
from terarec.nn.normalization import BatchNorm, LayerNorm
from terarec.nn.reshaping import (
    Concat,
    FusedReshapeConcat,
    FusedReshapeConcatGeneral,
    Gather,
    Reshape,
    Scale,
    Select,
    Slice,
)


def _constant(graph: OnnxGraph, tensor: Tensor) -> str:
    """Return `tensor` as a float32 constant."""
    return graph.constant(tensor.detach().float().cpu().numpy())


def _indices(graph: OnnxGraph, tensor: Tensor) -> str:
    """Return `tensor` as an int64 constant."""
    return graph.constant(tensor.detach().cpu().numpy().astype(np.int64))


def _linear(graph: OnnxGraph, x: str, layer: nn.Linear, *, has_relu: bool = False) -> str:
    """Return `layer` on the last dimension of `x`, and ReLU on request."""
    x = graph.node("MatMul", x, _constant(graph, layer.weight.t()))
    if layer.bias is not None:
        x = graph.node("Add", x, _constant(graph, layer.bias))
    # MatMul and not Gemm, which takes matrices alone: an input may have more than two dimensions.
    return graph.node("Relu", x) if has_relu else x


def emit_identity(graph: OnnxGraph, layer: Layer, x: str) -> list[str]:
    """Return the input: the layer does nothing in evaluation."""
    return [x]


def emit_relu(graph: OnnxGraph, layer: ReLU, x: str) -> list[str]:
    """Return the positive part."""
    return [graph.node("Relu", x)]


def emit_sigmoid(graph: OnnxGraph, layer: Layer, x: str) -> list[str]:
    """Return the logistic function; the prediction of most losses, too."""
    return [graph.node("Sigmoid", x)]


def emit_elu(graph: OnnxGraph, layer: ELU, x: str) -> list[str]:
    """Return the exponential linear unit."""
    return [graph.node("Elu", x, alpha=float(layer.alpha))]


def emit_class_probabilities(graph: OnnxGraph, layer: Layer, x: str) -> list[str]:
    """Return the prediction of a loss of classes."""
    return [graph.node("Softmax", x, axis=1)]


def emit_add(graph: OnnxGraph, layer: Add, *inputs: str) -> list[str]:
    """Return the sum of all inputs."""
    return [graph.node("Sum", *inputs)]


def emit_sub(graph: OnnxGraph, layer: Sub, left: str, right: str) -> list[str]:
    """Return the first less the second."""
    return [graph.node("Sub", left, right)]


def emit_elementwise_multiply(graph: OnnxGraph, layer: ElementwiseMultiply, first: str, *others: str) -> list[str]:
    """Return the product of all inputs."""
    for other in others:
        first = graph.node("Mul", first, other)
    return [first]


def emit_concat(graph: OnnxGraph, layer: Concat, *inputs: str) -> list[str]:
    """Return the inputs side by side."""
    return [graph.node("Concat", *inputs, axis=layer.axis)]


def emit_reshape(graph: OnnxGraph, layer: Reshape, x: str) -> list[str]:
    """Return a view, of some of the slots where they are named."""
    # The layer's one buffer is absent where it takes all slots, so the loop runs once or never.
    for slots in layer.buffers():  # where only some are taken
        x = graph.node("Gather", x, _indices(graph, slots), axis=1)
    return [graph.reshape(x, *layer.output_shapes[0].dims)]


def emit_select(graph: OnnxGraph, layer: Select, x: str) -> list[str]:
    """Return entries of one dimension."""
    return [graph.node("Gather", x, _indices(graph, layer.get_buffer("_index")), axis=layer.dim)]


def emit_gather(graph: OnnxGraph, layer: Gather, x: str) -> list[str]:
    """Return rows of the batch across samples."""
    return [graph.node("Gather", x, _indices(graph, layer.get_buffer("_indices")), axis=0)]


def emit_slices(graph: OnnxGraph, layer: Slice, x: str) -> list[str]:
    """Return one output for each range of the last dimension."""
    return [graph.slice(x, start, stop, axis=-1) for start, stop in layer.ranges]


def emit_reduce_sum(graph: OnnxGraph, layer: ReduceSum, x: str) -> list[str]:
    """Return the sum along a dimension, which stays with length 1."""
    return [graph.node("ReduceSum", x, graph.integers(layer.axis), keepdims=1)]


def emit_reduce_mean(graph: OnnxGraph, layer: ReduceMean, x: str) -> list[str]:
    """Return the mean along a dimension, which stays with length 1."""
    return [graph.node("ReduceMean", x, graph.integers(layer.axis), keepdims=1)]


def emit_scale(graph: OnnxGraph, layer: Scale, x: str) -> list[str]:
    """Return elements or rows several times."""
    axis = 1 if layer.axis == 1 else 2
    repeats = [1, 1, 1]
    repeats[axis] = layer.factor
    # Forward alone is exported, for which `first_copy_gradient` makes no difference.
    copies = graph.node("Tile", graph.node("Unsqueeze", x, graph.integers(axis)), graph.integers(*repeats))
    return [graph.reshape(copies, *layer.output_shapes[0].dims)]


def emit_matrix_multiply(graph: OnnxGraph, layer: MatrixMultiply, left: str, right: str) -> list[str]:
    """Return a product for each sample, or of entire batches where the first input has two dimensions."""
    dims = layer.output_shapes[0].dims
    if layer.is_of_batches:
        return [graph.reshape(graph.node("MatMul", left, graph.node("Flatten", right, axis=1)), *dims)]
    if layer.transpose_b:
        order = [*range(len(dims) - 1), len(dims), len(dims) - 1]
        right = graph.node("Transpose", right, perm=order)
    return [graph.node("MatMul", left, right)]


def emit_fused_reshape_concat_general(graph: OnnxGraph, layer: FusedReshapeConcatGeneral, *inputs: str) -> list[str]:
    """Return all slots as rows, the inputs' vectors side by side."""
    return [graph.reshape(graph.node("Concat", *inputs, axis=2), *layer.output_shapes[0].dims)]


def emit_fused_reshape_concat(graph: OnnxGraph, layer: FusedReshapeConcat, *inputs: str) -> list[str]:
    """Return all slots but the last, and the last one."""
    joined = graph.node("Concat", *inputs, axis=2)
    last = layer.output_shapes[0].rows // layer.output_shapes[1].rows
    parts = (graph.slice(joined, 0, last, axis=1), graph.slice(joined, last, last + 1, axis=1))
    return [graph.reshape(part, *layer.output_shapes[0].dims) for part in parts]


def emit_inner_product(graph: OnnxGraph, layer: InnerProduct, x: str) -> list[str]:
    """Return x W + b."""
    return [_linear(graph, x, layer.linear)]


def emit_fused_inner_product(graph: OnnxGraph, layer: FusedInnerProduct, x: str) -> list[str]:
    """Return x W + b, and ReLU where the layer has it."""
    return [_linear(graph, x, layer.linear, has_relu=layer.linear.relu)]


def emit_mlp(graph: OnnxGraph, layer: MLPLayer | GroupDense, x: str, *scratch: str) -> list[str]:
    """Return linear layers with ReLU where the layer has it."""
    for part, has_relu in zip(layer.mlp.layers, layer.mlp.relus, strict=True):
        x = _linear(graph, x, cast(nn.Linear, part), has_relu=has_relu)
    return [x]


def emit_multi_cross(graph: OnnxGraph, layer: MultiCross, x0: str) -> list[str]:
    """Return one cross layer after the other, in either version."""
    x = x0
    # Layer by layer, as the formula says. The short form of version 1 sums in another order, within the tolerance.
    weights = iter(layer.file_parameters())
    for _ in range(len(layer.bias)):
        if layer.weight is None:
            inner = graph.node("MatMul", x, _constant(graph, next(weights)))
            crossed = graph.node("MatMul", inner, _constant(graph, next(weights)))
            crossed = graph.node("Mul", x0, graph.node("Add", crossed, _constant(graph, next(weights))))
        else:
            dot = graph.node("MatMul", x, _constant(graph, next(weights).t()))
            crossed = graph.node("Add", graph.node("Mul", x0, dot), _constant(graph, next(weights)))
        x = graph.node("Add", crossed, x)
    return [x]


def emit_batch_norm(graph: OnnxGraph, layer: BatchNorm, x: str) -> list[str]:
    """Normalize by the running statistics, as in evaluation."""
    arrays = (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
    return [
        graph.node("BatchNormalization", x, *(_constant(graph, array) for array in arrays), epsilon=float(layer.eps))
    ]


def emit_layer_norm(graph: OnnxGraph, layer: LayerNorm, x: str) -> list[str]:
    """Normalize over the last dimension."""
    gamma, beta = _constant(graph, layer.gamma), _constant(graph, layer.beta)
    return [graph.node("LayerNormalization", x, gamma, beta, axis=-1, epsilon=float(layer.eps))]


def emit_prelu_dice(graph: OnnxGraph, layer: PReLUDice, x: str) -> list[str]:
    """Use the statistics of the current batch, as the layer does in evaluation, too."""
    mean = graph.node("ReduceMean", x, graph.integers(0), keepdims=1)
    centred = graph.node("Sub", x, mean)
    var = graph.node("ReduceMean", graph.node("Mul", centred, centred), graph.integers(0), keepdims=1)
    deviation = graph.node("Sqrt", graph.node("Add", var, graph.number(layer.eps)))
    gate = graph.node("Sigmoid", graph.node("Div", centred, deviation))
    shut = graph.node("Mul", graph.node("Sub", graph.number(1.0), gate), graph.number(layer.alpha))
    return [graph.node("Mul", x, graph.node("Add", gate, shut))]


def emit_gru(graph: OnnxGraph, layer: GRU, x: str) -> list[str]:
    """Return the states; gates are in ONNX's order: update, reset, new."""
    own = layer.gru

    def gates(array: NDArray[Any]) -> NDArray[Any]:
        reset, update, new = np.split(array, 3)
        return np.concatenate([update, reset, new])[None]

    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w, r, *biases = (gates(own.get_parameter(name).detach().cpu().numpy()) for name in names)
    steps = graph.node("Reshape", x, graph.integers(layer.sequence_length, -1, layer.vector_size))
    constants = (graph.constant(array) for array in (w, r, np.concatenate(biases, axis=1)))
    # `linear_before_reset` is the form of torch and cuDNN, in which the reset gate acts after the product with R.
    states = graph.node("GRU", steps, *constants, hidden_size=own.hidden_size, linear_before_reset=1)
    return [graph.reshape(states, own.hidden_size)]


def emit_weight_multiply(graph: OnnxGraph, layer: WeightMultiply, x: str) -> list[str]:
    """Return each number times its vector."""
    vectors = graph.node("Mul", graph.node("Unsqueeze", x, graph.integers(2)), _constant(graph, layer.weight))
    return [graph.reshape(vectors, layer.weight.numel())]


def emit_fm_order2(graph: OnnxGraph, layer: FmOrder2, x: str) -> list[str]:
    """Return half of the squared sum less the sum of squares."""
    vectors = graph.reshape(x, layer.num_vectors, layer.out_dim)
    total = graph.node("ReduceSum", vectors, graph.integers(1), keepdims=0)
    squares = graph.node("ReduceSumSquare", vectors, graph.integers(1), keepdims=0)
    return [graph.node("Mul", graph.node("Sub", graph.node("Mul", total, total), squares), graph.number(0.5))]


def emit_interaction(graph: OnnxGraph, layer: Interaction, first: str, others: str) -> list[str]:
    """Return the first vector, the lower triangle of all dots, row by row, and a zero."""
    own = graph.node("Unsqueeze", first, graph.integers(1))
    vectors = graph.node("Concat", own, others, axis=1)
    dots = graph.node("MatMul", vectors, graph.node("Transpose", vectors, perm=[0, 2, 1]))
    count = layer.dots.num_vectors
    rows, columns = np.tril_indices(count, -1)
    # One gather of the flat matrix: ONNX has no triangle with a list of places.
    triangle = graph.node("Gather", graph.reshape(dots, count * count), graph.integers(*rows * count + columns), axis=1)
    with_zero = graph.node("Pad", triangle, graph.integers(0, 0, 0, 1))
    return [graph.node("Concat", first, with_zero, axis=1)]


def emit_softmax(graph: OnnxGraph, layer: Softmax, x: str, *mask: str) -> list[str]:
    """Return the softmax over the last dimension, with a mask on request."""
    if not mask:
        return [graph.node("Softmax", x, axis=-1)]
    return [_masked_softmax(graph, graph.node("Mul", x, graph.number(layer.factor)), *mask)]


def emit_multi_head_attention(
    graph: OnnxGraph, layer: MultiHeadAttention, query: str, key: str, value: str, *mask: str
) -> list[str]:
    """Return the values weighed by the softmax of their scores, head by head."""
    q, k, v = (_split_heads(graph, x, layer.num_heads) for x in (query, key, value))
    scores = _scores(graph, q, k)
    # The two softmaxes differ as in the layer, by the 1e-6 that HugeCTR adds to the sum under a mask.
    weights = _masked_softmax(graph, scores, *mask) if mask else graph.node("Softmax", scores, axis=-1)
    return [_join_heads(graph, graph.node("MatMul", weights, v))]


def emit_attention_scores(graph: OnnxGraph, layer: AttentionScores, query: str, key: str, *value: str) -> list[str]:
    """Return scores alone, and the values by head where there are any."""
    if not value:
        return [_scores(graph, query, key)]
    q, k, v = (_split_heads(graph, x, layer.num_heads) for x in (query, key, *value))
    return [_scores(graph, q, k), v]


def emit_attention_values(graph: OnnxGraph, layer: AttentionValues, weights: str, value: str) -> list[str]:
    """Return values weighed by softmaxed scores."""
    return [_join_heads(graph, graph.node("MatMul", weights, value))]


def emit_sequence_mask(graph: OnnxGraph, layer: SequenceMask, *lengths: str) -> list[str]:
    """Return 1 where all positions are below the lengths, of which there are one or two."""
    buffers = ["_from_positions", "_to_positions"][-len(lengths) :]
    inside = [
        graph.node("Less", _indices(graph, layer.get_buffer(name)), _whole(graph, length))
        for name, length in zip(buffers, lengths, strict=True)
    ]
    both = inside[0] if len(inside) == 1 else graph.node("And", *inside)
    return [graph.node("Cast", both, to=1)]


def _masked_softmax(graph: OnnxGraph, x: str, mask: str) -> str:
    """Return the result of `terarec.nn.attention.masked_softmax`."""
    outside = graph.node("Mul", graph.node("Sub", graph.number(1.0), mask), graph.number(10000.0))
    shifted = graph.node("Sub", x, outside)
    most = graph.node("ReduceMax", shifted, graph.integers(-1), keepdims=1)
    exponents = graph.node("Exp", graph.node("Sub", shifted, most))
    total = graph.node("ReduceSum", exponents, graph.integers(-1), keepdims=1)
    return graph.node("Div", exponents, graph.node("Add", total, graph.number(1e-6)))


def _scores(graph: OnnxGraph, query: str, key: str) -> str:
    """Return Q K^T / sqrt(d) for Q [B, h, from, d] and K [B, h, to, d]."""
    products = graph.node("MatMul", query, graph.node("Transpose", key, perm=[0, 1, 3, 2]))
    # From the value itself: the width of a head is not known where scores are made of tensors by head.
    width = graph.node("Cast", graph.node("Shape", query, start=-1), to=1)
    return graph.node("Div", products, graph.node("Sqrt", width))


def _split_heads(graph: OnnxGraph, x: str, heads: int) -> str:
    """Return [B, seq, h*d] as [B, h, seq, d]."""
    parts = graph.node("Reshape", x, graph.integers(0, 0, heads, -1))
    return graph.node("Transpose", parts, perm=[0, 2, 1, 3])


def _join_heads(graph: OnnxGraph, x: str) -> str:
    """Return [B, h, seq, d] as [B, seq, h*d]."""
    return graph.node("Reshape", graph.node("Transpose", x, perm=[0, 2, 1, 3]), graph.integers(0, 0, -1))


def _whole(graph: OnnxGraph, lengths: str) -> str:
    """Return float[B, 1] as int64[B, 1, 1, 1], rounded towards 0."""
    return graph.reshape(graph.node("Cast", lengths, to=7), 1, 1, 1)


_LAYERS: Mapping[str, Callable[..., list[str]]] = {
    "add": emit_add,
    "attention_scores": emit_attention_scores,
    "attention_values": emit_attention_values,
    "batch_norm": emit_batch_norm,
    "concat": emit_concat,
    "dropout": emit_identity,
    "elementwise_multiply": emit_elementwise_multiply,
    "elu": emit_elu,
    "fm_order2": emit_fm_order2,
    "fused_inner_product": emit_fused_inner_product,
    "fused_reshape_concat": emit_fused_reshape_concat,
    "fused_reshape_concat_general": emit_fused_reshape_concat_general,
    "gather": emit_gather,
    "group_dense": emit_mlp,
    "gru": emit_gru,
    "inner_product": emit_inner_product,
    "interaction": emit_interaction,
    "layer_norm": emit_layer_norm,
    "matrix_multiply": emit_matrix_multiply,
    "mlp": emit_mlp,
    "multi_cross": emit_multi_cross,
    "multi_head_attention": emit_multi_head_attention,
    "prelu_dice": emit_prelu_dice,
    "reduce_mean": emit_reduce_mean,
    "reduce_sum": emit_reduce_sum,
    "relu": emit_relu,
    "reshape": emit_reshape,
    "scale": emit_scale,
    "select": emit_select,
    "sequence_mask": emit_sequence_mask,
    "sigmoid": emit_sigmoid,
    "slice": emit_slices,
    "softmax": emit_softmax,
    "sub": emit_sub,
    "weight_multiply": emit_weight_multiply,
}
_LOSSES: Mapping[str, Callable[..., list[str]]] = {
    "binary_cross_entropy": emit_sigmoid,
    "cross_entropy": emit_class_probabilities,
    "multi_cross_entropy": emit_sigmoid,
}
EXPORTED_KINDS = MappingProxyType({**_LAYERS, **_LOSSES})
"""Kinds of `terarec.nn.registry.LAYERS` that ONNX files can hold; a loss is there as the prediction that it makes."""


def emit(graph: OnnxGraph, kind: str, layer: Layer, bottoms: list[str]) -> list[str]:
    """Add `layer` to `graph` and return the names of its outputs; a loss gets its logits alone and gives predictions.

    Raises:
        ConfigError: A kind that cannot be exported.
    """
    if kind not in EXPORTED_KINDS:
        raise ConfigError(f"layer {kind}", f"has no form in ONNX files, expected one of {', '.join(EXPORTED_KINDS)}")
    return EXPORTED_KINDS[kind](graph, layer, *bottoms)
