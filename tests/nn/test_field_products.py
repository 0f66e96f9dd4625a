# SPDX-License-Identifier: Apache-2.0
"""Products of pairs of columns' vectors: against their definition, with all gradients."""

from itertools import combinations
from typing import get_args

import pytest
import torch
from torch import Tensor

from terarec.nn.field_products import BilinearFusion, BilinearProducts, field_aware_products
from terarec.nn.initializers import linear_distributions
from terarec.spec.interactions import BilinearKernels


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_field_aware_products(count: int) -> None:
    vectors = drawn(3, count, count, 2)
    pairs = [vectors[:, i, j] * vectors[:, j, i] for i, j in combinations(range(count), 2)]
    expected = torch.stack(pairs).sum(0) if pairs else torch.zeros(3, 2, dtype=torch.float64)
    torch.testing.assert_close(field_aware_products(vectors), expected)
    assert torch.autograd.gradcheck(field_aware_products, vectors)


@pytest.mark.parametrize("kernels", get_args(BilinearKernels))
def test_bilinear_products(kernels: BilinearKernels) -> None:
    generator = torch.Generator().manual_seed(1)
    module = BilinearProducts(3, 2, kernels, generator=generator, initial=linear_distributions).double()
    vectors = drawn(4, 3, 2)
    products = []
    for place, (i, j) in enumerate(combinations(range(3), 2)):
        kernel = module.kernels[{"all": 0, "each": i, "interaction": place}[kernels]]
        products.append((vectors[:, i] @ kernel) * vectors[:, j])
    found = module(vectors)
    torch.testing.assert_close(found, torch.cat(products, dim=1))
    assert found.shape == (4, module.out_width)
    assert torch.autograd.gradcheck(lambda x, _: module(x), (vectors, module.kernels))


@pytest.mark.parametrize("heads", [1, 2])
def test_bilinear_fusion(heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    module = BilinearFusion(4, 6, heads, 3, generator=generator, initial=linear_distributions).double()
    x, y = drawn(5, 4), drawn(5, 6, seed=1)
    expected = module.linear(torch.cat([x, y], dim=1))
    for head, kernels in enumerate(module.kernels):
        one, other = x.chunk(heads, dim=1)[head], y.chunk(heads, dim=1)[head]
        expected = expected + torch.stack([((one @ kernel) * other).sum(1) for kernel in kernels], dim=1)
    torch.testing.assert_close(module(x, y), expected)
    assert torch.autograd.gradcheck(lambda x, y, _: module(x, y), (x, y, module.kernels))
