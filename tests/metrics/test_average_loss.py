import math

import pytest
import torch

from terarec.metrics import AverageLoss


def test_every_batch_counts_the_same():
    metric = AverageLoss()
    assert math.isnan(metric.compute())
    losses = [0.1, 0.7, 0.3]
    for loss in losses:
        metric.update(torch.tensor(loss, requires_grad=True))
    assert metric.compute() == pytest.approx(math.fsum(losses) / 3, rel=1e-7)


def test_merge_adds_and_reset_forgets():
    left, right = AverageLoss().update(1.0), AverageLoss().update(2.0).update(6.0)
    assert left.merge(right).compute() == 3.0
    assert right.compute() == 4.0
    left.reset()
    assert left.update(5.0).compute() == 5.0


def test_nan_stays():
    assert math.isnan(AverageLoss().update(1.0).update(math.nan).compute())
