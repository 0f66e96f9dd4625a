"""The files of Frappe_x1, which the project must not hold: their licence allows research and no passing on."""

import os
from pathlib import Path

import pytest

FRAPPE = Path(os.environ.get("TERAREC_FRAPPE_X1", Path(__file__).parents[3] / "shared/data/frappe_x1"))
"""Where they lie beside a checkout, or where the environment says."""

needs_frappe = pytest.mark.skipif(
    not (FRAPPE / "valid.csv.gz").is_file(),
    reason=f"no Frappe_x1 in {FRAPPE}: its licence keeps it out of the project; TERAREC_FRAPPE_X1 names its directory",
)
