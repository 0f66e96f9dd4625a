# SPDX-License-Identifier: Apache-2.0
"""The README's table and the pictures of the documentation show the newest rows of benchmarks/results."""

import re
from html import unescape

import pytest
from tools.picture_files.drawing import drawing
from tools.picture_files.figures import main_figures, short
from tools.pictures import ROOT, readme

WRITE = "run: python -m tools.pictures"


def test_the_table_of_the_readme_is_current() -> None:
    assert (ROOT / "README.md").read_text() == readme(), WRITE


def test_the_drawing_is_current() -> None:
    assert (ROOT / "docs/images/log-to-score.svg").read_text() == drawing(), WRITE


def test_the_chart_names_every_ratio() -> None:
    """The rest of its bytes depends on the version of Matplotlib."""
    chart = (ROOT / "docs/images/main-figures.svg").read_text()
    texts = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", chart)]
    figures = main_figures()
    assert [text for text in texts if re.match(r"\d\S*x  ", text)] == [
        f"{short(peer.ratio)}  {peer.name}" for figure in figures for peer in figure.peers
    ], WRITE
    assert {figure.title for figure in figures} <= set(texts), WRITE


@pytest.mark.parametrize("name", ["log-to-score", "main-figures"])
def test_a_picture_follows_the_mode_of_its_reader(name: str) -> None:
    text = (ROOT / f"docs/images/{name}.svg").read_text()
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    light, dark = text.split("prefers-color-scheme: dark", maxsplit=1)
    assert used
    assert all(f"--{variable}: #" in mode for variable in used for mode in (light, dark))
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", text)
