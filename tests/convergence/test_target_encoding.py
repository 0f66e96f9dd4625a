# SPDX-License-Identifier: Apache-2.0
"""Target encodings carry the signal of a category and nothing of a row's own label."""

import numpy as np
import pytest

from terarec.etl.columns import Rows, array_of, numbers_of
from terarec.etl.ops import TargetEncoding
from terarec.metrics import AUC
from tests.etl.ops.fitting import blocks_of, fit

ROWS = 20_000
STEP = TargetEncoding(columns=("k",), target="y", outputs=("e",), smoothing=1.0)


def aucs(keys: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """AUC of the encoding that training rows get, and of the one that would take their own labels along."""
    columns = {"k": array_of(keys), "y": array_of(labels.astype(np.float64))}
    block = Rows(columns, np.arange(ROWS), np.zeros(ROWS, dtype=np.uint8))
    code, state = STEP, fit(STEP, blocks_of(block, 4096))
    kept_apart = numbers_of(code.transform(block, state).columns["e"])
    in_fold = numbers_of(code.transform(Rows(columns, block.ids), state).columns["e"])
    return AUC().update(kept_apart, labels).compute(), AUC().update(in_fold, labels).compute()


@pytest.mark.parametrize("distinct", [5000, 15_000])
def test_random_labels_leave_no_trace_in_columns_of_high_cardinality(distinct: int) -> None:
    generator = np.random.default_rng(distinct)
    labels = (generator.random(ROWS) < 0.3).astype(np.float32)
    kept_apart, in_fold = aucs(generator.integers(0, distinct, ROWS), labels)
    assert in_fold > 0.75  # what leaks where a row's own label counts
    assert kept_apart == pytest.approx(0.5, abs=0.012)  # three standard deviations: 0.004 each


def test_a_planted_signal_comes_through() -> None:
    generator = np.random.default_rng(1)
    rates, keys = generator.random(200), generator.integers(0, 200, ROWS)
    labels = (generator.random(ROWS) < rates[keys]).astype(np.float32)
    best = AUC().update(rates[keys], labels).compute()
    kept_apart, _ = aucs(keys, labels)
    assert best > 0.8
    assert kept_apart == pytest.approx(best, abs=0.01)
