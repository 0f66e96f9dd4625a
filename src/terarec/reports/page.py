# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file: tiles, plots, facts and tables in rows of cards, rendered by ``page.html.j2``."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias
from unicodedata import east_asian_width

from terarec.errors import MissingDependencyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Badge:
    """A text on a coloured ground.

    Attributes:
        text: Text.
        level: "" for no colour, "good", "notable" or "large".
    """

    text: str
    level: Literal["", "good", "notable", "large"] = ""


Cell: TypeAlias = str | Badge


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A key figure: its name, the figure, and a remark."""

    kind: ClassVar[str] = "tile"
    name: str
    figure: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A titled SVG element, which is not escaped."""

    kind: ClassVar[str] = "plot"
    title: str
    svg: str
    badge: Badge | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A titled list of (name, value)."""

    kind: ClassVar[str] = "facts"
    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A titled table; the first column is text, the others are numbers. Without rows it is not shown."""

    kind: ClassVar[str] = "grid"
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Cards next to each other, as many as the window has room for.

    Attributes:
        width: "narrow" for tiles, "medium" for plots and facts, "wide" for one card.
        cards: The cards.
    """

    width: Literal["narrow", "medium", "wide"]
    cards: Sequence[Tile | Plot | Facts | Grid]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    rows: Sequence[Row]


def render(page: Page) -> str:
    """Return the page as HTML; all text is escaped, plots are inserted unchanged."""
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MissingDependencyError("jinja2", "not installed, expected pip install 'terarec[report]'") from error
    # Strict: a misspelled field of the template is an error and not an empty cell.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page)


INK, MUTED, LINES = "#1f2933", "#66727f", "#e4e8ec"
BLUE, PALE_BLUE, GREEN, ORANGE, PURPLE, OCHRE = "#2463b5", "#9dbde6", "#2a8a57", "#d9622b", "#8a4fb0", "#a8871c"

_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    LINES: "line",
    BLUE: "blue",
    PALE_BLUE: "pale-blue",
    GREEN: "green",
    ORANGE: "orange",
    PURPLE: "purple",
    OCHRE: "ochre",
}
"""Colour of a plot -> the variable of the page that has it, which is another colour in dark mode."""

_STYLE: Any = {
    # The card behind a plot shows through.
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text, drawn by whichever fonts the reader has: a third of the size
    # Ids are random otherwise, and equal reports would have different bytes.
    "svg.hashsalt": "terarec",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINES,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Draw in the style of reports while this lasts."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MissingDependencyError("matplotlib", "not installed, expected pip install 'terarec[report]'") from error
    with mpl.rc_context(_STYLE):
        yield


def new_axes(height: float) -> tuple[Any, Any]:
    """Return a figure of one card's width and this height in inches, and its axes."""
    # Not pyplot, which looks for a window system and keeps every figure until it is closed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, height))
    return figure, figure.subplots()


def _set_margins(figure: Any) -> None:
    """Leave room for the labels around the axes, by their number of letters.

    Matplotlib's constrained layout measures all texts, which takes as long as drawing them.
    """
    (axes,) = figure.axes
    width, height = figure.get_size_inches()
    labels = axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())
    # Letters of East Asian scripts take the room of two.
    letters = max((sum(1 + (east_asian_width(letter) in "WF") for letter in label) for label in labels), default=0)
    # Inches: 0.08 for a letter of 9 points, 0.2 for the turned label of the axis; letters are larger on a phone.
    left = 0.2 + 0.08 * letters + (0.2 if axes.get_ylabel() else 0.0)
    figure.subplots_adjust(
        left=min(left / width, 0.6), right=1 - 0.15 / width, bottom=0.45 / height, top=1 - 0.32 / height
    )


def svg_element(figure: Any, name: str) -> str:
    """Return the figure as an element for a page: no prolog, no metadata, and ids that begin with `name`."""
    buffer = io.StringIO()
    _set_margins(figure)
    with warnings.catch_warnings():
        # The page's reader draws the texts, by whichever fonts exist there.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    # Ids count for a whole page, in which every plot has an element "axes_1".
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
