# SPDX-License-Identifier: Apache-2.0
"""A rule of the sources that no linter knows: errors have their place apart from the problem."""

import ast
import builtins
import re

from tests.architecture.sources import all_nodes


def called(node: ast.AST) -> str:
    """Return ``name`` or ``module.name`` of what a call calls, "" for other nodes and longer ways to a function."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return f"{node.func.value.id}.{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def test_errors_get_their_place_apart_from_the_problem() -> None:
    """``ConfigError("rows", "got 3, ...")`` sets `where`; ``ConfigError("rows: got 3, ...")`` does not."""
    wrong = []
    for file, nodes in all_nodes().items():
        for node in nodes:
            if re.fullmatch(r"[A-Z]\w+Error", called(node)) and not hasattr(builtins, called(node)):
                first, *others = node.args or [None]
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                is_joined = any(isinstance(part, ast.Constant) and ": " in str(part.value) for part in parts)
                # The message about a library that is missing has no place; it ends in ": pip install ...".
                # An error with fields of its own has them besides its message.
                if is_joined and not others and not node.keywords and called(node) != "MissingDependencyError":
                    wrong.append(f"{file}:{node.lineno} {called(node)}")
    assert not wrong
