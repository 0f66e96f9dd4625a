# SPDX-License-Identifier: Apache-2.0
"""Draw the curve of tables larger than memory: DLRM's samples per second by the share of rows in fast memory.

For each skew of the keys, tables in tiers with each share take turns with tables in memory. All rows are on the disk,
whose random reads set the limit; see `tiered_sides.py`. Batches are small, so that the rows of one batch fit in a
hundredth of a few million rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from record import RESULTS, append_rows
from tiered_sides import CACHES, TierRow, Turns, plan_of, plan_options

from terarec.reports.page import BLUE, MUTED, ORANGE, plot_style
from terarec.train.devices import keep_freed_memory

NAME = "beyond_memory"


def draw(rows: Sequence[TierRow], path: Path) -> None:
    """Draw a panel for each skew: samples per second by share, the rate in memory and the limit of the disk."""
    from matplotlib.figure import Figure

    skews = sorted({row.skew for row in rows})
    with plot_style():
        figure = Figure(figsize=(3.1 * len(skews) + 0.6, 3.2))
        panels = figure.subplots(1, len(skews), sharex=True, sharey=True, squeeze=False)[0]
        for axes, skew in zip(panels, skews, strict=True):
            mine = sorted((row for row in rows if row.skew == skew), key=lambda row: row.share)
            for cache, style, color in zip(CACHES, ("-o", "-s"), (BLUE, ORANGE), strict=True):
                held = [row for row in mine if row.page_cache == cache]
                shares = [100 * row.share for row in held]
                axes.plot(
                    shares, [row.value for row in held], style, color=color, markersize=3, label=f"page cache {cache}"
                )
                if cache == "dropped":
                    memory = [row.peer_value for row in held]
                    axes.plot(shares, memory, color=MUTED, linewidth=1, label="in memory")
                    limits = [row.limit for row in held]
                    axes.plot(shares, limits, ":", color=ORANGE, linewidth=1.2, label="limit of memory and disk")
            axes.set_xscale("log")
            ticks = sorted({round(100 * row.share, 1) for row in rows})
            axes.set_xticks(ticks, [f"{tick:.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_title(f"Zipf {skew:g}", fontsize=9)
            axes.set_xlabel("rows in fast memory, %")
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("samples/s")
        panels[0].yaxis.set_major_formatter("{x:,.0f}")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0.0))
        figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[
            plan_options(rows=3_000_000, batch=1024, steps=16, warm_steps=8, shares=(1.0, 0.5, 0.25, 0.1, 0.05, 0.01))
        ],
    )
    parser.add_argument("--skews", type=float, nargs="+", default=[0.8, 1.05, 1.2])
    options = parser.parse_args(arguments)
    plan = plan_of(options)
    keep_freed_memory()
    rows: list[TierRow] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        turns = Turns(plan, Path(folder))
        sides = {share: turns.tiered(share) for share in options.shares}
        for skew in options.skews:
            found = turns.rows_of(sides, skew)
            append_rows(NAME, found, dry=options.dry)
            rows += found
        if rows and (options.plot or not options.dry):
            draw(rows, options.plot or RESULTS / f"{NAME}.png")


if __name__ == "__main__":
    main()
