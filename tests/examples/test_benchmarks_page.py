# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/benchmarks.md are those that the rows of results/ give."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield runpy.run_path(str(BENCHMARKS / "peer_tables.py"))


def test_the_page_holds_the_newest_rows(script):
    page = script["PAGE"]
    assert page.with_tables(script["page_tables"](page.read_rows())) == page.page.read_text()


def test_the_newest_row_of_a_cell_counts_and_one_not_run_gives_the_reason(script):
    row = {
        "case": "2 x 10 x 4, 1 key, batch 64, zipf",
        "metric": "forward",
        "value": "2.0",
        "ratio": "3.14",
        "peer_value": "6.28",
        "limit": "1.0",
        "peer": "other",
        "peer_version": "other 1",
    }
    step = row | {"metric": "forward, backward and sgd update", "ratio": "", "peer": "other: not run, needs 5 GiB"}
    text = script["page_tables"]([row | {"value": "9.0"}, row, step])
    assert "| 2 x 10 x 4, 1 key | zipf | 64 | 2 ms, **3.1x** of 6.3x | needs 5 GiB |" in text
    assert "9 ms" not in text
