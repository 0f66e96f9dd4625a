# SPDX-License-Identifier: Apache-2.0
"""Dots of all pairs of vectors, in bfloat16 and float32: kernel and plain formula, and both against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.cpu.dense import has_pair_dots
from terarec.kernels.cpu.host import features, instruction_sets, select
from terarec.nn import DotInteraction
from terarec.ops.pair_dots import pair_dots, supports_pair_dots
from tests.errors import at

SHAPES = [(0, 3, 4), (1, 2, 1), (7, 5, 3), (130, 27, 64), (65, 27, 16), (33, 40, 48), (9, 17, 128), (64, 33, 40)]
"""Samples, vectors and their width."""

TYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not has_pair_dots(is_narrow), reason=f"the processor has no {units}"))
    for dtype, is_narrow, units in (
        (torch.bfloat16, True, "AVX512-BF16"),
        (torch.float32, False, "fused multiply-add"),
    )
]
UNITS = {torch.bfloat16: 2**-7, torch.float32: 2**-20}
"""Types of the first vector that have a kernel -> tolerance of their sums."""
by_kernel = pytest.mark.parametrize("dtype", TYPES)


def draw(batch_size: int, num_vectors: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(batch_size)
    first = torch.randn(batch_size, width, generator=generator).to(dtype)
    others = torch.randn(batch_size, (num_vectors - 1) * width, generator=generator)
    return first, others, DotInteraction(num_vectors, width).out_width


def with_gradients(first: Tensor, others: Tensor, out_width: int, implementation: str) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (first, others)]
    out = pair_dots(*inputs, out_width, implementation=implementation)
    grad = torch.arange(out.numel()).remainder(11).sub(5).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@by_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_what_torch_gives(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = draw(*shape, dtype)
    for got, expected in zip(with_gradients(*inputs, "cpu"), with_gradients(*inputs, "ref"), strict=True):
        assert (got.dtype, got.is_contiguous()) == (expected.dtype, True)
        # Another order of sums may round differently.
        torch.testing.assert_close(got, expected, rtol=UNITS[dtype], atol=1e-4)


@pytest.mark.parametrize("implementation", ["auto", "ref"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_equals_the_formula_in_float64(shape: tuple[int, int, int], dtype: torch.dtype, implementation: str) -> None:
    first, others, out_width = draw(*shape, dtype)
    got = with_gradients(first, others, out_width, implementation)
    exact = [first.double().requires_grad_(), others.to(dtype).double().requires_grad_()]
    vectors = torch.cat(exact, dim=1).unflatten(1, (-1, shape[2]))
    rows, columns = torch.tril_indices(shape[1], shape[1], offset=-1)
    dots = torch.cat([exact[0], (vectors @ vectors.mT)[:, rows, columns]], dim=1)
    grad = torch.arange(got[0].numel()).remainder(11).sub(5).view(got[0].shape).double()
    expected = [dots.detach(), *torch.autograd.grad(dots, exact, grad[:, : dots.shape[1]])]
    assert not got[0][:, dots.shape[1] :].any()
    for mine, right in zip([got[0][:, : dots.shape[1]], *got[1:]], expected, strict=True):
        assert (mine.double() - right).abs().max() <= UNITS[dtype] * right.abs().max()


@by_kernel
def test_other_layouts_in_memory_and_any_number_of_threads(
    set_threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    first, others, out_width = draw(130, 27, 64, dtype)
    expected = with_gradients(first, others, out_width, "cpu")
    wide = torch.cat([others, others], dim=1)[:, : others.shape[1]]
    apart = torch.stack([first, first], dim=2)[:, :, 0]
    for threads in (1, 3):
        set_threads(threads)
        assert torch.equal(pair_dots(apart, wide, out_width, implementation="cpu"), expected[0])
        again = with_gradients(first, others, out_width, "cpu")
        assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))


@by_kernel
def test_numbers_that_are_none_pass_through(dtype: torch.dtype) -> None:
    first, others, out_width = draw(7, 5, 16, dtype)
    others[3, 20] = float("nan")
    others[4, 0] = float("inf")
    for got, expected in zip(
        with_gradients(first, others, out_width, "cpu"), with_gradients(first, others, out_width, "ref"), strict=True
    ):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.isinf(), expected.isinf())


@pytest.mark.skipif(not has_pair_dots(False), reason="the processor has no fused multiply-add")
def test_all_sets_give_the_same_bits_in_float32() -> None:
    before = features()
    results = []
    try:
        for name in [*instruction_sets(), "wide"]:
            select(name)
            if has_pair_dots(False):
                results.append([with_gradients(*draw(*shape, torch.float32), "cpu") for shape in SHAPES])
    finally:
        select(before)
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@by_kernel
def test_the_layer_takes_the_kernel_for_its_types_alone(dtype: torch.dtype) -> None:
    first, others, _ = draw(7, 5, 8, dtype)
    layer = DotInteraction(5, 8)
    first.requires_grad_()
    assert "pair_dots" in layer(first, others).grad_fn.name()
    assert layer(first.half(), others).grad_fn.name() == "_InteractBackward"
    assert layer(first.double(), others.double()).grad_fn.name() == "_InteractBackward"
    assert layer(first, others.bfloat16()).grad_fn.name() == "_InteractBackward"
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(first, others), layer(first, others))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_set_without_units_runs_the_reference_or_raises(dtype: torch.dtype) -> None:
    first, others, out_width = draw(7, 5, 8, dtype)
    before = features()
    select("generic")
    try:
        assert not supports_pair_dots(first, others)
        with pytest.raises(KernelError, check=at("pair_dots", "'cpu'")):
            pair_dots(first, others, out_width, implementation="cpu")
        assert torch.equal(
            pair_dots(first, others, out_width), pair_dots(first, others, out_width, implementation="ref")
        )
    finally:
        select(before)
