# SPDX-License-Identifier: Apache-2.0
"""A package imports only the packages that its dependency rule names; imports inside functions count too."""

import ast
import functools
import re
from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import accumulate

from tests.architecture.layers import ALLOWED, ETL
from tests.architecture.sources import all_nodes

MODULE_NAME = re.compile(r"^terarec(?:\.[a-z][a-z0-9_]*)+")


def package_of() -> dict[str, str]:
    """Return the package of every file."""
    files = [file for file in all_nodes() if file not in ("__init__.py", "__main__.py")]
    return {file: file.split("/")[0].removesuffix(".py") for file in files}


def is_module(name: str) -> bool:
    """Return whether `name` is a module or package of terarec, and not the name of a format."""
    path = name.removeprefix("terarec.").replace(".", "/")
    return not {f"{path}.py", f"{path}/__init__.py"}.isdisjoint(all_nodes())


@functools.cache
def imported_by(file: str) -> list[tuple[int, str]]:
    """Return the `imported_modules` of a file of the package."""
    return imported_modules(all_nodes()[file])


def imported_modules(nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    """Return (line, module or name in a module) of every import from terarec among the nodes of a tree.

    Imports for type checkers count, and so does the text of a module's name in a file that calls `import_module`.
    """
    found: list[tuple[int, str]] = []
    imports_by_name = any("import_module" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif imports_by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [name for name in MODULE_NAME.findall(node.value) if is_module(name)]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.startswith("terarec.")]
    return found


def dependencies() -> dict[str, set[str]]:
    """Return the modules that each module loads: those that it imports and the packages in which they are."""
    module_of = {file: f"terarec/{file}".removesuffix(".py").replace("/", ".") for file in all_nodes()}
    module_of = {file: name.removesuffix(".__init__") for file, name in module_of.items()}
    known = set(module_of.values()) - {"terarec"}
    found: dict[str, set[str]] = {}
    for file, module in module_of.items():
        names = [name for _, name in imported_by(file)]
        loaded = [
            [prefix for prefix in accumulate(name.split("."), "{}.{}".format) if prefix in known] for name in names
        ]
        # The packages around a module are loaded already: it depends on them only where it imports a name of theirs.
        around = {prefix for prefix in known if f"{module}.".startswith(f"{prefix}.")}
        named = {prefixes[-1] for name, prefixes in zip(names, loaded, strict=True) if prefixes and name not in known}
        found[module] = ({prefix for prefixes in loaded for prefix in prefixes} - around) | (named - {module})
    return found


def test_imports_follow_the_dependency_rules() -> None:
    assert set(ALLOWED) == set(package_of().values()), "docs/architecture.md, tests/architecture/layers.py"
    wrong = []
    for file, package in package_of().items():
        allowed = ALLOWED[package] | {"errors", package, "__version__"}
        found = [(line, module.split(".")[1]) for line, module in imported_by(file)]
        wrong += [f"{file}:{line}: {package} imports {other}" for line, other in found if other not in allowed]
    assert not wrong


def test_the_core_does_not_need_the_satellites() -> None:
    """Who reads the core may ignore `apps`: commands and scripts of HugeCTR alone use it."""
    importers = {
        file: package
        for file, package in package_of().items()
        if any(name.split(".")[1] == "apps" for _, name in imported_by(file))
    }
    assert set(importers.values()) <= {"apps", "cli", "hugectr"}, importers


def test_imports_inside_etl_follow_its_dependency_rules() -> None:
    part_of = {file: file.split("/")[1].removesuffix(".py") for file in all_nodes() if file.startswith("etl/")}
    del part_of["etl/__init__.py"]
    assert set(ETL) == set(part_of.values()), "docs/architecture.md, tests/architecture/layers.py"
    wrong = []
    for file, part in part_of.items():
        modules = [(line, module.split(".")) for line, module in imported_by(file)]
        found = [(line, names[2]) for line, names in modules if names[1] == "etl"]
        wrong += [f"{file}:{line}: {part} imports {other}" for line, other in found if other not in ETL[part] | {part}]
    assert not wrong


def test_no_packages_import_each_other() -> None:
    imported: dict[str, set[str]] = {package: set() for package in package_of().values()}
    for file, package in package_of().items():
        imported[package] |= {module.split(".")[1] for _, module in imported_by(file)} - {package}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the packages


def test_no_modules_import_each_other() -> None:
    """Imports inside functions count: a circle that they hide is one for a reader."""
    TopologicalSorter(dependencies()).prepare()  # raises CycleError, which names the modules


def test_every_form_of_import_is_found() -> None:
    source = """import terarec.data.reader
from terarec import ops
def f():
    from terarec.nn.dense import MLP
if TYPE_CHECKING:
    from terarec.etl import engine
import_module("terarec.cli.app")
import_module(f"terarec.kernels.{name}")
"""
    found = sorted(imported_modules(list(ast.walk(ast.parse(source)))))
    assert found == [
        (1, "terarec.data.reader"),
        (2, "terarec.ops"),
        (4, "terarec.nn.dense.MLP"),
        (6, "terarec.etl.engine"),
        (7, "terarec.cli.app"),
        (8, "terarec.kernels"),
    ]
