# SPDX-License-Identifier: Apache-2.0
"""The layer named is the first one whose output is not finite."""

import torch

from terarec.models import build_model
from terarec.train.step import first_non_finite
from tests.models.test_sequences import BATCH, COLUMNS, SPECS


def test_the_first_layer_with_a_value_that_is_not_finite_is_named() -> None:
    model = build_model(SPECS["sasrec"], COLUMNS, seed=1)  # type: ignore[arg-type]
    assert first_non_finite(model, BATCH) is None
    with torch.no_grad():
        model.get_parameter("encoder.blocks.1.first.weight")[0] = torch.nan
    assert first_non_finite(model, BATCH) == "encoder.blocks.1.first (Linear)"
    with torch.no_grad():
        model.get_parameter("encoder.positions.weight")[0] = torch.inf
    assert first_non_finite(model, BATCH) == "encoder.positions (PositionVectors)"
    assert model.training
