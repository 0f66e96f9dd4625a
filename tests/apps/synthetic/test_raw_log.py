# SPDX-License-Identifier: Apache-2.0
"""The packed AUC equals the definition, ties included, whatever the size of its parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.apps.synthetic import raw_log
from terarec.apps.synthetic.raw_log import pack, packed_auc


def defined(scores, labels):
    """Over all pairs of a positive and a negative: 1 for the right order, 1/2 for a tie."""
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return float((positive > negative).mean() + (positive == negative).mean() / 2)


@pytest.mark.parametrize("rows_at_once", [1, 3, 1 << 20])
@given(pairs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1)), min_size=2, max_size=60))
def test_equals_the_definition(rows_at_once, pairs):
    scores = np.array([score / 8 for score, _ in pairs], dtype=np.float32)
    labels = np.array([label for _, label in pairs], dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_log, "_ROWS_AT_ONCE", rows_at_once)
        found = packed_auc(pack(scores, labels))
    if 0 < labels.sum() < len(labels):
        assert found == pytest.approx(defined(scores, labels), abs=1e-12)
    else:
        assert found is None  # finding N4: 0.5 would be a value


def test_packing_keeps_scores_and_labels_apart():
    scores = np.array([0.0, 1e-30, 0.5, np.nextafter(np.float32(1.0), np.float32(0.0)), 1.0], dtype=np.float32)
    labels = np.array([1, 0, 1, 0, 1], dtype=np.uint8)
    packed = pack(scores, labels)
    assert (np.diff(packed.astype(np.int64)) > 0).all()
    assert (packed >> 1).view(np.float32).tolist() == scores.tolist()
    assert (packed & 1).tolist() == labels.tolist()
