# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/architecture.md, from the dependency rules and the docstrings of the packages.

``python -m tests.architecture.page`` writes them.
"""

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.marked_page import with_marked

from tests.architecture.layers import ALLOWED, ETL
from tests.architecture.sources import PACKAGE

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN = "<!-- {}: written by python -m tests.architecture.page -->"
END = "<!-- end of {} -->"


def page_with_tables(text: str) -> str:
    """Return the page with both tables between their marks."""
    text = with_marked(text, BEGIN.format("packages"), END.format("packages"), table("package", ALLOWED, PACKAGE))
    return with_marked(
        text, BEGIN.format("parts of etl"), END.format("parts of etl"), table("part", ETL, PACKAGE / "etl")
    )


def table(kind: str, rules: Mapping[str, set[str]], folder: Path) -> str:
    """Return a row for each package, lowest layer first: one above the highest that it may import."""

    @functools.cache
    def layer(package: str) -> int:
        return 1 + max((layer(other) for other in rules[package]), default=-1)

    lines = [f"| layer | {kind} | content | may import |", "|---|---|---|---|"]
    for package in sorted(rules, key=lambda package: (layer(package), package)):
        lower = {other for other in rules if layer(other) < layer(package)}
        imports = _names(rules[package], lower)
        lines.append(f"| {layer(package)} | `{package}` | {_content(folder, package)} | {imports} |")
    return "\n".join(lines)


def _names(allowed: set[str], lower: set[str]) -> str:
    """Return the names of packages, or those that are missing where it is almost all of the lower layers."""
    missing = sorted(lower - allowed)
    if len(allowed) > 4 * (1 + len(missing)):
        return "all of lower layers" + (f" but {', '.join(missing)}" if missing else "")
    return ", ".join(sorted(allowed)) or "-"


def _content(folder: Path, package: str) -> str:
    """Return the first paragraph of a package's docstring as Markdown."""
    path = folder / package / "__init__.py"
    path = path if path.exists() else folder / f"{package}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    text = " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    return re.sub(r"\bdocs/(\S+\.md)", r"[\1](\1)", text).removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
