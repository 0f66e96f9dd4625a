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


def test_bfloat16_stays_bfloat16_and_the_others_get_a_float32_gradient() -> None:
    layer = DotInteraction(5, 8)
    first = torch.randn(6, 8).bfloat16().requires_grad_()
    others = torch.randn(6, 32, requires_grad=True)
    out = layer(first, others)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert others.grad is not None
    assert others.grad.dtype == torch.float32
    torch.testing.assert_close(out.float()[:, :18], naive(first.float(), others, 5), rtol=0.03, atol=0.1)
