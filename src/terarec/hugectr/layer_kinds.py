"""HugeCTR's dense layers as terarec's: the kind of each, and where its options come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terarec.hugectr.enums import Activation_t, FcPosition_t, Initializer_t, Layer_t, Regularizer_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.objects import DenseLayer, GroupDenseLayer
from terarec.nn.registry import LAYERS
from terarec.spec import GraphLayer

KINDS = {
    Layer_t.BatchNorm: "batch_norm",
    Layer_t.LayerNorm: "layer_norm",
    Layer_t.BinaryCrossEntropyLoss: "binary_cross_entropy",
    Layer_t.Reshape: "reshape",
    Layer_t.Select: "select",
    Layer_t.Concat: "concat",
    Layer_t.CrossEntropyLoss: "cross_entropy",
    Layer_t.Dropout: "dropout",
    Layer_t.ElementwiseMultiply: "elementwise_multiply",
    Layer_t.ELU: "elu",
    Layer_t.InnerProduct: "inner_product",
    Layer_t.FusedInnerProduct: "fused_inner_product",
    Layer_t.MLP: "mlp",
    Layer_t.Interaction: "interaction",
    Layer_t.MultiCrossEntropyLoss: "multi_cross_entropy",
    Layer_t.ReLU: "relu",
    Layer_t.ReLUHalf: "relu",
    Layer_t.Sigmoid: "sigmoid",
    Layer_t.Slice: "slice",
    Layer_t.WeightMultiply: "weight_multiply",
    Layer_t.FmOrder2: "fm_order2",
    Layer_t.Add: "add",
    Layer_t.ReduceSum: "reduce_sum",
    Layer_t.Softmax: "softmax",
    Layer_t.Gather: "gather",
    Layer_t.PReLU_Dice: "prelu_dice",
    Layer_t.GRU: "gru",
    Layer_t.MatrixMultiply: "matrix_multiply",
    Layer_t.MultiHeadAttention: "multi_head_attention",
    Layer_t.Scale: "scale",
    Layer_t.FusedReshapeConcat: "fused_reshape_concat",
    Layer_t.FusedReshapeConcatGeneral: "fused_reshape_concat_general",
    Layer_t.Sub: "sub",
    Layer_t.ReduceMean: "reduce_mean",
    Layer_t.MultiCross: "multi_cross",
    Layer_t.Cast: "cast",
    Layer_t.SequenceMask: "sequence_mask",
}
"""Every layer's kind in `terarec.nn.registry`."""

LOSSES = (Layer_t.BinaryCrossEntropyLoss, Layer_t.CrossEntropyLoss, Layer_t.MultiCrossEntropyLoss)

SOURCES = {
    "weight_init": "weight_init_type",
    "bias_init": "bias_init_type",
    "gamma_init": "gamma_init_type",
    "beta_init": "beta_init_type",
    "activation": "act_type",
    "alpha": "elu_alpha",
    "rate": "dropout_rate",
    "target_weights": "target_weight_vec",
    "regularizer": "regularizer_type",
    "strength": "lambda",
    "sequence_length": "SeqLength",
}
"""The options whose parameter of `DenseLayer` has another name."""

_MEMBERS = {
    Initializer_t.Default: "default",
    Initializer_t.Uniform: "uniform",
    Initializer_t.XavierNorm: "xavier_norm",
    Initializer_t.XavierUniform: "xavier_uniform",
    Initializer_t.Zero: "zero",
    Activation_t.Relu: "relu",
    Activation_t.Non: "none",
    Regularizer_t.L1: "l1",
    Regularizer_t.L2: "l2",
}

# A second tensor of these carries gradients between kernels of a GPU; it is neither made nor read here.
_HAS_SCRATCH = {Layer_t.FusedInnerProduct, Layer_t.MLP, Layer_t.Interaction}


def graph_layer(layer: DenseLayer) -> GraphLayer:
    """A `DenseLayer` as a layer of a graph."""
    kind = _kind_of(layer)
    bottoms, tops = list(layer.bottom_names), list(layer.top_names)
    if layer.layer_type in _HAS_SCRATCH:
        tops = tops[:1]
        bottoms = bottoms if layer.layer_type is Layer_t.Interaction else bottoms[:1]
    given = layer.values()
    options = {
        option.name: _native(given[SOURCES.get(option.name, option.name)])
        for option in LAYERS[kind].options
        if SOURCES.get(option.name, option.name) in given
    }
    if layer.layer_type is Layer_t.MLP:
        options |= _mlp_options(layer)
    if layer.layer_type is Layer_t.Scale:
        options["factor"] = _whole_factor(layer)
    if layer.layer_type in LOSSES and not layer.use_regularizer:
        options |= {"regularizer": "none", "strength": 0.0}
    return GraphLayer(kind=kind, bottoms=tuple(bottoms), tops=tuple(tops), options=options)


def _kind_of(layer: DenseLayer) -> str:
    """The kind of `layer`; 4.3 has attention in two layers with a Softmax between, told by the numbers of tensors."""
    numbers = len(layer.bottom_names), len(layer.top_names)
    if layer.layer_type is Layer_t.MultiHeadAttention and numbers in {(3, 2), (2, 1)}:
        return "attention_values" if numbers == (2, 1) and not layer.transpose_b else "attention_scores"
    return KINDS[layer.layer_type]


def _mlp_options(layer: DenseLayer) -> dict[str, Any]:
    """Widths, activations and biases for each layer, where the script may have named one for all."""
    widths = layer.num_outputs or [layer.num_output]
    return {
        "num_outputs": tuple(widths),
        "activations": _native(layer.activations or [layer.act_type] * len(widths)),
        "biases": tuple(layer.biases or [layer.use_bias] * len(widths)),
    }


def _whole_factor(layer: DenseLayer) -> int:
    if not float(layer.factor).is_integer():
        raise WrongInputError(f"Scale {layer.top_names}: factor: got {layer.factor}, expected a whole number of copies")
    return int(layer.factor)


def fused_layers(group: GroupDenseLayer) -> list[DenseLayer]:
    """The layers that a `GroupDenseLayer` stands for: all have ReLU, the last one what it names.

    Between them go tensors that carry gradients between kernels of a GPU, under HugeCTR's names.
    """
    tops = list(group.top_name_list)
    inside = [[top, *(f"{top}_{suffix}" for suffix in ("mask", "dRelu", "db"))] for top in tops[:-1]]
    ends = [list(group.bottom_name_list), *inside, tops[-1:]]
    last = len(tops) - 1
    return [
        DenseLayer(
            Layer_t.FusedInnerProduct,
            ends[number],
            ends[number + 1],
            num_output=width,
            pos_type=FcPosition_t.Head if not number else FcPosition_t.Tail if number == last else FcPosition_t.Body,
            act_type=group.last_act_type if number == last else Activation_t.Relu,
        )
        for number, width in enumerate(group.num_outputs)
    ]


def _native(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_native(item) for item in value)
    return _MEMBERS.get(value, value) if isinstance(value, (Initializer_t, Activation_t, Regularizer_t)) else value
