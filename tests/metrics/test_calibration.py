# SPDX-License-Identifier: Apache-2.0
"""Calibration curves and their error against an oracle that sorts and bins sample by sample in exact numbers."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import Calibration, calibration_curve
from tests.errors import at
from tests.metrics.oracles import calibration

scores = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 2.0**-40, 0.1, 0.5, 0.5004, 1.0]))
samples = st.lists(
    st.tuples(scores, st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 3.25])), max_size=25
)


@given(rows=samples, bins=st.integers(1, 12), binning=st.sampled_from(["count", "width"]))
def test_a_curve_is_that_of_its_definition(rows, bins, binning):
    columns = [np.array(column, np.float32) for column in zip(*rows, strict=True)] or [np.zeros(0)] * 3
    curve = calibration_curve(*columns, bins=bins, binning=binning)
    wanted = calibration([(0.0, *map(float, row)) for row in zip(*columns, strict=True) if row[2] > 0], bins, binning)
    found = list(zip(curve.score, curve.label, curve.weight, strict=True))
    assert found == [pytest.approx(tuple(map(float, each)), rel=1e-12, abs=1e-300) for each in wanted]


SKLEARN = {
    "count": ([0.0625, 0.0875, 0.1625, 0.375, 0.575], [0.078125, 0.234375, 0.390625, 0.546875, 0.703125]),
    "width": ([5 / 102, 11 / 103, 32 / 102, 53 / 93], [0.099609375, 0.2998046875, 0.5, 0.6904296875]),
}


@pytest.mark.parametrize("binning", ["count", "width"])
def test_the_bins_are_those_of_scikit_learn(binning):
    """Values of `sklearn.calibration.calibration_curve`, strategies quantile and uniform, for these samples."""
    rng = np.random.default_rng(0)
    p = rng.permutation(400).astype(np.float64) / 512 + 1 / 1024
    y = rng.random(400) < p**1.5
    curve = calibration_curve(p, y, bins=5, binning=binning)
    assert curve.label == pytest.approx(SKLEARN[binning][0], abs=1e-12)
    assert curve.score == pytest.approx(SKLEARN[binning][1], abs=1e-12)


def test_batches_merge_to_the_curve_of_all():
    rng = np.random.default_rng(1)
    p, y, w = rng.random((300, 2)), rng.choice([0, 1, math.nan], (300, 2)), rng.integers(0, 3, 300)
    whole = Calibration().update(p, y, w)
    parts = Calibration()
    for start in range(0, 300, 70):
        part = slice(start, start + 70)
        parts.merge(Calibration().update(*(torch.from_numpy(column[part]) for column in (p, y, w))))
    assert parts.per_label() == pytest.approx(whole.per_label(), rel=1e-12)
    assert whole.compute() == pytest.approx(sum(whole.per_label()) / 2)
    alone = [calibration_curve(p[:, number], y[:, number], w).error for number in (0, 1)]
    assert whole.per_label() == pytest.approx(alone)


def test_calibrated_scores_have_a_small_error_and_shifted_ones_their_shift():
    rng = np.random.default_rng(2)
    p = rng.beta(1, 20, 200_000)
    y = rng.random(len(p)) < p
    assert calibration_curve(p, y).error < 0.003
    assert calibration_curve(p + 0.1 * (p < 0.9), y).error == pytest.approx(0.1, abs=0.003)


def test_no_samples_have_no_error():
    curve = calibration_curve(np.zeros(3), np.full(3, math.nan))
    assert math.isnan(curve.error)
    assert json.loads(json.dumps(curve.to_json())) == {"ece": None, "score": [], "label": [], "weight": []}
    assert math.isnan(Calibration().compute())


@pytest.mark.parametrize(
    ("scores", "labels", "options", "where"),
    [
        ([1.5], [1], {}, "Calibration.update"),
        ([-0.1], [1], {}, "Calibration.update"),
        ([math.nan], [1], {}, "Calibration.update"),
        ([0.5], [2], {}, "Calibration.update"),
        ([[0.5, 0.5]], [[1, 0]], {}, "calibration_curve"),
        ([0.5], [1], {"bins": 0}, "bins"),
        ([0.5], [1], {"binning": "quantile"}, "binning"),
    ],
)
def test_what_no_curve_takes_is_rejected(scores, labels, options, where):
    with pytest.raises(ConfigError, check=at(where)):
        calibration_curve(np.array(scores), np.array(labels), **options)
