# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs for the site."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Unescape pipes in code of tables, where Markdown needs a backslash and MkDocs' extension keeps it."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
