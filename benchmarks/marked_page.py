# SPDX-License-Identifier: Apache-2.0
"""Write tables between marks into a page of docs/, such as those of the rows of results/."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

Found = Mapping[str, str]
"""A row of results: column -> text."""


def with_marked(text: str, begin: str, end: str, tables: str) -> str:
    """Return the text of a page with `tables` between the lines `begin` and `end`."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{tables}\n\n{end}{rest.split(end)[1]}"


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
        """Return all rows of the results, oldest first; none if nothing has been measured."""
        if not self.rows.exists():
            return []
        with self.rows.open(newline="") as file:
            return list(csv.DictReader(file))

    def with_tables(self, tables: str) -> str:
        """Return the page with `tables` between its marks."""
        return with_marked(self.page.read_text(), self.begin, self.end, tables)
