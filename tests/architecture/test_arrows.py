"""No room imports another than its line in the floor plan names; imports inside functions count too."""

import ast
from collections.abc import Sequence

from tests.architecture.rooms import ALLOWED, ETL
from tests.architecture.sources import NODES

ROOM_OF = {file: file.split("/")[0].removesuffix(".py") for file in NODES if file not in ("__init__.py", "__main__.py")}


def type_checking_lines(nodes: Sequence[ast.AST]) -> set[int]:
    """Lines under ``if TYPE_CHECKING:``, which never run."""
    lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imported_modules(nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    """(line, module) of every import from terarec among the nodes of a tree."""
    skipped = type_checking_lines(nodes)
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            modules = [node.module or ""]
            if node.module == "terarec":
                modules = [f"terarec.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        if node.lineno in skipped:
            continue
        found += [(node.lineno, module) for module in modules if module.startswith("terarec.")]
    return found


def test_imports_follow_the_floor_plan() -> None:
    assert set(ALLOWED) == set(ROOM_OF.values()), "docs/architecture.md, tests/architecture/rooms.py"
    wrong = []
    for file, room in ROOM_OF.items():
        allowed = ALLOWED[room] | {"errors", room, "__version__"}
        found = [(line, module.split(".")[1]) for line, module in imported_modules(NODES[file])]
        wrong += [f"{file}:{line}: {room} imports {other}" for line, other in found if other not in allowed]
    assert not wrong


def test_imports_inside_etl_follow_its_own_plan() -> None:
    room_of = {file: file.split("/")[1].removesuffix(".py") for file in NODES if file.startswith("etl/")}
    del room_of["etl/__init__.py"]
    assert set(ETL) == set(room_of.values()), "docs/architecture.md, tests/architecture/rooms.py"
    wrong = []
    for file, room in room_of.items():
        modules = [(line, module.split(".")) for line, module in imported_modules(NODES[file])]
        found = [(line, parts[2]) for line, parts in modules if parts[1] == "etl"]
        wrong += [f"{file}:{line}: {room} imports {other}" for line, other in found if other not in ETL[room] | {room}]
    assert not wrong


def test_the_plan_has_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {room for room, below in ALLOWED.items() if room not in done and below <= done}
        assert ready, f"circle among {sorted(set(ALLOWED) - done)}"
        done |= ready


def test_the_reader_of_imports_sees_every_form() -> None:
    source = "import terarec.data.reader\nfrom terarec import ops\ndef f():\n    from terarec.nn.mlp import MLP\n"
    found = imported_modules(list(ast.walk(ast.parse(source))))
    assert found == [(1, "terarec.data.reader"), (2, "terarec.ops"), (4, "terarec.nn.mlp")]
