# SPDX-License-Identifier: Apache-2.0
"""Write the pictures of the documentation's first page, and the README's table of figures.

``python -m tools.pictures`` writes them; run it after new measurements.
"""

from pathlib import Path

from benchmarks.marked_page import with_marked
from tools.picture_files.chart import chart
from tools.picture_files.drawing import drawing
from tools.picture_files.figures import main_figures, table

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: written by python -m tools.pictures -->", "<!-- end of figures -->"


def readme() -> str:
    """Return the README with the table of the newest rows."""
    return with_marked((ROOT / "README.md").read_text(), BEGIN, END, table(main_figures()))


def main() -> None:
    """Write the pictures and the table."""
    images = ROOT / "docs" / "images"
    (images / "main-figures.svg").write_text(chart(main_figures()))
    (images / "log-to-score.svg").write_text(drawing())
    (ROOT / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
