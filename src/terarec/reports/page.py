"""A report as one HTML file: tiles, plots, facts and tables in rows of cards, rendered by ``page.html.j2``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from terarec.errors import MissingDependencyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Badge:
    """A text on a coloured ground.

    Attributes:
        text: Text.
        level: "" for no colour, "notable" or "large".
    """

    text: str
    level: Literal["", "notable", "large"] = ""


Cell: TypeAlias = str | Badge


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A figure to see first: its name, the figure, and a remark."""

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
    """Return the page as HTML; all text is escaped, plots are put in as they are.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MissingDependencyError("jinja2", "not installed, expected pip install 'terarec[report]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page)
