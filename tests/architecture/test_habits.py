"""House rules that the sources show: nothing pickled, one reader of the environment, all documented."""

import ast
import re
from pathlib import Path

import pytest

import terarec

PACKAGE = Path(terarec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAY_READ_ENVIRONMENT = {"kernels/environment.py"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_pickled_or_evaluated(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {"pickle", "cloudpickle", "joblib", "dill"} & {name.split(".")[0] for name in names}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "torch.save"}, f"line {node.lineno}: {called}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_environment_is_read_in_one_file(path: Path) -> None:
    if relative(path) not in MAY_READ_ENVIRONMENT:
        assert not re.search(r"os\.(environ|getenv)", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_public_things_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"line {node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_room_of_leftovers(path: Path) -> None:
    assert not {"utils", "common", "misc", "helpers"} & set(Path(relative(path)).with_suffix("").parts)
    assert "TODO" not in path.read_text()


def test_no_constructor_of_a_god_object() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            # A kernel's parameters are what its launch hands over, one by one; `device` holds nothing but kernels.
            if isinstance(node, ast.FunctionDef) and not {"cli", "device"} & set(path.parts):
                count = len(node.args.args) + len(node.args.kwonlyargs)
                assert count <= 10, f"{relative(path)}:{node.lineno} {node.name} takes {count} parameters"
