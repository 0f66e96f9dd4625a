# SPDX-License-Identifier: Apache-2.0
"""The table of results: on the terminal, as CSV, and as the summary for the documentation."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.upstream_files.running import Row

OUTCOMES = ("unchanged", "changed", "not run", "failed")
FIELDS = ("checkout", "group", "file", "outcome", "detail")


def lines(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the lines of the table, and its sums."""
    for row in rows:
        detail = f"  {row.detail}" if row.detail else ""
        yield f"{row.outcome:10}{row.seconds:6.0f} s  {row.case.title}{detail}"
    for group in sorted({row.case.group for row in rows}):
        counts = Counter(row.outcome for row in rows if row.case.group == group)
        yield f"{group}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in OUTCOMES if counts[outcome])}"


def write_csv(rows: Sequence[Row], path: Path, checkout: str) -> None:
    """Put the rows of a checkout into a CSV file, in place of those that are there for the same files."""
    kept = []
    names = {row.case.title for row in rows}
    if path.exists():
        with path.open(newline="") as file:
            kept = [one for one in csv.DictReader(file) if one["checkout"] != checkout or one["file"] not in names]
    fresh = [
        dict(zip(FIELDS, (checkout, row.case.group, row.case.title, row.outcome, row.detail), strict=True))
        for row in rows
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *fresh], key=lambda one: (one["checkout"], one["group"], one["file"])))
