import pytest
import torch
from torch import nn

from terarec.nn import MLP


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("relu_last", [False, True])
def test_equals_linear_layers_with_relu_between(relu_last: bool) -> None:
    mlp = MLP(5, (7, 3, 2), generator=generator(), relus=(True, True, relu_last))
    x = torch.randn(11, 5)
    expected = x
    for index, layer in enumerate(mlp.layers):
        assert isinstance(layer, nn.Linear)
        expected = expected @ layer.weight.T + layer.bias
        if index < 2 or relu_last:
            expected = expected.clamp(min=0)
    torch.testing.assert_close(mlp(x), expected)


def test_gradients_equal_those_of_plain_layers() -> None:
    mlp = MLP(5, (7, 3), generator=generator())
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for mine, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    x = torch.randn(4, 5, requires_grad=True)
    got = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    torch.testing.assert_close(got, expected)


def test_first_weights_come_from_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = MLP(300, (400,), generator=generator(7))
    torch.manual_seed(2)
    second = MLP(300, (400,), generator=generator(7))
    assert torch.equal(first.layers[0].weight, second.layers[0].weight)
    assert first.layers[0].weight.std().item() == pytest.approx((2 / 700) ** 0.5, rel=0.02)
    assert not torch.equal(first.layers[0].weight, MLP(300, (400,), generator=generator(8)).layers[0].weight)


def test_dropout_acts_while_training_only() -> None:
    mlp = MLP(4, (64, 1), generator=generator(), dropout=0.5)
    x = torch.randn(8, 4)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))
