# SPDX-License-Identifier: Apache-2.0
"""The example of 10 TB runs as its users run it; its keys follow the law that it states."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ten_terabytes.py"
STEPS, BATCH = 3, 64


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow  # loads the trainer, and 26 row files
def test_rows_that_three_steps_touch_are_counted_and_only_their_files_removed(example, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").write_text("kept")
    command = [str(EXAMPLE), "--steps", str(STEPS), "--batch-size", str(BATCH), "--dir", str(tmp_path), "--json"]
    monkeypatch.setattr(sys, "argv", [*command, "--host", "768KiB"])
    example["main"]()
    figures = json.loads(capsys.readouterr().out)
    assert 10.24e12 <= figures["logical_bytes"] < 10.25e12
    batches = list(example["PowerLawReader"](STEPS, BATCH, 1.05, 0))
    distinct = np.unique(np.concatenate([batch.sparse.keys.numpy() for batch in batches])).size
    assert distinct * 316 > 768 << 10  # so rows go to the files
    assert figures["touched_rows"] == distinct
    assert figures["touched_bytes"] == distinct * 256
    assert figures["samples_per_second"] > 0
    assert figures["rows_written"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_keys_of_ranks_are_one_to_one_and_spread_over_all_of_int64(example):
    keys = example["mix"](np.arange(100_000))
    assert np.unique(keys).size == keys.size
    counts, _ = np.histogram(keys.astype(np.float64), bins=16, range=(-(2.0**63), 2.0**63))
    assert counts.sum() == keys.size
    assert counts.min() > 0.9 * keys.size / 16


def test_ranks_follow_the_power_law(example):
    rows, skew = example["ROWS"], 1.05
    uniform = (np.arange(1_000_000) + 0.5) / 1e6
    ranks = example["power_law_ranks"](uniform, skew)
    assert ranks.min() == 0
    assert ranks.max() < rows
    for below in (1, 10, 1000, 10**6):
        expected = ((below + 1.0) ** (1 - skew) - 1) / ((rows + 1.0) ** (1 - skew) - 1)
        assert abs((ranks < below).mean() - expected) < 2e-6
