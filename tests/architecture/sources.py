"""The package's sources, read and parsed once, when a test asks for them."""

import ast
import functools
from pathlib import Path

import terarec

PACKAGE = Path(terarec.__file__).parent


@functools.cache
def all_sources() -> dict[str, str]:
    """Return the text of every file by its path below the package."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def all_trees() -> dict[str, ast.Module]:
    """Return the tree of every file."""
    return {file: ast.parse(text) for file, text in all_sources().items()}


@functools.cache
def all_nodes() -> dict[str, list[ast.AST]]:
    """Return every node of the tree of every file."""
    return {file: list(ast.walk(tree)) for file, tree in all_trees().items()}
