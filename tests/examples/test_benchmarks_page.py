"""The tables of docs/benchmarks.md are those that the rows of results/ give."""

import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_holds_the_newest_rows():
    script = runpy.run_path(str(BENCHMARKS / "peer_tables.py"))
    page = script["PAGE"].read_text()
    assert script["rewritten"](page, script["page_tables"](script["read_rows"]())) == page


def test_the_newest_row_of_a_cell_counts_and_one_not_run_gives_the_reason():
    script = runpy.run_path(str(BENCHMARKS / "peer_tables.py"))
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
