"""The layers that can be exported: kind -> (graph, layer, names of the bottoms) -> names of the tops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from terarec.errors import ConfigError
from terarec.export import attention, dense, shaping
from terarec.export.onnx_graph import OnnxGraph
from terarec.nn.layer import Layer

_LAYERS: Mapping[str, Callable[..., list[str]]] = {
    "add": shaping.add,
    "attention_scores": attention.attention_scores,
    "attention_values": attention.attention_values,
    "batch_norm": dense.batch_norm,
    "concat": shaping.concat,
    "dropout": shaping.identity,
    "elementwise_multiply": shaping.elementwise_multiply,
    "elu": shaping.elu,
    "fm_order2": dense.fm_order2,
    "fused_inner_product": dense.fused_inner_product,
    "fused_reshape_concat": shaping.fused_reshape_concat,
    "fused_reshape_concat_general": shaping.fused_reshape_concat_general,
    "gather": shaping.gather,
    "group_dense": dense.mlp,
    "gru": dense.gru,
    "inner_product": dense.inner_product,
    "interaction": dense.interaction,
    "layer_norm": dense.layer_norm,
    "matrix_multiply": shaping.matrix_multiply,
    "mlp": dense.mlp,
    "multi_cross": dense.multi_cross,
    "multi_head_attention": attention.multi_head_attention,
    "prelu_dice": dense.prelu_dice,
    "reduce_mean": shaping.reduce_mean,
    "reduce_sum": shaping.reduce_sum,
    "relu": shaping.relu,
    "reshape": shaping.reshape,
    "scale": shaping.scale,
    "select": shaping.select,
    "sequence_mask": attention.sequence_mask,
    "sigmoid": shaping.sigmoid,
    "slice": shaping.slices,
    "softmax": attention.softmax,
    "sub": shaping.sub,
    "weight_multiply": dense.weight_multiply,
}
_LOSSES: Mapping[str, Callable[..., list[str]]] = {
    "binary_cross_entropy": shaping.sigmoid,
    "cross_entropy": shaping.class_probabilities,
    "multi_cross_entropy": shaping.sigmoid,
}
EXPORTED_KINDS = MappingProxyType({**_LAYERS, **_LOSSES})
"""Kinds of `terarec.nn.registry.LAYERS` that ONNX files can hold; a loss is there as the prediction that it makes."""


def emit(graph: OnnxGraph, kind: str, layer: Layer, bottoms: list[str]) -> list[str]:
    """Add `layer` to `graph` and return the names of its outputs; a loss gets its logits alone and gives predictions.

    Raises:
        ConfigError: a kind that cannot be exported.
    """
    if kind not in EXPORTED_KINDS:
        raise ConfigError(f"layer {kind}: has no form in ONNX files, expected one of {', '.join(EXPORTED_KINDS)}")
    return EXPORTED_KINDS[kind](graph, layer, *bottoms)
