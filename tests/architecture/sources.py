# SPDX-License-Identifier: Apache-2.0
"""The package's sources, parsed once, when a test needs them."""

import ast
import functools
from pathlib import Path

import terarec

PACKAGE = Path(terarec.__file__).parent


@functools.cache
def all_nodes() -> dict[str, list[ast.AST]]:
    """Return every node of the tree of every file, by the path of the file below the package.

    Those that say whether a name is read or written are left out: a third of all, which no test looks at.
    """
    return {
        path.relative_to(PACKAGE).as_posix(): [
            node for node in ast.walk(ast.parse(path.read_text())) if not isinstance(node, ast.expr_context)
        ]
        for path in sorted(PACKAGE.rglob("*.py"))
    }
