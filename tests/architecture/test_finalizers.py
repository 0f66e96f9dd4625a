# SPDX-License-Identifier: Apache-2.0
"""No finalizer waits: each is on a short list, and `tests.test_closer` collects an instance of each under all locks."""

import ast
import functools
from collections.abc import Iterator

from tests.architecture.sources import all_nodes
from tests.finalizer_cases import OWNERS

FINALIZERS = {"closer.Closer.__init__", "formats.block._Memory.__del__", "kernels.slots.Pin.__del__"}
"""Functions that are a ``__del__`` or register a finalizer or a callback of a weak reference."""

READERS = {
    "etl.source.arrow_files.ParquetReader.parts",
    "etl.source.arrow_files.IpcReader.parts",
    "etl.source.arrow_files.parquet_tables",
    "etl.source.text.read_text",
    "etl.spark.read._row_groups",
    "etl.spark.tasks.on_items",
    "etl.spark.tasks.on_sorted",
    "formats.hugectr.parquet.RowGroupPieces._batches",
    "serve.publishing._pieces",
    "tensorflow.joining._callers",
}
"""Generators that at their end only close a file or sockets that they read, or nothing, which waits for nothing."""


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[ast.AST]]]:
    """Return each function of a module or a class with its name before it, and its `own` nodes behind it."""
    named = []
    for file, nodes in all_nodes().items():
        module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        classes = {id(inner): outer.name for outer in nodes if isinstance(outer, ast.ClassDef) for inner in outer.body}
        named += [
            (".".join(filter(None, (module, classes.get(id(node)), node.name))), node, list(own(node)))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    return named


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, without those of functions inside."""
    left = [*ast.iter_child_nodes(node)]
    while left:
        child = left.pop()
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(child)


def called(node: ast.AST) -> str:
    """Return the name that a call calls, without its module."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    function = function.value if isinstance(function, ast.Subscript) else function
    return getattr(function, "attr", getattr(function, "id", ""))


def has_callback(node: ast.AST) -> bool:
    is_reference = called(node) in ("ref", "proxy", "WeakMethod") and "weakref" in ast.unparse(node)
    return called(node) == "finalize" or (is_reference and isinstance(node, ast.Call) and len(node.args) > 1)


def ends_with_work(held: list[ast.AST]) -> bool:
    """Return whether a generator function with these nodes gives items inside ``with`` or ``try ... finally``."""
    blocks = [node for node in held if isinstance(node, ast.With | ast.Try)]
    ending = [block for block in blocks if isinstance(block, ast.With) or block.finalbody]
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for block in ending for node in own(block))


def test_finalizers_are_those_of_the_list() -> None:
    """Finding K1: no finalizer takes a lock, joins a thread or waits; `Closer` does that elsewhere."""
    found = {
        name for name, node, held in functions() if node.name == "__del__" or any(has_callback(inner) for inner in held)
    }
    assert found == FINALIZERS


def test_each_class_with_a_finalizer_is_collected_under_locks() -> None:
    """Finding K1."""
    owners = {
        name.rpartition(".")[0] for name, _, held in functions() if any(called(inner) == "Closer" for inner in held)
    }
    dying = {name.rpartition(".")[0] for name in FINALIZERS if name.endswith("__del__")}
    assert owners | dying == set(OWNERS)


def test_generators_that_wait_at_their_end_are_streams() -> None:
    """Finding K1: a generator that is collected runs its ``finally`` in the collection."""
    found = set()
    for name, node, held in functions():
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        if ends_with_work(held) and not decorators & {"stream", "contextmanager", "asynccontextmanager"}:
            found.add(name)
    assert found == READERS
