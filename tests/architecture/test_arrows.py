"""No room imports another than its line in the floor plan names; imports inside functions count too."""

import ast
from pathlib import Path

import pytest

import terarec
from tests.architecture.rooms import ALLOWED

PACKAGE = Path(terarec.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ALLOWED)


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def type_checking_lines(tree: ast.AST) -> set[int]:
    """Lines under ``if TYPE_CHECKING:``, which never run."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imported_rooms(source: str) -> list[tuple[int, str]]:
    """(line, room) of every import of a terarec room in `source`."""
    tree = ast.parse(source)
    skipped = type_checking_lines(tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
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
        found += [(node.lineno, module.split(".")[1]) for module in modules if module.startswith("terarec.")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_floor_plan(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is not in the floor plan (docs/architecture.md, tests/architecture/rooms.py)"
    allowed = ALLOWED[room] | {"errors", room, "__version__"}
    wrong = [
        f"line {line}: {room} imports {other}"
        for line, other in imported_rooms(path.read_text())
        if other not in allowed
    ]
    assert not wrong


def test_the_plan_has_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {room for room, below in ALLOWED.items() if room not in done and below <= done}
        assert ready, f"circle among {sorted(set(ALLOWED) - done)}"
        done |= ready


def test_the_reader_of_imports_sees_every_form() -> None:
    source = "import terarec.data.reader\nfrom terarec import ops\ndef f():\n    from terarec.nn.mlp import MLP\n"
    assert imported_rooms(source) == [(1, "data"), (2, "ops"), (4, "nn")]
