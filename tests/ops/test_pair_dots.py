"""Dots of all pairs of vectors in bfloat16: the kernel against the plain formula, and both against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.cpu.dense import has_pair_dots
from terarec.kernels.cpu.host import features, select
from terarec.nn import DotInteraction
from terarec.ops import pair_dots, takes_pair_dots
from tests.errors import at

SHAPES = [(0, 3, 4), (1, 2, 1), (7, 5, 3), (130, 27, 64), (65, 27, 16), (33, 40, 48), (9, 17, 128), (64, 33, 40)]
"""Samples, vectors and their width."""

needs_units = pytest.mark.skipif(not has_pair_dots(), reason="the processor has no AVX512-BF16")


def draw(batch_size: int, num_vectors: int, width: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(batch_size)
    first = torch.randn(batch_size, width, generator=generator).bfloat16()
    others = torch.randn(batch_size, (num_vectors - 1) * width, generator=generator)
    return first, others, DotInteraction(num_vectors, width).out_width


def with_gradients(first: Tensor, others: Tensor, out_width: int, implementation: str) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (first, others)]
    out = pair_dots(*inputs, out_width, implementation=implementation)
    grad = torch.arange(out.numel()).remainder(11).sub(5).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@needs_units
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_what_torch_gives(shape: tuple[int, int, int]) -> None:
    inputs = draw(*shape)
    for got, expected in zip(with_gradients(*inputs, "cpu"), with_gradients(*inputs, "ref"), strict=True):
        assert (got.dtype, got.is_contiguous()) == (expected.dtype, True)
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-4)  # another order of sums may round differently


@pytest.mark.parametrize("implementation", ["ref", pytest.param("cpu", marks=needs_units)])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_equals_the_formula_in_float64(shape: tuple[int, int, int], implementation: str) -> None:
    first, others, out_width = draw(*shape)
    got = with_gradients(first, others, out_width, implementation)
    exact = [first.double().requires_grad_(), others.bfloat16().double().requires_grad_()]
    vectors = torch.cat(exact, dim=1).unflatten(1, (-1, shape[2]))
    rows, columns = torch.tril_indices(shape[1], shape[1], offset=-1)
    dots = torch.cat([exact[0], (vectors @ vectors.mT)[:, rows, columns]], dim=1)
    grad = torch.arange(got[0].numel()).remainder(11).sub(5).view(got[0].shape).double()
    expected = [dots.detach(), *torch.autograd.grad(dots, exact, grad[:, : dots.shape[1]])]
    assert not got[0][:, dots.shape[1] :].any()
    for mine, right in zip([got[0][:, : dots.shape[1]], *got[1:]], expected, strict=True):
        assert (mine.double() - right).abs().max() <= 2**-7 * right.abs().max()


@needs_units
def test_other_layouts_in_memory_and_any_number_of_threads(set_threads: Callable[[int], None]) -> None:
    first, others, out_width = draw(130, 27, 64)
    expected = with_gradients(first, others, out_width, "cpu")
    wide = torch.cat([others, others], dim=1)[:, : others.shape[1]]
    apart = torch.stack([first, first], dim=2)[:, :, 0]
    for threads in (1, 3):
        set_threads(threads)
        assert torch.equal(pair_dots(apart, wide, out_width, implementation="cpu"), expected[0])
        again = with_gradients(first, others, out_width, "cpu")
        assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))


@needs_units
def test_numbers_that_are_none_pass_through() -> None:
    first, others, out_width = draw(7, 5, 16)
    others[3, 20] = float("nan")
    others[4, 0] = float("inf")
    for got, expected in zip(
        with_gradients(first, others, out_width, "cpu"), with_gradients(first, others, out_width, "ref"), strict=True
    ):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.isinf(), expected.isinf())


@needs_units
def test_the_layer_takes_the_kernel_for_bfloat16_alone() -> None:
    first, others, _ = draw(7, 5, 8)
    layer = DotInteraction(5, 8)
    first.requires_grad_()
    assert "pair_dots" in layer(first, others).grad_fn.name()
    assert layer(first.half(), others).grad_fn.name() == "_InteractBackward"
    assert layer(first.float(), others).grad_fn.name() == "_InteractBackward"
    assert layer(first, others.bfloat16()).grad_fn.name() == "_InteractBackward"
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(first, others), layer(first, others))


def test_a_set_without_units_runs_the_reference_or_raises() -> None:
    first, others, out_width = draw(7, 5, 8)
    before = features()
    select("generic")
    try:
        assert not takes_pair_dots(first, others)
        with pytest.raises(KernelError, check=at("pair_dots", "'cpu'")):
            pair_dots(first, others, out_width, implementation="cpu")
        assert torch.equal(
            pair_dots(first, others, out_width), pair_dots(first, others, out_width, implementation="ref")
        )
    finally:
        select(before)
