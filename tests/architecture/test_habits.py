"""Rules that the sources keep: nothing pickled, one reader of the environment, all documented."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import all_nodes, all_sources, all_trees

MAY_READ_ENVIRONMENT = {"kernels/environment.py"}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def called(node: ast.AST) -> str:
    """``name`` or ``module.name`` of what a call calls, "" of other nodes and of longer ways to a function."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return f"{node.func.value.id}.{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def undocumented(tree: ast.Module) -> Iterator[str]:
    if tree.body and not ast.get_docstring(tree):
        yield "the module"
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        # The function after its overloads has their documentation.
        is_overload = public and "overload" in {ast.unparse(found) for found in node.decorator_list}
        if public and not is_overload and not ast.get_docstring(node):
            yield f"line {node.lineno}: {node.name}"


def test_the_whole_package_is_looked_at() -> None:
    assert {"errors.py", "etl/columns.py", "kernels/triton/device/update.py"} < set(all_sources())


def test_nothing_is_pickled_or_evaluated() -> None:
    wrong = []
    for file, nodes in all_nodes().items():
        for node in nodes:
            if {"pickle", "cloudpickle", "joblib", "dill"} & {name.split(".")[0] for name in imported(node)}:
                wrong.append(f"{file}:{node.lineno} imports {imported(node)}")
            if called(node) in {"eval", "exec", "torch.load", "torch.save"}:
                wrong.append(f"{file}:{node.lineno} calls {called(node)}")
    assert not wrong


def test_the_environment_is_read_in_one_file() -> None:
    readers = {file for file, text in all_sources().items() if re.search(r"os\.(environ|getenv)", text)}
    assert readers <= MAY_READ_ENVIRONMENT


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


def test_public_things_are_documented() -> None:
    trees = all_trees().items()
    assert not [f"{file}: {thing} has no docstring" for file, tree in trees for thing in undocumented(tree)]


def test_no_room_of_leftovers() -> None:
    unnamed = {"utils", "common", "misc", "helpers"}
    assert not [file for file in all_sources() if unnamed & set(Path(file).with_suffix("").parts)]
    assert not [file for file, text in all_sources().items() if "TODO" in text]


def test_no_constructor_of_a_god_object() -> None:
    wrong = []
    for file, nodes in all_nodes().items():
        # A kernel's parameters are what its launch hands over, one by one; `device` holds nothing but kernels.
        if {"cli", "device"} & set(Path(file).parts):
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                count = len(node.args.args) + len(node.args.kwonlyargs)
                if count > 10:
                    wrong.append(f"{file}:{node.lineno} {node.name} takes {count} parameters")
    assert not wrong
