# SPDX-License-Identifier: Apache-2.0
"""Trained models in narrower numbers."""

import pytest
import torch
from torch import nn

from terarec.errors import ConfigError
from terarec.models.narrow import Int8Linear, Numbers, narrow
from terarec.nn.dense import Linear
from tests.errors import at


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_integers_is_near_the_layer(relu: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(64, 48, bias=bias)
    layer.relu = relu
    inputs = torch.randn(33, 64)
    with torch.inference_mode():
        expected, found = layer(inputs), Int8Linear(layer)(inputs)
        alone = Int8Linear(layer)(inputs[:0])
    assert alone.shape == (0, 48)
    assert float((found - expected).norm() / expected.norm()) <= 0.03  # inputs have 7 bits
    assert not torch.equal(found, expected)
    assert bool((found >= 0).all()) == relu


def test_a_layer_without_weight_stays_zero() -> None:
    layer = nn.Linear(4, 2)
    nn.init.zeros_(layer.weight)
    with torch.inference_mode():
        assert torch.equal(Int8Linear(layer)(torch.randn(3, 4)), layer.bias.expand(3, 2))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("other", [1e6, 3e38, -3e38, float("inf"), float("nan"), 0.0])
def test_a_record_has_the_same_result_whatever_records_are_beside_it(other: float, relu: bool) -> None:
    torch.manual_seed(0)
    first, last = Linear(8, 6), nn.Linear(6, 1, bias=False)
    first.relu = relu
    model = narrow(nn.Sequential(first, last), Numbers(precision="int8"))
    records = torch.randn(3, 8)
    with torch.inference_mode():
        alone = torch.cat([model(record[None]) for record in records])
        joined = model(torch.cat([records, torch.tensor([[other, -other] * 4])]))
    assert torch.equal(joined[:3], alone)
    assert bool(joined[3].isfinite()) == (abs(other) < 1e38)


@pytest.mark.parametrize("field", ["row_type", "precision"])
def test_unknown_numbers_are_rejected(field: str) -> None:
    with pytest.raises(ConfigError, check=at(f"Numbers.{field}")):
        Numbers(**{field: "int4"})


def test_weights_that_are_not_finite_are_rejected() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    nn.init.constant_(model[0].weight, float("nan"))
    with pytest.raises(ConfigError, check=at("precision")):
        narrow(model, Numbers(precision="int8"))
