# SPDX-License-Identifier: Apache-2.0
"""The files of Frappe_x1, which the project must not hold: their licence allows research and no passing on."""

import os
from pathlib import Path

import numpy as np
import pytest

FRAPPE = Path(os.environ.get("TERAREC_FRAPPE_X1", Path(__file__).parents[3] / "shared/data/frappe_x1"))
"""Directory of the files: next to a checkout, or that of the environment variable."""

needs_frappe = pytest.mark.skipif(
    not (FRAPPE / "valid.csv.gz").is_file(),
    reason=f"no Frappe_x1 in {FRAPPE}: its licence keeps it out of the project; TERAREC_FRAPPE_X1 names its directory",
)

COLUMNS = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")


def write_planted(directory: Path, rows: int = 300) -> Path:
    """Return files as those of Frappe_x1, with labels that follow the user and the item."""
    random = np.random.default_rng(0)
    directory.mkdir(parents=True)
    for name in ("train", "valid", "test"):
        values = random.integers(0, 6, (rows, len(COLUMNS)))
        labels = (values[:, 0] + values[:, 1] + random.normal(0, 1, rows) > 5).astype(int)
        lines = [",".join(("label", *COLUMNS)), *(",".join(map(str, row)) for row in np.c_[labels, values])]
        (directory / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return directory
