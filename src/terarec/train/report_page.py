"""The page of a run's report: plain HTML with its style inside, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light; --ink: #1f2933; --muted: #66727f; --line: #e4e8ec; --blue: #2463b5; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
.sub { color: var(--muted); margin: 2px 0 22px; }
.row { display: grid; gap: 16px; margin-bottom: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.curves { grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
.facts { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 0;
  min-width: 0; }
.tile b { display: block; font-size: 25px; line-height: 1.3; color: var(--blue); font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.card svg { width: 100%; height: auto; display: block; }
.scroll { overflow: auto; }
.curves .scroll { max-height: 330px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
td.n, th.n { text-align: right; padding-right: 18px; }
.facts td:first-child { color: var(--muted); width: 180px; }
.facts td:last-child { overflow-wrap: anywhere; padding-right: 0; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A figure to see first: its name, the figure, and a remark."""

    name: str
    figure: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A titled list of (name, value)."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A titled table; the first column is text, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A whole report; `curves` are (caption, SVG element)."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    curves: Sequence[tuple[str, str]]
    evaluations: Grid
    facts: Sequence[Facts]
    tables: Grid


def render(page: Page) -> str:
    """The page as HTML; all text is escaped, the curves are put in as they are."""
    tiles = "".join(_tile(tile) for tile in page.tiles)
    curves = "".join(f'<figure class="card"><h2>{escape(c)}</h2>{svg}</figure>' for c, svg in page.curves)
    facts = "".join(_facts(facts) for facts in page.facts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><main><h1>{escape(page.title)}</h1><p class="sub">{escape(page.subtitle)}</p>\n'
        f'<div class="row tiles">{tiles}</div>\n<div class="row curves">{curves}{_grid(page.evaluations)}</div>\n'
        f'<div class="row facts">{facts}</div>\n{_grid(page.tables)}</main></body></html>\n'
    )


def _tile(tile: Tile) -> str:
    remark = f"<span>{escape(tile.remark)}</span>" if tile.remark else ""
    return f'<div class="card tile"><span>{escape(tile.name)}</span><b>{escape(tile.figure)}</b>{remark}</div>'


def _facts(facts: Facts) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.rows)
    return f'<section class="card"><h2>{escape(facts.title)}</h2><table>{rows}</table></section>'


def _grid(grid: Grid) -> str:
    if not grid.rows:
        return ""
    classes = ["", *[' class="n"'] * (len(grid.header) - 1)]
    header = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(classes, grid.header, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in grid.rows
    )
    return (
        f'<section class="card"><h2>{escape(grid.title)}</h2>'
        f'<div class="scroll"><table><tr>{header}</tr>{rows}</table></div></section>\n'
    )
