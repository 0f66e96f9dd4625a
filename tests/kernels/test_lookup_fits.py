# SPDX-License-Identifier: Apache-2.0
"""The look at a lookup's tensors: the core's and the plain one say the same of whatever comes."""

import pytest
import torch
from torch import Tensor

from terarec.kernels.contract import Extents
from terarec.kernels.registry import choose

EXTENTS = Extents(num_features=2, width=4, num_rows=10, is_pooled=True, takes_key_weights=True)
UNPOOLED = EXTENTS._replace(is_pooled=False, takes_key_weights=False)


def tensors(**others: object) -> dict[str, object]:
    """Those of 2 features, 3 samples and 5 keys, but for `others`."""
    fitting: dict[str, object] = {
        "weights": torch.zeros(10, 4),
        "keys": torch.zeros(5, dtype=torch.int64),
        "offsets": torch.zeros(7, dtype=torch.int64),
        "key_weights": torch.ones(5),
        "grad": torch.zeros(3, 8),
        "extents": EXTENTS,
    }
    return {**fitting, **others}


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


FITTING = [
    {},
    {"key_weights": None},
    {"grad": None},
    {"weights": torch.zeros(11, 4, dtype=torch.bfloat16)},
    {"weights": torch.zeros(10, 4, dtype=torch.float16)},
    {"weights": torch.zeros(4, 10).t(), "grad": torch.zeros(8, 3).t()},
    {"weights": torch.zeros(10, 4, requires_grad=True)},
    {"offsets": integers(1), "keys": integers(0), "key_weights": torch.ones(0), "grad": torch.zeros(0, 8)},
    {"extents": UNPOOLED, "key_weights": None, "grad": torch.zeros(5, 4)},
]
UNFIT = [
    {"weights": torch.zeros(9, 4)},
    {"weights": torch.zeros(10, 5)},
    {"weights": torch.zeros(40)},
    {"weights": torch.zeros(1, 10, 4)},
    {"weights": torch.zeros(10, 4, dtype=torch.float64)},
    {"weights": torch.zeros(10, 4, dtype=torch.uint8)},
    {"weights": torch.zeros(10, 4, device="meta")},
    {"keys": torch.zeros(5, dtype=torch.int32)},
    {"keys": torch.zeros(5, dtype=torch.uint64)},
    {"keys": torch.zeros(5)},
    {"keys": integers(5, 1)},
    {"keys": integers(1, 5, 1)},
    {"keys": torch.zeros(5, dtype=torch.int64, device="meta")},
    {"offsets": integers(0)},
    {"offsets": integers(6)},
    {"offsets": integers(7, 1)},
    {"offsets": torch.zeros(7, dtype=torch.int32)},
    {"key_weights": torch.ones(4)},
    {"key_weights": torch.ones(5, 1)},
    {"key_weights": torch.ones(5, dtype=torch.float64)},
    {"extents": EXTENTS._replace(takes_key_weights=False)},
    {"grad": torch.zeros(3, 8, dtype=torch.bfloat16)},
    {"grad": torch.zeros(8, 3)},
    {"grad": torch.zeros(24)},
    {"grad": torch.zeros(5, 4)},
    {"extents": UNPOOLED, "key_weights": None},
]


@pytest.mark.parametrize("implementation", ["ref", "cpu"])
@pytest.mark.parametrize(("others", "fit"), [*((held, True) for held in FITTING), *((held, False) for held in UNFIT)])
def test_what_fits(others, fit, implementation):
    assert choose("lookup_fits", "cpu", implementation)(*tensors(**others).values()) is fit
