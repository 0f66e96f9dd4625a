# SPDX-License-Identifier: Apache-2.0
"""Products of fully connected layers by oneDNN against float64."""

import copy
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear as by_torch

from terarec.errors import KernelError
from terarec.kernels.cpu import dense as cpu
from terarec.kernels.cpu import host
from terarec.kernels.ref import dense as ref
from terarec.nn import MLP
from terarec.nn.dense import Linear
from terarec.ops.linear import linear, linear_relu
from terarec.ops.onednn import (
    choice_and_range,
    has_bfloat16,
    least_products,
    linear_choice,
    multiplies_weight_gradients,
)
from tests.errors import at
from tests.processes import run_new_python, run_python

LARGE = [(4096, 100, 16), (4096, 16, 100), (331, 211, 127), (127, 331, 211), (1, 2048, 2053), (100_003, 8, 8)]
"""Rows, columns of the input and of the output; each has more multiplications than oneDNN is taken for."""
SMALL = [(0, 400, 400), (1, 1, 1), (1, 400, 400), (7, 13, 5), (4096, 400, 1), (4096, 1, 2000), (0, 1, 7)]
ROUNDING = {"rtol": 1e-4, "atol": 1e-3}  # sums of 100,003 products of standard normal numbers


def draw(rows: int, in_width: int, width: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, in_width, generator=generator), torch.randn(width, in_width, generator=generator)
    return x, weight, torch.randn(width, generator=generator)


def with_gradients(product, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """The product, and the gradients of a sum of it with weights that differ from element to element."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    out = product(*inputs)
    grad = torch.arange(out.numel()).remainder(11).sub(5).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def is_onednn(out: Tensor) -> bool:
    return out.grad_fn is not None and out.grad_fn.name() == "_LinearBackward"


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "in_width", "width"), LARGE + SMALL)
@pytest.mark.usefixtures("onednn")
def test_product_and_gradients_equal_those_in_float64(rows: int, in_width: int, width: int, has_bias: bool) -> None:
    x, weight, bias = draw(rows, in_width, width)
    got = with_gradients(linear, x, weight, bias if has_bias else None)
    expected = with_gradients(by_torch, x.double(), weight.double(), bias.double() if has_bias else None)
    for mine, exact in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.double(), exact, **ROUNDING)
    weight.requires_grad_()
    assert is_onednn(linear(x, weight, bias)) == ((rows, in_width, width) in LARGE)


@pytest.mark.usefixtures("onednn")
def test_a_product_without_gradients_is_the_same() -> None:
    x, weight, bias = draw(331, 211, 127)
    expected = linear(x, weight.clone().requires_grad_(), bias)
    assert torch.equal(linear(x, weight, bias), expected)
    assert torch.equal(expected, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
    with torch.inference_mode():
        assert torch.equal(linear(x, weight, bias), expected)


@pytest.mark.usefixtures("onednn")
def test_other_layouts_in_memory() -> None:
    x, weight, bias = draw(331, 211, 127)
    exact = by_torch(x.double(), weight.double(), bias.double())
    columns = torch.randn(331, 422)
    columns[:, ::2] = x
    wide = torch.randn(331, 300)
    wide[:, :211] = x
    apart = torch.stack([bias, -bias], dim=1)[:, 0]
    layouts = [(columns[:, ::2], weight, bias), (wide[:, :211], weight, bias), (x.t().contiguous().t(), weight, bias)]
    layouts += [(x, weight.t().contiguous().t(), bias), (x, weight, apart)]
    for tensors in layouts:
        torch.testing.assert_close(linear(*tensors).double(), exact, **ROUNDING)
    assert not apart.is_contiguous()
    out = linear(x.view(1, 331, 211), weight.requires_grad_(), bias)
    assert out.shape == (1, 331, 127)
    torch.testing.assert_close(out[0].double(), exact, **ROUNDING)
    out.sum().backward()  # an expanded gradient
    torch.testing.assert_close(weight.grad, x.sum(0).expand(127, -1), **ROUNDING)


@pytest.mark.parametrize("learning", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.usefixtures("onednn")
def test_gradients_of_some_inputs_alone(learning: tuple[int, ...]) -> None:
    tensors = draw(331, 211, 127)
    expected = with_gradients(by_torch, *(tensor.double() for tensor in tensors))[1:]
    for index in learning:
        tensors[index].requires_grad_()
    linear(*tensors).backward(torch.arange(331.0 * 127).remainder(11).sub(5).view(331, 127))
    for index, tensor in enumerate(tensors):
        assert (tensor.grad is not None) == (index in learning)
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad.double(), expected[index], **ROUNDING)


@pytest.mark.usefixtures("onednn")
def test_gradients_of_gradients() -> None:
    def penalty(product, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias = (tensor.detach().clone().requires_grad_() for tensor in tensors)
        (grad,) = torch.autograd.grad(product(x, weight, bias).square().mean(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, weight, bias])

    tensors = draw(331, 211, 127)
    expected = penalty(by_torch, *(tensor.double() for tensor in tensors))
    for got, exact in zip(penalty(linear, *tensors), expected, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("onednn")
def test_the_same_bits_every_time() -> None:
    tensors = draw(331, 211, 127)
    first = with_gradients(linear, *tensors)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(with_gradients(linear, *tensors), first, strict=True))


@pytest.mark.usefixtures("onednn")
def test_cases_that_use_torchs_own_product() -> None:
    x, weight, bias = draw(331, 211, 127)
    weight = nn.Parameter(weight)
    assert is_onednn(linear(x, weight, bias))
    assert linear(x.double(), weight.double(), bias.double()).dtype == torch.float64
    assert not is_onednn(linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_onednn(linear(x, weight, bias))
    for wrong in (torch.randn(331, 210), torch.randn(331, 211, dtype=torch.float64)):
        with pytest.raises(RuntimeError):
            linear(wrong, weight, bias)
    with pytest.raises(RuntimeError):
        linear(x, weight, torch.randn(126))


@pytest.mark.usefixtures("onednn")
def test_transformations_see_an_ordinary_product() -> None:
    x, weight, bias = draw(331, 211, 127)
    layer = Linear(211, 127)
    exact = by_torch(x, layer.weight, layer.bias)
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), exact, **ROUNDING)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), exact, **ROUNDING)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), exact, **ROUNDING)
    batched = torch.func.vmap(lambda one: linear(one, weight, bias))(x.expand(2, -1, -1))
    torch.testing.assert_close(batched[1], by_torch(x, weight, bias), **ROUNDING)
    grad = torch.func.grad(lambda tensor: linear(x, tensor, bias).sum())(weight)
    torch.testing.assert_close(grad, x.sum(0).expand(127, -1), **ROUNDING)
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda tensor: linear(tensor, weight), (x,), (x,))
    torch.testing.assert_close(tangent, by_torch(x, weight), **ROUNDING)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, weight)).tangent
        torch.testing.assert_close(tangent, by_torch(x, weight), **ROUNDING)


@pytest.mark.usefixtures("onednn")
def test_the_layer_has_the_state_of_torchs() -> None:
    layer, plain = Linear(211, 127), nn.Linear(211, 127)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(331, 211)
    assert is_onednn(copy.deepcopy(layer)(x))
    torch.testing.assert_close(layer(x), plain(x), **ROUNDING)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.usefixtures("onednn")
def test_a_stack_of_layers_equals_itself_in_float64(batch_norm: bool) -> None:
    """ReLU writes over what a layer returns, which the next one keeps for its backward."""
    mlp = MLP(211, (127, 131, 1), generator=torch.Generator().manual_seed(0), batch_norm=batch_norm)
    x = draw(331, 211, 1)[0]
    exact, exact_x = copy.deepcopy(mlp).double(), x.double().requires_grad_()
    x.requires_grad_()
    assert is_onednn(linear(x, mlp.layers[0].weight, mlp.layers[0].bias))
    expected = torch.autograd.grad(exact(exact_x).square().mean(), [exact_x, *exact.parameters()])
    for got, gradient in zip(
        torch.autograd.grad(mlp(x).square().mean(), [x, *mlp.parameters()]), expected, strict=True
    ):
        torch.testing.assert_close(got.double(), gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_environment_forces_a_library() -> None:
    program = "from terarec.ops.onednn import linear_choice; print(linear_choice().implementation)"
    assert run_python(program, environment={"TERAREC_LINEAR": "torch"}).stdout.strip() == "torch"
    # torch reads this variable when it is loaded, which a process of `run_python` has done already.
    assert run_new_python(program, environment={"ATEN_CPU_CAPABILITY": "avx2"}).stdout.strip() == "torch"
    rejected = run_python(program, environment={"TERAREC_LINEAR": "eigen"})
    assert "TERAREC_LINEAR: got 'eigen', expected one of onednn, torch" in rejected.stderr


def test_onednn_requested_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAREC_LINEAR", "onednn")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    choice_and_range.cache_clear()
    with pytest.raises(KernelError, check=at("TERAREC_LINEAR")):
        linear_choice()
    choice_and_range.cache_clear()


@pytest.mark.parametrize(
    ("family", "least", "has_weight_gradients"),
    [(0, None, False), (23, None, False), (25, 1 << 26, False), (26, 1 << 22, True)],
)
def test_the_processor_and_the_size_choose_the_library(
    family: int, least: int | None, has_weight_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        pytest.skip("this torch has one library alone")
    monkeypatch.delenv("TERAREC_LINEAR", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(import_module("terarec.ops.onednn"), "amd_family", lambda: family)
    choice_and_range.cache_clear()
    try:
        assert linear_choice().implementation == ("torch" if least is None else "onednn")
        assert least_products(False, 256) == (least or 0)
        assert least_products(False, 13) == (0 if least is None else 1 << 22)
        x, weight, _ = draw(1 << 10, 1 << 8, 1 << 8)  # 2^26 multiplications
        weight.requires_grad_()
        assert is_onednn(linear(x, weight)) == (least is not None)
        assert is_onednn(linear(x[:512], weight)) == (least == 1 << 22)
        assert multiplies_weight_gradients(256) == has_weight_gradients
        assert multiplies_weight_gradients(13) == (least is not None)
        out = linear_relu(x, weight)
        out.sum().backward()
        expected = (out.detach() > 0).double().t() @ x.double()
        torch.testing.assert_close(weight.grad.double(), expected, **ROUNDING)
    finally:
        choice_and_range.cache_clear()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "in_width", "width"), [(4096, 100, 16), (331, 211, 127), (7, 13, 5), (0, 4, 4)])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.usefixtures("onednn")
def test_positive_part_and_gradients_equal_those_in_float64(
    rows: int, in_width: int, width: int, has_bias: bool, autocast: bool
) -> None:
    x, weight, bias = draw(rows, in_width, width)
    inputs = (x / in_width**0.5, weight, bias if has_bias else None)

    def under_autocast(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return linear_relu(*inputs)

    got = with_gradients(under_autocast, *inputs)
    # Rounding decides on which side of 0 a number lies, so the exact gradients are those of the found side.
    doubles = [tensor if tensor is None else tensor.double() for tensor in inputs]
    expected = with_gradients(lambda *ins: by_torch(*ins) * (got[0] > 0), *doubles)
    for mine, exact in zip(got, expected, strict=True):
        error = (mine.double() - exact).abs().max().item() if mine.numel() else 0.0
        scale = exact.abs().max().item() if mine.numel() else 1.0
        assert error <= (0.02 if autocast else 1e-5) * max(scale, 1.0)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.usefixtures("onednn")
def test_positive_part_is_fused_and_has_second_gradients(autocast: bool) -> None:
    if autocast and not has_bfloat16():
        pytest.skip("oneDNN does not multiply bfloat16 here")
    x, weight, bias = (tensor.requires_grad_() for tensor in draw(512, 128, 128))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear_relu(x, weight, bias)
        assert is_onednn(out)
        assert not is_onednn(linear_relu(x[:1], weight, bias))
        with torch.backends.mkldnn.flags(enabled=False):
            assert not is_onednn(linear_relu(x, weight, bias))
    (first,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert second.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("instructions", host.instruction_sets())
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (300, 33), (257, 8), (513, 13), (4097, 1024), (8192, 300)])
def test_gradient_of_a_positive_part_and_its_sums_equal_torchs(
    rows: int, width: int, instructions: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    grad, part = (torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2))
    part.relu_()
    before = host.features()
    host.select(instructions)
    try:
        masked, sums = cpu.mask_gradient(grad, part)
        host.select("generic")
        assert all(torch.equal(*pair) for pair in zip(cpu.mask_gradient(grad, part), (masked, sums), strict=True))
        host.select(instructions)
        wide = torch.cat([grad, grad], dim=1)[:, :width]
        assert all(torch.equal(*pair) for pair in zip(cpu.mask_gradient(wide, part), (masked, sums), strict=True))
        if grad.numel() > 1:
            part[0, 0] = grad[-1, -1] = float("nan")
            part[-1, -1] = 1.0
            unknown, unknown_sums = cpu.mask_gradient(grad, part)
            assert unknown[0, 0] == grad[0, 0]
            assert unknown[-1, -1].isnan()
            assert unknown_sums[-1].isnan()
    finally:
        host.select(before)
    part, grad = part.nan_to_num(), grad.nan_to_num()
    masked, sums = cpu.mask_gradient(grad, part)
    expected, expected_sums = ref.mask_gradient(grad, part)
    assert torch.equal(masked, expected)
    torch.testing.assert_close(sums, expected_sums, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_a_gradient_do_not_depend_on_the_threads(
    set_threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    grad, part = torch.randn(2000, 40).to(dtype), torch.randn(2000, 40).relu().to(dtype)
    expected = cpu.mask_gradient(grad, part)
    for threads in (1, 3):
        set_threads(threads)
        assert all(torch.equal(*pair) for pair in zip(cpu.mask_gradient(grad, part), expected, strict=True))
