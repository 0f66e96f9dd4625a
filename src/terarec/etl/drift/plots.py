"""Plots of the bins of columns, as SVG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from terarec.errors import MissingDependencyError
from terarec.etl.drift.compare import ColumnDrift
from terarec.spec.quoting import shortened

INK, MUTED, GRID, BLUE, ORANGE = "#1f2933", "#66727f", "#e4e8ec", "#2463b5", "#d9622b"
_LONGEST_NAME, _LONGEST_SIDE = 18, 24
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: a plot has a third of the size
    "svg.hashsalt": "terarec",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "legend.frameon": False,
}


def draw_bins(columns: Sequence[ColumnDrift], reference: str, current: str) -> list[str]:
    """An SVG element for each column: the share of every bin on both sides.

    Args:
        columns: what to draw.
        reference: name of that side.
        current: name of that side.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the drift report needs matplotlib: pip install 'terarec[report]'") from error
    with mpl.rc_context(_STYLE):
        return [_bins(number, column, (reference, current)) for number, column in enumerate(columns)]


def _bins(number: int, column: ColumnDrift, sides: tuple[str, str]) -> str:
    from matplotlib.figure import Figure

    bins = column.bins
    there = np.flatnonzero((bins.reference > 0) | (bins.current > 0))
    figure = Figure(figsize=(5.6, 0.75 + 0.29 * len(there)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(there))
    for counts, side, color, shift in (
        (bins.reference, sides[0], BLUE, -0.2),
        (bins.current, sides[1], ORANGE, 0.2),
    ):
        shares = 100.0 * counts[there] / max(int(counts.sum()), 1)
        axes.barh(places + shift, shares, height=0.38, color=color, label=_short_side(side))
    axes.set_yticks(places, [_short(bins.names[place]) for place in there])
    axes.set_ylim(len(there) - 0.4, -0.6)
    axes.set_xlabel("% of values")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The page's reader draws the texts, by whichever fonts are there.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>p{number}-", text)  # ids that no other plot of the page has


def _short_side(name: str) -> str:
    """The end of a name, where data sets of one name in several directories differ by their splits."""
    return _short(name if len(name) <= _LONGEST_SIDE else "..." + name[3 - _LONGEST_SIDE :], _LONGEST_SIDE)


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    plain = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)
    return shortened(plain, longest).replace("$", r"\$")  # matplotlib reads formulas between dollars
