# SPDX-License-Identifier: Apache-2.0
"""What people read on a terminal: numbers as text, tables and progress bars; and its JSON for programs.

The end of a number's name is its unit: ``_bytes``, ``_seconds``, ``_per_second``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from terarec.spec.checks import printable
from terarec.spec.codec import finite_data

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LABELS = {
    "auc": "AUC",
    "highest_auc": "highest AUC",
    "served_step": "step that is served",
    "best_auc": "best reachable AUC",
    "estimated_bytes": "estimated size",
    "estimated_seconds": "estimated time",
}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_REFRESH_PER_SECOND = 4  # a redraw takes about a millisecond of the cores that work
_GAP = 2
"""Spaces between columns."""
_WIDEST = 1_000_000
"""Columns if the output is not a terminal."""


def label(name: str) -> str:
    """Return the name of a figure for people: ``peak_memory_bytes`` -> ``peak memory``."""
    return _LABELS.get(name) or name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def text(name: str, value: object) -> str:
    """Return the figure `name` with units, thousands separators and four digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return printable(str(value))
    if name == "bytes" or name.endswith("_bytes"):
        return byte_text(value)
    if name == "seconds" or name.endswith("_seconds"):
        return f"{value:,.1f} s"
    if name.endswith("_per_second"):
        return f"{value:,.0f} /s"
    if name == "share" or name.endswith("_share"):
        return percent_text(value)
    if isinstance(value, int):
        # A port or a seed is a name, not a quantity.
        return str(value) if name in {"port", "seed"} else f"{value:,}"
    # Metrics such as an AUC differ in late digits; of other numbers four are read.
    return f"{value:.5f}" if 0.001 <= abs(value) < 10 or value == 0 else f"{value:,.4g}"


def metric_text(value: float, digits: int = 5) -> str:
    """Return the value of a metric; "undefined" for NaN."""
    return "undefined" if math.isnan(value) else f"{value:.{digits}f}"


def byte_text(count: float) -> str:
    """Return a number of bytes in binary units: ``1610612736`` -> ``1.5 GiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTE_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:,.0f} B" if power == 0 else f"{count:,.1f} {_BYTE_UNITS[power]}"


def duration_text(seconds: float) -> str:
    """Return a time in its two largest units: ``3720`` -> ``1 h 02 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def percent_text(share: float) -> str:
    """Return a share in percent: ``0.0125`` -> ``1.25 %``."""
    return f"{100 * share:.2f} %"


def number_text(number: float) -> str:
    """Return a number to four digits, without an exponent for common sizes."""
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e10 else f"{number:.4g}"


def setting_text(value: object) -> str:
    """Return a value of `terarec.spec.to_data` in words; a nested spec is its kind and its fields."""
    if isinstance(value, Mapping):
        words = [f"{name.replace('_', ' ')} {_part(part)}" for name, part in value.items() if name != "kind"]
        return ", ".join([value["kind"], *words] if "kind" in value else words) or "none"
    if isinstance(value, list):
        is_sizes = all(isinstance(item, int) for item in value)
        return ("-" if is_sizes else ", ").join(map(setting_text, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _part(value: object) -> str:
    """Return `setting_text` of a part of a value, in brackets if it has commas."""
    words = setting_text(value)
    return f"({words})" if ", " in words or (isinstance(value, Mapping) and value) else words


class Bar:
    """A progress bar, redrawn in place; it disappears at the end, and is not drawn where the console is not a terminal.

    Args:
        console: Console to draw on.
        words: Description of the work.
        unit: Unit of the positions, such as "rows".
    """

    def __init__(self, console: Console, words: str, unit: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),
            TextColumn("{task.fields[remark]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=_REFRESH_PER_SECOND,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(words, total=1, remark="", visible=False)

    @property
    def is_drawn(self) -> bool:
        """True where the console is a terminal, which shows the bar."""
        return not self._progress.disable

    @property
    def speed(self) -> float:
        """Units a second; 0 while unknown."""
        return self._progress.tasks[0].speed or 0.0

    def start(self) -> None:
        """Start drawing."""
        self._progress.start()

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def move(self, position: int, total: int, *, words: str | None = None, remark: str = "") -> None:
        """Draw the bar at `position` of `total`, with other words if given and a remark such as the rate."""
        self._progress.update(
            self._task, description=words, completed=position, total=total, remark=remark, visible=True
        )


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
        """Draw a progress bar on stderr while the block runs; nothing is drawn if stderr is not a terminal."""
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
    """Print `data` as one line of JSON on stdout; NaN and infinity, which JSON lacks, become null."""
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
