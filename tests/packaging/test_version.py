# SPDX-License-Identifier: Apache-2.0
"""The version stands in ``terarec/__init__.py``; what else names it agrees."""

import re
from importlib.metadata import version
from pathlib import Path

import terarec

ROOT = Path(__file__).parents[2]


def test_the_installed_distribution_has_the_version_of_the_package() -> None:
    """The build reads it there; after a change, ``make venv`` installs the package again."""
    assert version("terarec") == terarec.__version__
    assert "\nversion" not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [terarec.__version__]


def test_the_newest_release_of_the_changelog_is_the_version_of_the_package() -> None:
    releases = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == terarec.__version__
