"""Attention, softmax and sequence masks in ONNX."""

from __future__ import annotations

from terarec.export.onnx_graph import OnnxGraph
from terarec.export.weights import indices
from terarec.nn.attention import AttentionScores, AttentionValues, MultiHeadAttention
from terarec.nn.sequence_mask import SequenceMask
from terarec.nn.softmax import Softmax


def softmax(graph: OnnxGraph, layer: Softmax, x: str, *mask: str) -> list[str]:
    """Over the last dimension."""
    if not mask:
        return [graph.node("Softmax", x, axis=-1)]
    return [_masked_softmax(graph, graph.node("Mul", x, graph.number(layer.factor)), *mask)]


def multi_head_attention(
    graph: OnnxGraph, layer: MultiHeadAttention, query: str, key: str, value: str, *mask: str
) -> list[str]:
    """Scores, their softmax, and the values that it weighs, head by head."""
    q, k, v = (_split_heads(graph, x, layer.num_heads) for x in (query, key, value))
    scores = _scores(graph, q, k)
    weights = _masked_softmax(graph, scores, *mask) if mask else graph.node("Softmax", scores, axis=-1)
    return [_join_heads(graph, graph.node("MatMul", weights, v))]


def attention_scores(graph: OnnxGraph, layer: AttentionScores, query: str, key: str, *value: str) -> list[str]:
    """Scores alone, and the values by head where there are any."""
    if not value:
        return [_scores(graph, query, key)]
    q, k, v = (_split_heads(graph, x, layer.num_heads) for x in (query, key, *value))
    return [_scores(graph, q, k), v]


def attention_values(graph: OnnxGraph, layer: AttentionValues, weights: str, value: str) -> list[str]:
    """Values weighed by softmaxed scores."""
    return [_join_heads(graph, graph.node("MatMul", weights, value))]


def sequence_mask(graph: OnnxGraph, layer: SequenceMask, *lengths: str) -> list[str]:
    """1 where all positions are below the lengths, of which there are one or two."""
    buffers = ["_from_positions", "_to_positions"][-len(lengths) :]
    inside = [
        graph.node("Less", indices(graph, layer.get_buffer(name)), _whole(graph, length))
        for name, length in zip(buffers, lengths, strict=True)
    ]
    both = inside[0] if len(inside) == 1 else graph.node("And", *inside)
    return [graph.node("Cast", both, to=1)]


def _masked_softmax(graph: OnnxGraph, x: str, mask: str) -> str:
    """As `terarec.nn.softmax.masked_softmax`."""
    outside = graph.node("Mul", graph.node("Sub", graph.number(1.0), mask), graph.number(10000.0))
    shifted = graph.node("Sub", x, outside)
    most = graph.node("ReduceMax", shifted, graph.integers(-1), keepdims=1)
    exponents = graph.node("Exp", graph.node("Sub", shifted, most))
    total = graph.node("ReduceSum", exponents, graph.integers(-1), keepdims=1)
    return graph.node("Div", exponents, graph.node("Add", total, graph.number(1e-6)))


def _scores(graph: OnnxGraph, query: str, key: str) -> str:
    """Q K^T / sqrt(d) for Q [B, h, from, d] and K [B, h, to, d]."""
    products = graph.node("MatMul", query, graph.node("Transpose", key, perm=[0, 1, 3, 2]))
    width = graph.node("Cast", graph.node("Shape", query, start=-1), to=1)
    return graph.node("Div", products, graph.node("Sqrt", width))


def _split_heads(graph: OnnxGraph, x: str, heads: int) -> str:
    """[B, seq, h*d] -> [B, h, seq, d]."""
    parts = graph.node("Reshape", x, graph.integers(0, 0, heads, -1))
    return graph.node("Transpose", parts, perm=[0, 2, 1, 3])


def _join_heads(graph: OnnxGraph, x: str) -> str:
    """[B, h, seq, d] -> [B, seq, h*d]."""
    return graph.node("Reshape", graph.node("Transpose", x, perm=[0, 2, 1, 3]), graph.integers(0, 0, -1))


def _whole(graph: OnnxGraph, lengths: str) -> str:
    """float[B, 1] -> int64[B, 1, 1, 1], rounded towards 0."""
    return graph.reshape(graph.node("Cast", lengths, to=7), 1, 1, 1)
