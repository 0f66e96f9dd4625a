import pytest
import torch

from terarec.nn import DotInteraction


def naive(first: torch.Tensor, others: torch.Tensor, num_vectors: int) -> torch.Tensor:
    vectors = torch.cat([first, others], dim=1).view(first.shape[0], num_vectors, first.shape[1])
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    return torch.cat([first, torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]], dim=1)


@pytest.mark.parametrize(("batch_size", "num_vectors", "width"), [(0, 3, 4), (1, 2, 1), (7, 5, 3), (16, 27, 16)])
def test_equals_the_plain_formula_and_its_gradient(batch_size: int, num_vectors: int, width: int) -> None:
    layer = DotInteraction(num_vectors, width).double()
    first = torch.randn(batch_size, width, dtype=torch.float64, requires_grad=True)
    others = torch.randn(batch_size, (num_vectors - 1) * width, dtype=torch.float64, requires_grad=True)
    got, expected = layer(first, others), naive(first, others, num_vectors)
    used = expected.shape[1]
    assert got.shape == (batch_size, layer.out_width)
    assert layer.out_width % 16 == 0
    torch.testing.assert_close(got[:, :used], expected)
    assert not got[:, used:].any()
    weight = torch.randn_like(got)
    got_grads = torch.autograd.grad((got * weight).sum(), (first, others))
    expected_grads = torch.autograd.grad((expected * weight[:, :used]).sum(), (first, others))
    torch.testing.assert_close(got_grads, expected_grads)


def test_the_gradient_is_right_numerically() -> None:
    layer = DotInteraction(4, 3).double()
    inputs = (torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64))
    assert torch.autograd.gradcheck(layer, tuple(value.requires_grad_() for value in inputs))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_16_bits_stay_16_bits_and_the_others_get_a_float32_gradient(dtype: torch.dtype, tolerance: float) -> None:
    layer = DotInteraction(5, 8)
    first = torch.randn(6, 8).to(dtype).requires_grad_()
    others = torch.randn(6, 32, requires_grad=True)
    out = layer(first, others)
    weight = torch.randn(out.shape).to(dtype)
    got = torch.autograd.grad((out * weight).sum(), (first, others))
    assert (out.dtype, got[0].dtype, got[1].dtype) == (dtype, dtype, torch.float32)

    exact = (first.detach().double().requires_grad_(), others.detach().double().requires_grad_())
    expected = naive(*exact, 5)
    expected_gradients = torch.autograd.grad((expected * weight[:, : expected.shape[1]].double()).sum(), exact)
    used = out[:, : expected.shape[1]]
    for found, right in zip((used, *got), (expected, *expected_gradients), strict=True):
        error = (found.double() - right).abs().max() / right.abs().max()
        assert error <= tolerance
