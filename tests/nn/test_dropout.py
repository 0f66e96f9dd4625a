import numpy as np
import pytest
import torch

from terarec.nn.dropout import dropout

ONES = torch.ones(400, 301)


def drawn(rate, x=ONES, seed=3):
    torch.manual_seed(seed)
    return dropout(x, rate, is_training=True)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_rate_and_mean_are_as_asked(rate):
    """Six standard deviations of the binomial share of 120,400 elements."""
    y = drawn(rate)
    deviation = (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs(float((y == 0).float().mean()) - rate) < 6 * deviation
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)), rtol=2e-4, atol=0.0)


def test_elements_are_dropped_apart():
    """Neither neighbours nor rows repeat: the correlations vanish."""
    mask = (drawn(0.5) == 0).double().numpy() - 0.5
    for shift in (1, 2, 3, 4, 301):
        flat = mask.reshape(-1)
        assert abs(np.mean(flat[shift:] * flat[:-shift])) < 0.25 * 6 / flat.size**0.5


def test_the_gradient_takes_the_same_mask():
    x = torch.randn(7, 5, requires_grad=True)
    y = drawn(0.4, x)
    weight = torch.randn(7, 5)
    (y * weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.where(y == 0, 0.0, weight * y.detach() / x.detach()))


def test_torchs_state_decides_whatever_the_threads():
    threads = torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(drawn(0.5))
    torch.set_num_threads(threads)
    assert torch.equal(*results)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = (dropout(ONES, 0.5, is_training=True) for _ in range(2))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(dropout(ONES, 0.5, is_training=True), first)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_shape_and_type(shape, dtype):
    y = drawn(0.5, torch.ones(shape, dtype=dtype))
    assert (y.shape, y.dtype) == (torch.Size(shape), dtype)
    assert set(y.unique().tolist()) <= {0.0, 2.0}


def test_nothing_happens_outside_training_or_at_rate_zero():
    state = torch.get_rng_state()
    assert dropout(ONES, 0.5, is_training=False) is ONES
    assert dropout(ONES, 0.0, is_training=True) is ONES
    assert torch.equal(torch.get_rng_state(), state)


def test_nearly_everything_may_be_dropped():
    y = drawn(0.9999999)
    assert float((y != 0).float().mean()) < 1e-3
    assert torch.isfinite(y).all()


def test_compiled_code_drops_as_well():
    torch.manual_seed(0)
    y = torch.compile(lambda x: dropout(x, 0.5, is_training=True), backend="eager", fullgraph=True)(ONES)
    assert 0.45 < float((y == 0).float().mean()) < 0.55
