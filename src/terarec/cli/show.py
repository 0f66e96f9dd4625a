"""Output of a command: progress and figures as text, or one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from terarec.reports.text import Bar, label, text
from terarec.spec.codec import finite_data
from terarec.spec.quoting import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_GAP = 2
"""Spaces between columns."""
_WIDEST = 1_000_000
"""Columns of a terminal that is none."""


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, position: int, total: int, *, words: str | None = None, rate: str | None = None) -> None:
        """Move to `position` of `total` in the bar's unit; `words` name the work, and `rate` is shown as its speed."""


class Show:
    """Writes a command's output to stdout; with ``--json`` stderr, so that stdout ends with the JSON object.

    Attributes:
        console: For what a person keeps: figures and tables.
        progress_console: Stderr, for bars.
    """

    def __init__(self, *, as_json: bool) -> None:
        from rich.console import Console

        self.as_json = as_json
        # Programs read the last line of stdout; people see the rest on the terminal all the same.
        self.console: Console = Console(stderr=as_json, highlight=False)
        if not self.console.is_terminal:
            self.console.width = _WIDEST  # a file or a program takes rows whole, however long they are
        self.progress_console: Console = Console(stderr=True, highlight=False)

    def line(self, words: str) -> None:
        """Print one plain line; square brackets are not markup."""
        self.console.print(printable(words), markup=False, soft_wrap=True)

    def result(self, title: str, figures: Mapping[str, Any]) -> None:
        """End a command: its figures as text and, with ``--json``, as JSON."""
        self.figures(title, figures)
        self.json(figures)

    def figures(self, title: str, figures: Mapping[str, Any]) -> None:
        """Print figures one under the other without lists, objects and unknown ones; nothing for no figures."""
        from rich.text import Text

        shown = {
            name: value
            for name, value in figures.items()
            if value is not None and not isinstance(value, Mapping | list | tuple)
        }
        if not shown:  # a title alone is as wide as the console, which is a million columns where it is no terminal
            return
        table = _table(title, ["", ""], ["left", "left"])
        for name, value in shown.items():
            table.add_row(label(name), Text(text(name, value)))
        self.console.print(table)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print equally shaped rows under a header, without columns of which nothing is known; nothing for no rows."""
        from rich.text import Text

        if not rows:
            return
        # Rows of one kind may lack a figure, such as the share of missing values of a label.
        columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
        numeric = [any(isinstance(row[name], int | float) for row in rows) for name in columns]
        cells = [[text(name, row[name]) for name in columns] for row in rows]
        headers = [printable(label(name)) for name in columns]
        sides = ["right" if is_num else "left" for is_num in numeric]
        for places in self._groups([headers, *cells]):
            table = _table(title, [headers[place] for place in places], [sides[place] for place in places])
            for row_cells in cells:
                table.add_row(*(Text(row_cells[place]) for place in places))
            self.console.print(table)

    def _groups(self, rows: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return columns to show side by side: all, or on a narrow terminal as many as fit with the first."""
        from rich.cells import cell_len

        widths = [max(map(cell_len, column)) + _GAP for column in zip(*rows, strict=True)]
        groups = [[0]]
        for place in range(1, len(widths)):
            if len(groups[-1]) > 1 and sum(widths[one] for one in (*groups[-1], place)) > self.console.width:
                groups.append([0])
            groups[-1].append(place)
        return groups

    def json(self, data: Mapping[str, Any]) -> None:
        """Print `data` as the last line of stdout, if ``--json`` was given."""
        if self.as_json:
            print_json(data)

    @contextmanager
    def progress(self, words: str, unit: str) -> Iterator[Advance]:
        """Draw a progress bar on stderr while the block runs; nothing is drawn where stderr is no terminal."""
        bar = Bar(self.progress_console, words, unit)

        def advance(position: int, total: int, *, words: str | None = None, rate: str | None = None) -> None:
            speed = f"{bar.speed:,.0f} {unit}/s" if bar.speed else ""
            bar.move(position, total, words=words, remark=speed if rate is None else rate)

        bar.start()
        try:
            yield advance
        finally:
            bar.stop()


def print_json(data: Mapping[str, Any]) -> None:
    """Print `data` as one line of JSON on stdout; numbers that JSON has no words for become null."""
    sys.stdout.write(json.dumps(finite_data(data), allow_nan=False, default=str) + "\n")
    # Now, as a server runs on, and whoever started it waits for its address.
    sys.stdout.flush()


def _table(title: str, headers: Sequence[str], justify: Sequence[Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        # Texts and not strings, in which rich reads "[...]" as its markup.
        title=Text(printable(title), style="bold"),
        title_justify="left",
        show_header=any(headers),
        box=None,
        padding=(0, _GAP, 0, 0),
    )
    for header, side in zip(headers, justify, strict=True):
        table.add_column(Text(header), justify=side, overflow="fold")
    return table
