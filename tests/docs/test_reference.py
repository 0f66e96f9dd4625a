# SPDX-License-Identifier: Apache-2.0
"""The pages of the API reference describe every public name at the top of the package."""

import re
from pathlib import Path

import terarec

PAGES = Path(__file__).parents[2] / "docs" / "reference"


def test_the_reference_describes_every_name_at_the_top():
    described = {name for page in PAGES.glob("*.md") for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)}
    last_names = {name.rpartition(".")[2] for name in described}
    errors = {"TerarecError"} if "terarec.errors" in described else set()
    assert set(terarec.__all__) - {"__version__"} <= last_names | errors
