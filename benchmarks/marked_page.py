"""Tables in a page of docs/ that are written from the rows of results/."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

Found = Mapping[str, str]
"""A row of results: column -> text."""


class MarkedPage(NamedTuple):
    """A page whose tables are between two marks.

    Attributes:
        rows: Results that the tables show.
        page: The page.
        begin: Line above the tables.
        end: Line below them.
    """

    rows: Path
    page: Path
    begin: str
    end: str

    def read_rows(self) -> list[Found]:
        """Return all rows of the results, oldest first; none where nothing was measured yet."""
        if not self.rows.exists():
            return []
        with self.rows.open(newline="") as file:
            return list(csv.DictReader(file))

    def with_tables(self, tables: str) -> str:
        """Return the page with `tables` between its marks."""
        before, rest = self.page.read_text().split(self.begin)
        return f"{before}{self.begin}\n\n{tables}\n\n{self.end}{rest.split(self.end)[1]}"
