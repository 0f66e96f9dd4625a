# SPDX-License-Identifier: Apache-2.0
"""Colours of the pictures: those of reports, in the reader's light or dark mode."""

from __future__ import annotations

import re
from pathlib import Path

from terarec.reports import page


def as_file(element: str) -> str:
    """Return an SVG element whose colours are variables of reports as a file of its own, on a ground."""
    ground = "svg { background: var(--card); } text { font-family: system-ui, 'DejaVu Sans', sans-serif; }"
    head, tag, rest = re.split(r"(<svg[^>]*>)", element, maxsplit=1)
    return f"{head}{tag}\n<style>{_variables()}{ground}</style>{rest}"


def _variables() -> str:
    """Return the rules of the reports' page that set the colours of the two modes."""
    template = Path(page.__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    rules = re.search(r":root \{.*?\n\}\n@media \(prefers-color-scheme: dark\) \{.*?\n\}\n", template, re.DOTALL)
    assert rules
    return re.sub(r"\s+", " ", rules[0])
