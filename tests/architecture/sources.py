"""The package's sources, read and parsed once."""

import ast
from pathlib import Path

import terarec

PACKAGE = Path(terarec.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
"""File below the package -> its text."""
TREES = {file: ast.parse(text) for file, text in SOURCES.items()}
NODES = {file: list(ast.walk(tree)) for file, tree in TREES.items()}
"""File -> every node of its tree."""
