# SPDX-License-Identifier: Apache-2.0
"""What holds for every kind of layer: options, mixed precision, inputs left alone, export, weights of files."""

from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.nn import LAYERS, Layer, TensorShape, build_layer
from terarec.nn.layer import WeightedLayer
from terarec.spec.checks import REQUIRED
from tests.errors import at
from tests.nn.formula import generator
from tests.params import in_every_run

B = 6
# Of every kind: the shapes of its inputs without the batch, and options that it needs.
EXAMPLES: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "inner_product": ([(3, 4)], {"num_output": 5}),
    "fused_inner_product": ([(4,)], {"num_output": 5}),
    "mlp": ([(4,)], {"num_outputs": [5, 2], "biases": [True, False]}),
    "group_dense": ([(4,)], {"num_outputs": [5, 2]}),
    "multi_cross": ([(4,)], {"num_layers": 2}),
    "weight_multiply": ([(4,)], {"weight_dims": [4, 3]}),
    "batch_norm": ([(4,)], {}),
    "layer_norm": ([(3, 4)], {}),
    "gru": ([(6,)], {"num_output": 4, "sequence_length": 3, "vector_size": 2}),
    "interaction": ([(4,), (3, 4)], {}),
    "fm_order2": ([(12,)], {"out_dim": 4}),
    "multi_head_attention": ([(2, 4), (3, 4), (3, 4), (1, 2, 3)], {"num_attention_heads": 2}),
    "attention_scores": ([(3, 4)] * 3, {"num_attention_heads": 2}),
    "attention_values": ([(2, 3, 3), (2, 3, 4)], {}),
    "sequence_mask": ([(1,), (1,)], {"max_sequence_len_from": 3, "max_sequence_len_to": 2}),
    "relu": ([(4,)], {}),
    "sigmoid": ([(4,)], {}),
    "elu": ([(4,)], {}),
    "prelu_dice": ([(4,)], {}),
    "softmax": ([(3, 4), (3, 4)], {}),
    "dropout": ([(4,)], {}),
    "add": ([(4,)] * 3, {}),
    "sub": ([(4,)] * 2, {}),
    "elementwise_multiply": ([(4,)] * 3, {}),
    "matrix_multiply": ([(2, 3), (3, 4)], {}),
    "reduce_sum": ([(3, 4)], {"axis": 2}),
    "reduce_mean": ([(3, 4)], {"axis": 1}),
    "concat": ([(3, 4), (2, 4)], {"axis": 1}),
    "reshape": ([(3, 4)], {"leading_dim": 2, "time_step": 3}),
    "slice": ([(4,)], {"ranges": [[0, 1], [1, 4]]}),
    "select": ([(3, 4)], {"dim": 1, "index": [2, 0]}),
    "gather": ([(4,)], {"indices": [5, 0, 2, 2, 1, 0]}),
    "scale": ([(4,)], {"factor": 3}),
    "fused_reshape_concat": ([(3, 4), (3, 2)], {}),
    "fused_reshape_concat_general": ([(3, 4), (3, 2)], {}),
    "cast": ([(4,)], {}),
    "binary_cross_entropy": ([(1,), (1,)], {}),
    "cross_entropy": ([(2,), (1,)], {}),
    "multi_cross_entropy": ([(3,), (3,)], {"target_weights": [1.0, 2.0, 3.0]}),
}
KINDS = sorted(LAYERS)
HAS_NO_GRADIENT = {"sequence_mask"}


def example(kind: str) -> tuple[Layer, list[Tensor]]:
    dims, options = EXAMPLES[kind]
    layer = build_layer(kind, [TensorShape(1, each) for each in dims], options, generator=generator())
    source = generator(1)
    inputs = [torch.rand(B, *each, generator=source) for each in dims]
    return layer, inputs


def flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(LAYERS)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_declared_shapes_and_inputs_stay_as_they_were(kind: str) -> None:
    layer, inputs = example(kind)
    before = [value.clone() for value in inputs]
    leaves = [value.requires_grad_() for value in inputs]
    outputs = flat(layer(*leaves))
    if LAYERS[kind].is_loss:
        assert layer.output_shapes == ()
        assert outputs[0].shape == ()
    else:
        assert [tuple(out.shape) for out in outputs] == [(B * s.rows, *s.dims) for s in layer.output_shapes]
    if kind not in HAS_NO_GRADIENT:
        sum(out.float().square().sum() for out in outputs).backward()  # type: ignore[union-attr]
        assert leaves[0].grad is not None
    for value, was in zip(inputs, before, strict=True):
        assert torch.equal(value, was)


@pytest.mark.parametrize("narrow_type", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_trains(kind: str, narrow_type: torch.dtype) -> None:
    """Under autocast the numbers are near those in float32, and float32 weights get float32 gradients."""
    layer, inputs = example(kind)
    torch.manual_seed(0)
    expected = flat(layer(*inputs))
    leaves = [value.clone().requires_grad_() for value in inputs]
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=narrow_type):
        got = flat(layer(*leaves))
        narrow = [value.to(narrow_type) for value in leaves[:1]] + leaves[1:]
        from_narrow = flat(layer(*narrow))
    for out, wanted in zip([*got, *from_narrow], [*expected, *expected], strict=True):
        if kind != "dropout":
            torch.testing.assert_close(out.float(), wanted, rtol=0.06, atol=0.06)
    if kind not in HAS_NO_GRADIENT:
        sum(out.float().square().sum() for out in got).backward()  # type: ignore[union-attr]
    for weight in layer.parameters():
        assert not weight.requires_grad or (weight.grad is not None and weight.grad.dtype == torch.float32)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"interaction"}))  # it needs autocast, which "meta" lacks
def test_a_layer_is_whole_where_it_is_moved(kind: str) -> None:
    """On "meta", a tensor that stayed behind meets those that moved, which no operator of torch allows."""
    layer, inputs = example(kind)
    outputs = flat(layer.to("meta")(*(value.to("meta") for value in inputs)))
    assert {out.device.type for out in outputs} == {"meta"}


OF_EVERY_FORM = ["batch_norm", "concat", "gather", "gru", "interaction", "mlp", "multi_head_attention", "sequence_mask"]


@pytest.mark.parametrize("kind", in_every_run(OF_EVERY_FORM, KINDS))
def test_an_exported_layer_gives_the_same_numbers(kind: str) -> None:
    layer, inputs = example(kind)
    layer.eval()
    dims = None if kind == "gather" else tuple({0: torch.export.Dim("batch", min=2)} for _ in inputs)
    shapes = None if dims is None else dict.fromkeys(("inputs",), dims) if takes_many(layer) else dims
    program = torch.export.export(layer, tuple(inputs), dynamic_shapes=shapes)
    others = inputs if dims is None else [torch.cat([value, value[:3]]) for value in inputs]
    for out, wanted in zip(flat(program.module()(*others)), flat(layer(*others)), strict=True):
        torch.testing.assert_close(out, wanted)


def takes_many(layer: Layer) -> bool:
    return layer.BOTTOMS[1] is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if LAYERS[kind].has_weights])
def test_weights_come_from_the_generator_and_travel_through_files(kind: str) -> None:
    layer, inputs = example(kind)
    torch.manual_seed(77)
    twin, _ = example(kind)
    assert isinstance(layer, WeightedLayer)
    assert isinstance(twin, WeightedLayer)
    for one, other in zip(layer.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    learned = {id(weight) for weight in layer.parameters() if weight.requires_grad}
    assert learned <= {id(entry.tensor) for entry in layer.file_tensors()}
    values = [torch.randn(weight.shape) for weight in layer.file_parameters()]
    layer.set_file_parameters(values)
    for got, value in zip(layer.file_parameters(), values, strict=True):
        assert torch.equal(got, value)
    twin.load_state_dict(layer.state_dict())
    layer.eval()
    twin.eval()
    assert torch.equal(flat(layer(*inputs))[0], flat(twin(*inputs))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_options_name_the_kind_the_option_and_what_is_accepted(kind: str) -> None:
    dims, options = EXAMPLES[kind]
    shapes = [TensorShape(1, each) for each in dims]
    with pytest.raises(ConfigError, check=at(f"layer {kind}", "there is no option 'colour'")):
        build_layer(kind, shapes, {**options, "colour": 1}, generator=generator())
    for option in LAYERS[kind].options:
        with pytest.raises(ConfigError, check=at(f"layer {kind}", f"{option.name} is <object")):
            build_layer(kind, shapes, {**options, option.name: object()}, generator=generator())
        if option.default is REQUIRED:
            rest = {name: value for name, value in options.items() if name != option.name}
            with pytest.raises(ConfigError, check=at(f"layer {kind}", f"{option.name} is missing, expected")):
                build_layer(kind, shapes, rest, generator=generator())
        else:
            assert option.value(kind, option.default) == option.default
    with pytest.raises(ConfigError, check=at(f"layer {kind}", "inputs ")):
        build_layer(kind, shapes * 9 if LAYERS[kind].module.BOTTOMS[1] else [], options, generator=generator())


def test_an_unknown_kind_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, check=at("layer")):
        build_layer("inner_produkt", [], {}, generator=generator())


def test_a_shape_prints_as_it_is_written() -> None:
    assert str(TensorShape(1, (26, 16))) == "[B, 26, 16]"
    assert str(TensorShape(3, ())) == "[3*B]"
    assert TensorShape(3, (2, 5)).numel == 30
