# SPDX-License-Identifier: Apache-2.0
"""The chart of the main figures: for each, a point by alternative on a scale of ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.picture_files.figures import Figure, Peer, short
from tools.picture_files.palette import as_file

from terarec.reports.page import BLUE, INK, MUTED, PALE_BLUE, new_axes, plot_style, svg_element


def chart(figures: Sequence[Figure]) -> str:
    """Return the chart as an SVG file."""
    with plot_style():
        picture, axes = new_axes(0.55 * sum(max(len(figure.peers), 2) for figure in figures) / 2 + 1.0)
        picture.set_figwidth(7.6)
        heights: list[float] = []
        height = 0.0
        for figure in figures:
            middle = height - (len(figure.peers) - 1) / 2
            heights.append(middle)
            for peer in figure.peers:
                _draw(axes, height, peer)
                height -= 1.0
            height -= 0.7
        _scale(axes, figures, heights)
        return as_file(svg_element(picture, "main-figures"))


def _draw(axes: Any, height: float, peer: Peer) -> None:
    axes.plot([1.0, peer.ratio], [height, height], color=PALE_BLUE, linewidth=5, solid_capstyle="butt")
    if peer.cells > 1:
        axes.plot([peer.low, peer.high], [height, height], color=BLUE, linewidth=1)
    axes.plot([peer.ratio], [height], "o", color=BLUE, markersize=5)
    right = max(peer.high, peer.ratio)
    axes.annotate(
        f"{short(peer.ratio)}  {peer.name}", (right, height), (7, 0), textcoords="offset points", va="center", color=INK
    )


def _scale(axes: Any, figures: Sequence[Figure], heights: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(1.0, 130.0)
    ticks = (1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(heights, [figure.title for figure in figures], color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_color(MUTED)
    axes.set_title(
        "terarec's speed, in times that of ... (lines: the range of cells)", fontsize=9, color=MUTED, loc="left"
    )
