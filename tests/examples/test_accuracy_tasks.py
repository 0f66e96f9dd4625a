# SPDX-License-Identifier: Apache-2.0
"""A model of histories learns what `benchmarks/accuracy_tasks.py` plants in them."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from terarec.data import open_reader
from terarec.metrics.auc import AUC

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return runpy.run_path(str(BENCHMARKS / "accuracy_tasks.py"))


def test_the_number_of_products_of_the_category_alone_says_much(script, tmp_path):
    best = script["write_histories"](tmp_path, train=20_000, valid=5_000)
    (batch,) = open_reader(tmp_path, "valid", batch_size=5_000)
    keys, offsets = batch.sparse.keys.numpy(), batch.sparse.offsets.numpy()
    product, category, past_product, past_category = np.split(keys, offsets[[5_000, 10_000, 15_000]])
    lengths = np.diff(offsets[15_000:])
    assert (lengths.min(), lengths.max()) == (1, 20)
    # A product has one category, in the past, too.
    pairs = {*zip(product, category, strict=True), *zip(past_product, past_category, strict=True)}
    assert len(pairs) == len({item for item, _ in pairs}) == 200
    same = past_category == np.repeat(category, lengths)
    count = np.bincount(np.repeat(np.arange(5_000), lengths), same, 5_000)
    assert 0.65 < AUC().update(count, batch.label[:, 0].numpy()).compute() < best < 0.85


@pytest.mark.slow
def test_din_gains_nine_tenths_of_what_can_be_gained(script, tmp_path):
    (row,) = script["history_rows"](tmp_path, 1, models=["din"])
    assert row.gain > 0.9
