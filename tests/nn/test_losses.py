import math

import pytest
import torch

from terarec.nn import logistic_loss


def test_is_the_mean_cross_entropy() -> None:
    logits, labels = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [0.0]])
    expected = (math.log(2) + math.log(1 + math.exp(2.0))) / 2
    assert logistic_loss(logits, labels).item() == pytest.approx(expected, rel=1e-6)


def test_large_logits_stay_finite_and_bfloat16_is_computed_in_float32() -> None:
    loss = logistic_loss(torch.tensor([[300.0], [-300.0]]).bfloat16(), torch.tensor([[1.0], [0.0]]))
    assert loss.dtype == torch.float32
    assert loss.item() == 0.0
