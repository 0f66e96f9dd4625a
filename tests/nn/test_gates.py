# SPDX-License-Identifier: Apache-2.0
"""Gates: against their formulas, with all gradients."""

import torch
from torch import Tensor

from terarec.nn.dense import MLP
from terarec.nn.gates import ContextGate, MaskBlock, SqueezeExcitation, VectorNorm
from terarec.nn.initializers import dense_distributions

INITIAL = dense_distributions("kaiming_uniform")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def test_squeeze_and_excitation() -> None:
    module = SqueezeExcitation(4, 2, generator=torch.Generator().manual_seed(3), initial=INITIAL).double()
    vectors = drawn(5, 4, 3)
    hidden = (vectors.mean(2) @ module.squeeze.weight.T).relu()
    expected = vectors * (hidden @ module.excite.weight.T).relu().unsqueeze(2)
    assert expected.count_nonzero()
    torch.testing.assert_close(module(vectors), expected)
    assert torch.autograd.gradcheck(module, vectors)


def test_the_hidden_layer_has_at_least_one_unit() -> None:
    module = SqueezeExcitation(2, 8, generator=torch.Generator(), initial=INITIAL)
    assert module.squeeze.weight.shape == (1, 2)


def test_each_vector_is_normalized_by_itself() -> None:
    module = VectorNorm(3, 4).double()
    with torch.no_grad():
        module.weight.copy_(drawn(3, 4, seed=1))
        module.bias.copy_(drawn(3, 4, seed=2))
    vectors = drawn(2, 3, 4)
    centred = vectors - vectors.mean(2, keepdim=True)
    expected = centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt() * module.weight + module.bias
    torch.testing.assert_close(module(vectors), expected)
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (vectors, module.weight, module.bias))


def block(*, dropout: float = 0.0) -> MaskBlock:
    generator = torch.Generator().manual_seed(2)
    module = MaskBlock(4, 3, 5, mask_width=6, activation="tanh", dropout=dropout, generator=generator, initial=INITIAL)
    return module.double()


def test_a_masked_block() -> None:
    module, x, guide = block(), drawn(7, 3), drawn(7, 4, seed=1)
    first, second = module.mask.layers
    mask = (guide @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias
    hidden = (x * mask) @ module.layer.weight.T
    centred = hidden - hidden.mean(1, keepdim=True)
    expected = (centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()).tanh()
    torch.testing.assert_close(module(x, guide), expected)
    assert torch.autograd.gradcheck(lambda x, guide, _: module(x, guide), (x, guide, module.layer.weight))


def test_dropout_is_in_training_alone() -> None:
    module, x, guide = block(dropout=0.5), drawn(50, 3), drawn(50, 4, seed=1)
    torch.testing.assert_close(module.eval()(x, guide), block()(x, guide))
    assert (module.train()(x, guide) == 0).float().mean() > 0.3


def test_a_gate_of_learned_weights_starts_open() -> None:
    module, x = ContextGate(4, None).double(), drawn(3, 4)
    torch.testing.assert_close(module(x, x), x)
    with torch.no_grad():
        assert module.weights is not None
        module.weights.copy_(drawn(4, seed=1))
    torch.testing.assert_close(module(x, x), 2 * x * drawn(4, seed=1).sigmoid())


def test_a_gate_reads_its_context() -> None:
    mlp = MLP(2, (3, 4), generator=torch.Generator().manual_seed(1), activation="tanh")
    module, x, context = ContextGate(4, mlp).double(), drawn(3, 4), drawn(3, 2, seed=1)
    torch.testing.assert_close(module(x, context), 2 * x * mlp(context).sigmoid())
    assert torch.autograd.gradcheck(module, (x, context))
