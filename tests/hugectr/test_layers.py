# SPDX-License-Identifier: Apache-2.0
"""Every `Layer_t` reaches its kind of layer with its options, in the spellings of every release; misuse is reported."""

from typing import Any

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.errors import ConfigError
from terarec.hugectr.errors import HugeCTRError
from terarec.hugectr.layers import fused_layers, graph_layer, layer_formats
from terarec.nn import TensorShape, build_layer
from tests.errors import at
from tests.hugectr.scripts import Layer, embed, layer, model, to_loss

Init, Act = hugectr.Initializer_t, hugectr.Activation_t
Dims = tuple[int, ...]
# Layer_t -> parameters of DenseLayer, dimensions of the bottoms, kind, options that differ from its defaults, the tops.
CASES: list[tuple[str, dict[str, Any], list[Dims], str, dict[str, Any], list[tuple[int, Dims]]]] = [
    ("BatchNorm", {"factor": 0.5, "eps": 1e-3}, [(4,)], "batch_norm", {"factor": 0.5, "eps": 1e-3}, [(1, (4,))]),
    ("BatchNorm", {"gamma_init_type": Init.Zero}, [(4,)], "batch_norm", {"gamma_init": "zero"}, [(1, (4,))]),
    ("LayerNorm", {"eps": 1e-9}, [(3, 4)], "layer_norm", {"eps": 1e-9}, [(1, (3, 4))]),
    ("Reshape", {"leading_dim": 6}, [(3, 4)], "reshape", {"leading_dim": 6}, [(2, (6,))]),
    (
        "Reshape",
        {"leading_dim": 4, "time_step": 3},
        [(12,)],
        "reshape",
        {"leading_dim": 4, "time_step": 3},
        [(1, (3, 4))],
    ),
    (
        "Reshape",
        {"selected": True, "selected_slots": [2, 0]},
        [(3, 4)],
        "reshape",
        {"selected": True, "selected_slots": (2, 0)},
        [(1, (8,))],
    ),
    ("Reshape", {"shape": [-1, 6]}, [(3, 4)], "reshape", {"shape": (-1, 6)}, [(2, (6,))]),
    ("Select", {"dim": 1, "index": [2, 0]}, [(3, 4)], "select", {"dim": 1, "index": (2, 0)}, [(1, (2, 4))]),
    ("Concat", {}, [(3,), (4,)], "concat", {}, [(1, (7,))]),
    ("Concat", {"axis": 2}, [(3, 1), (3, 4)], "concat", {"axis": 2}, [(1, (3, 5))]),
    ("Dropout", {"dropout_rate": 0.1}, [(4,)], "dropout", {"rate": 0.1}, [(1, (4,))]),
    ("ElementwiseMultiply", {}, [(4,), (4,), (4,)], "elementwise_multiply", {}, [(1, (4,))]),
    ("ELU", {"elu_alpha": 0.3}, [(4,)], "elu", {"alpha": 0.3}, [(1, (4,))]),
    (
        "InnerProduct",
        {"num_output": 5, "weight_init_type": Init.XavierUniform, "bias_init_type": Init.Zero},
        [(3, 4)],
        "inner_product",
        {"num_output": 5, "weight_init": "xavier_uniform", "bias_init": "zero"},
        [(1, (3, 5))],
    ),
    (
        "FusedInnerProduct",
        {"num_output": 5, "act_type": Act.Non},
        [(4,)],
        "fused_inner_product",
        {"num_output": 5, "activation": "none"},
        [(1, (5,))],
    ),
    (
        "MLP",
        {"num_outputs": [5, 2], "act_type": Act.Non, "use_bias": False},
        [(4,)],
        "mlp",
        {"num_outputs": (5, 2), "activations": ("none",) * 2, "biases": (False,) * 2},
        [(1, (2,))],
    ),
    (
        "MLP",
        {"num_outputs": [5, 2], "activations": [Act.Relu, Act.Non], "biases": [True, False]},
        [(4,)],
        "mlp",
        {"num_outputs": (5, 2), "activations": ("relu", "none"), "biases": (True, False)},
        [(1, (2,))],
    ),
    (
        "MLP",
        {"num_output": 3},
        [(4,)],
        "mlp",
        {"num_outputs": (3,), "activations": ("relu",), "biases": (True,)},
        [(1, (3,))],
    ),
    ("Interaction", {}, [(4,), (3, 4)], "interaction", {}, [(1, (4 + 6 + 1,))]),
    ("ReLU", {}, [(4,)], "relu", {}, [(1, (4,))]),
    ("ReLUHalf", {}, [(4,)], "relu", {}, [(1, (4,))]),
    ("Sigmoid", {}, [(4,)], "sigmoid", {}, [(1, (4,))]),
    ("Slice", {"ranges": [(0, 3), (1, 4)]}, [(4,)], "slice", {"ranges": ((0, 3), (1, 4))}, [(1, (3,)), (1, (3,))]),
    ("WeightMultiply", {"weight_dims": [4, 3]}, [(4,)], "weight_multiply", {"weight_dims": (4, 3)}, [(1, (12,))]),
    ("FmOrder2", {"out_dim": 4}, [(12,)], "fm_order2", {"out_dim": 4}, [(1, (4,))]),
    ("Add", {}, [(4,), (4,)], "add", {}, [(1, (4,))]),
    ("Sub", {}, [(4,), (4,)], "sub", {}, [(1, (4,))]),
    ("ReduceSum", {"axis": 2}, [(3, 4)], "reduce_sum", {"axis": 2}, [(1, (3, 1))]),
    ("ReduceMean", {}, [(3, 4)], "reduce_mean", {}, [(1, (1, 4))]),
    ("Softmax", {"factor": 0.5}, [(3, 4), (3, 4)], "softmax", {"factor": 0.5}, [(1, (3, 4))]),
    ("Gather", {"indices": [1, 0]}, [(4,)], "gather", {"indices": (1, 0)}, [(1, (4,))]),
    ("PReLU_Dice", {"elu_alpha": 0.2, "eps": 1e-8}, [(4,)], "prelu_dice", {"alpha": 0.2, "eps": 1e-8}, [(1, (4,))]),
    (
        "GRU",
        {"num_output": 5, "batchsize": 7, "SeqLength": 3, "vector_size": 4},
        [(12,)],
        "gru",
        {"num_output": 5, "sequence_length": 3, "vector_size": 4},
        [(3, (5,))],
    ),
    ("MatrixMultiply", {}, [(2, 3), (3, 4)], "matrix_multiply", {}, [(1, (2, 4))]),
    (
        "MatrixMultiply",
        {"transpose_b": True},
        [(2, 3), (4, 3)],
        "matrix_multiply",
        {"transpose_b": True},
        [(1, (2, 4))],
    ),
    (
        "MultiHeadAttention",
        {"num_attention_heads": 2},
        [(3, 4)] * 3,
        "multi_head_attention",
        {"num_attention_heads": 2},
        [(1, (3, 4))],
    ),
    (
        "MultiHeadAttention",
        {"num_attention_heads": 2},
        [(3, 4)] * 3 + [(1, 3, 3)],
        "multi_head_attention",
        {"num_attention_heads": 2},
        [(1, (3, 4))],
    ),
    (
        "MultiHeadAttention",
        {"num_attention_heads": 2, "transpose_b": True},
        [(3, 4)] * 3,
        "attention_scores",
        {"num_attention_heads": 2},
        [(1, (2, 3, 3)), (1, (2, 3, 2))],
    ),
    ("MultiHeadAttention", {"transpose_b": True}, [(2, 3, 4)] * 2, "attention_scores", {}, [(1, (2, 3, 3))]),
    ("MultiHeadAttention", {}, [(2, 3, 3), (2, 3, 4)], "attention_values", {}, [(1, (3, 8))]),
    ("Scale", {"axis": 0, "factor": 3}, [(4,)], "scale", {"axis": 0, "factor": 3}, [(1, (12,))]),
    (
        "Scale",
        {"factor": 3, "first_copy_gradient": True},
        [(4,)],
        "scale",
        {"factor": 3, "first_copy_gradient": True},
        [(3, (4,))],
    ),
    ("FusedReshapeConcat", {}, [(3, 4), (3, 2)], "fused_reshape_concat", {}, [(2, (6,)), (1, (6,))]),
    ("FusedReshapeConcatGeneral", {}, [(3, 4), (3, 2)], "fused_reshape_concat_general", {}, [(3, (6,))]),
    ("MultiCross", {"num_layers": 2}, [(4,)], "multi_cross", {"num_layers": 2}, [(1, (4,))]),
    (
        "MultiCross",
        {"num_layers": 2, "projection_dim": 3},
        [(4,)],
        "multi_cross",
        {"num_layers": 2, "projection_dim": 3},
        [(1, (4,))],
    ),
    ("Cast", {}, [(4,)], "cast", {}, [(1, (4,))]),
    (
        "SequenceMask",
        {"max_sequence_len_from": 3, "max_sequence_len_to": 2},
        [(1,), (1,)],
        "sequence_mask",
        {"max_sequence_len_from": 3, "max_sequence_len_to": 2},
        [(1, (1, 3, 2))],
    ),
    (
        "SequenceMask",
        {"max_sequence_len": 3},
        [(1,)],
        "sequence_mask",
        {"max_sequence_len_from": 3, "max_sequence_len_to": 3},
        [(1, (1, 1, 3))],
    ),
    ("BinaryCrossEntropyLoss", {}, [(1,), (1,)], "binary_cross_entropy", {}, []),
    (
        "BinaryCrossEntropyLoss",
        {"use_regularizer": True, "regularizer_type": hugectr.Regularizer_t.L2, "lambda": 0.1},
        [(1,), (1,)],
        "binary_cross_entropy",
        {"regularizer": "l2", "strength": 0.1},
        [],
    ),
    ("CrossEntropyLoss", {"lambda": 0.1}, [(2,), (1,)], "cross_entropy", {}, []),
    (
        "MultiCrossEntropyLoss",
        {"target_weight_vec": [0.5, 1.0]},
        [(2,), (2,)],
        "multi_cross_entropy",
        {"target_weights": (0.5, 1.0)},
        [],
    ),
]


@pytest.mark.parametrize(("name", "parameters", "dims", "kind", "options", "tops"), CASES)
def test_a_layer_reaches_its_kind(
    name: str,
    parameters: dict[str, Any],
    dims: list[Dims],
    kind: str,
    options: dict[str, Any],
    tops: list[tuple[int, Dims]],
) -> None:
    bottoms = [f"in{place}" for place in range(len(dims))]
    names = [f"out{place}" for place in range(max(1, len(tops)))]
    made = graph_layer(hugectr.DenseLayer(getattr(Layer, name), bottoms, names, **parameters))
    assert (made.kind, list(made.bottoms), list(made.tops)) == (kind, bottoms, names)
    shapes = [TensorShape(1, each) for each in dims]
    generator = torch.Generator()
    built = build_layer(kind, shapes, made.options, generator=generator.manual_seed(1))
    twin = build_layer(kind, shapes, options, generator=generator.manual_seed(1))
    assert built.output_shapes == tuple(TensorShape(rows, each) for rows, each in tops)
    mine, other = (
        {name: value for name, value in vars(each).items() if not name.startswith("_")} for each in (built, twin)
    )
    assert mine == other
    for one, two in zip(built.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dims", [(2, 3, 4), (3, 8)])
def test_attention_up_to_4_2_is_a_product_without_a_scale(dims: Dims) -> None:
    """Of queries and keys by head, or with the heads side by side: HugeCTR's alpha is 1 there."""
    given = hugectr.DenseLayer(Layer.MultiHeadAttention, ["query", "key"], ["scores"], num_attention_heads=2)
    made = graph_layer(given, (4, 2))
    built = build_layer(made.kind, [TensorShape(1, dims)] * 2, made.options, generator=torch.Generator())
    assert built.output_shapes == (TensorShape(1, (2, 3, 3)),)
    query, key = torch.randn(2, 5, *dims, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).numpy()
    q, k = (x if x.ndim == 4 else np.stack([x[..., :4], x[..., 4:]], 1) for x in (query, key))
    found = built(torch.from_numpy(query), torch.from_numpy(key))
    np.testing.assert_allclose(found.numpy(), np.einsum("bhfd,bhtd->bhft", q, k), rtol=1e-12)


def test_every_member_is_there() -> None:
    assert {name for name, *_ in CASES} == set(Layer.__members__) == {member.name for member in layer_formats()}


def test_old_spellings_are_the_same_layers() -> None:
    old = graph_layer(hugectr.DenseLayer(Layer.Multiply, ["a"], ["b"], weight_dims=[2, 3]))
    assert old == graph_layer(hugectr.DenseLayer(Layer.WeightMultiply, ["a"], ["b"], weight_dims=[2, 3]))
    assert graph_layer(hugectr.DenseLayer(Layer.DotProduct, ["a", "b"], ["c"])).kind == "elementwise_multiply"


def test_tensors_between_kernels_are_left_out() -> None:
    head = hugectr.DenseLayer(Layer.FusedInnerProduct, ["x"], ["y", "y1", "y2", "y3"], num_output=3)
    body = hugectr.DenseLayer(Layer.FusedInnerProduct, ["y", "y1", "y2", "y3"], ["z"], num_output=3)
    crossed = hugectr.DenseLayer(Layer.Interaction, ["z", "e"], ["i", "i_grad"])
    top = hugectr.DenseLayer(Layer.MLP, ["i", "i_grad"], ["t"], num_outputs=[4])
    ends = [(made.bottoms, made.tops) for made in map(graph_layer, (head, body, crossed, top))]
    assert ends == [(("x",), ("y",)), (("y",), ("z",)), (("z", "e"), ("i",)), (("i",), ("t",))]


def test_a_group_is_a_chain() -> None:
    made = fused_layers(
        hugectr.GroupDenseLayer(
            group_layer_type=hugectr.GroupLayer_t.GroupFusedInnerProduct,
            bottom_name_list=["x", "x_grad"],
            top_name_list=["a", "b", "c"],
            num_outputs=[4, 2, 1],
            last_act_type=Act.Non,
        )
    )
    between = [[name, f"{name}_mask", f"{name}_dRelu", f"{name}_db"] for name in ("a", "b")]
    assert [one.bottom_names for one in made] == [["x", "x_grad"], *between]
    assert [one.top_names for one in made] == [*between, ["c"]]
    assert [one.pos_type.name for one in made] == ["Head", "Body", "Tail"]
    assert [(one.num_output, one.act_type) for one in made] == [(4, Act.Relu), (2, Act.Relu), (1, Act.Non)]


WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("InnerProduct", "embedding", {"num_output": 0}, ("DenseLayer: num_output",)),
    ("Slice", "dense", {"ranges": [(0, 4)]}, ("compile: layer 'wrong' (bottoms dense): layer slice",)),
    (
        "Reshape",
        "embedding",
        {"leading_dim": 7},
        ("compile: layer 'wrong' (bottoms embedding): layer reshape", "inputs [B, 4, 8]"),
    ),
    (
        "Reshape",
        "embedding",
        {},
        ("compile: layer 'wrong' (bottoms embedding): layer reshape", "exactly one of leading_dim, selected and shape"),
    ),
    ("Concat", "embedding dense", {}, ("compile: layer 'wrong' (bottoms embedding, dense): layer concat",)),
    ("Add", "dense", {}, ("compile: layer 'wrong' (bottoms dense): layer add",)),
    ("Scale", "dense", {"factor": 1.5}, ("Scale ['wrong']: factor",)),
    ("FmOrder2", "dense", {}, ("compile: layer 'wrong' (bottoms dense): layer fm_order2",)),
    ("MultiCross", "dense", {}, ("compile: layer 'wrong' (bottoms dense): layer multi_cross",)),
    (
        "WeightMultiply",
        "dense",
        {"weight_dims": [4, 2]},
        ("compile: layer 'wrong' (bottoms dense): layer weight_multiply",),
    ),
    ("Dropout", "dense", {"dropout_rate": 1.0}, ("DenseLayer: dropout_rate",)),
    ("Interaction", "dense embedding", {}, ("compile: layer 'wrong' (bottoms dense, embedding): layer interaction",)),
    ("MLP", "dense", {"num_outputs": [4, 2], "biases": [True]}, ("compile: layer 'wrong' (bottoms dense): layer mlp",)),
]


def compile_with(made: Any, name: str, bottoms: str, parameters: dict[str, Any]) -> None:
    layer(made, getattr(Layer, name), bottoms, "wrong", **parameters)
    layer(made, Layer.InnerProduct, "dense", "fine", num_output=2)
    to_loss(made, "fine")


@pytest.mark.parametrize(("name", "bottoms", "parameters", "place"), WRONG)
def test_what_does_not_fit_is_rejected_with_its_shapes(
    planted: tuple[str, str, float], name: str, bottoms: str, parameters: dict[str, Any], place: tuple[str, ...]
) -> None:
    made = model(*planted[:2])
    embed(made, "embedding", 8)
    with pytest.raises((HugeCTRError, ConfigError), check=at(*place)):
        compile_with(made, name, bottoms, parameters)
