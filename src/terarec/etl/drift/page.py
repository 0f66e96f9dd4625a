"""The page of a drift report: plain HTML with its style and plots inside, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from terarec.etl.drift.compare import ColumnDrift, DriftReport, number_text

WORTH_A_LOOK, LARGE = 0.1, 0.25
"""Stability indices from which a column is marked; the rule of thumb in docs/drift.md."""

_STYLE = """
:root { color-scheme: light; --ink: #1f2933; --muted: #66727f; --line: #e4e8ec; --blue: #2463b5; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; overflow-wrap: anywhere; }
.sub { color: var(--muted); margin: 2px 0 22px; overflow-wrap: anywhere; }
.grid { display: grid; gap: 16px; margin-bottom: 16px; align-items: start; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); align-items: stretch; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 0 0 16px;
  min-width: 0; }
.grid .card { margin: 0; }
.tile b { display: block; font-size: 25px; line-height: 1.3; color: var(--blue); font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.card svg { width: 100%; height: auto; display: block; }
.scroll { overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
th { color: var(--muted); font-weight: 500; }
.look { background: #fdf0d5; border-radius: 4px; padding: 1px 6px; }
.large { background: #f9d6cd; border-radius: 4px; padding: 1px 6px; }
"""


def render(report: DriftReport, moved: Sequence[ColumnDrift], plots: Sequence[str]) -> str:
    """The page as HTML; all text is escaped, the plots are put in as they are.

    Args:
        report: what is told.
        moved: its columns, the most moved first.
        plots: SVG elements of the first of them.
    """
    title = f"Drift of {report.current.name} from {report.reference.name}"
    cards = "".join(
        f'<figure class="card"><h2>{escape(column.name)} <span class="{_mark(column)}">PSI '
        f"{column.stability_index:.3f}</span></h2>{plot}</figure>"
        for column, plot in zip(moved, plots, strict=False)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1><p class="sub">{escape(_subtitle(report))}</p>\n'
        f'<div class="grid tiles">{_tiles(report, moved)}</div>\n{_splits(report)}{_columns(moved)}'
        f'<div class="grid plots">{cards}</div></main></body></html>\n'
    )


def _subtitle(report: DriftReport) -> str:
    lacking = [
        f"only in {side}: {', '.join(names)}"
        for side, names in (
            (report.reference.name, report.only_in_reference),
            (report.current.name, report.only_in_current),
        )
        if names
    ]
    rows = f"{report.current.rows:,} rows compared with {report.reference.rows:,}"
    return "; ".join([rows, *lacking])


def _tiles(report: DriftReport, moved: Sequence[ColumnDrift]) -> str:
    large = sum(column.stability_index > LARGE for column in moved)
    newest = max(moved, key=lambda column: column.new)
    rarest = max(moved, key=lambda column: column.rare[1] - column.rare[0])
    gone = max(moved, key=lambda column: column.missing[1] - column.missing[0])
    tiles = [
        ("columns of large drift", f"{large} of {len(moved)}", f"PSI above {LARGE}"),
        ("most moved", f"{moved[0].stability_index:.3f}", f"PSI of {moved[0].name}"),
        ("most new values", _percent(newest.new), f"of {newest.name}"),
        ("more rare or unseen", _points(rarest.rare), f"percentage points, {rarest.name}"),
        ("more missing", _points(gone.missing), f"percentage points, {gone.name}"),
    ]
    return "".join(
        f'<div class="card tile"><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(remark)}</span></div>'
        for name, figure, remark in tiles
    )


def _splits(report: DriftReport) -> str:
    names = dict.fromkeys((*report.reference.splits, *report.current.splits))
    rows = [
        (side.name, *(f"{side.splits[name]:,}" if name in side.splits else "-" for name in names), f"{side.rows:,}")
        for side in (report.reference, report.current)
    ]
    return _table("Rows", ("", *names, "compared"), [[escape(cell) for cell in row] for row in rows])


def _columns(moved: Sequence[ColumnDrift]) -> str:
    header = ("column", "kind", "PSI", "JS distance", "missing", "rare or unseen", "new values", "mean")
    rows = [
        [
            escape(column.name),
            column.kind,
            f'<span class="{_mark(column)}">{column.stability_index:.3f}</span>',
            f"{column.distance:.3f}",
            _change(column.missing),
            _change(column.rare) if column.kind == "category" else "",
            _percent(column.new) if column.kind == "category" else "",
            "" if column.means is None else f"{number_text(column.means[0])} &rarr; {number_text(column.means[1])}",
        ]
        for column in moved
    ]
    return _table("Columns, the most moved first", header, rows)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section class="card"><h2>{escape(title)}</h2>'
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div></section>\n'
    )


def _mark(column: ColumnDrift) -> str:
    index = column.stability_index
    return "large" if index > LARGE else "look" if index >= WORTH_A_LOOK else ""


def _percent(share: float) -> str:
    return f"{100.0 * share:.2f} %"


def _points(shares: tuple[float, float]) -> str:
    return f"{100.0 * (shares[1] - shares[0]):+.2f}"


def _change(shares: tuple[float, float]) -> str:
    return f"{_percent(shares[0])} &rarr; {_percent(shares[1])}"
