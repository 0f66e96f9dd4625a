# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md shows the dependency rules as the tests check them."""

from tests.architecture.layers import ALLOWED, ETL
from tests.architecture.page import PAGE, page_with_tables


def test_the_tables_of_the_page_are_current() -> None:
    text = PAGE.read_text()
    assert text == page_with_tables(text), "run: python -m tests.architecture.page"
    assert all(f"| `{package}` |" in text for package in (*ALLOWED, *ETL))
