# SPDX-License-Identifier: Apache-2.0
"""The worked examples of CONTRIBUTING.md, carried out on a copy of the package."""

import importlib
import re
import shutil
from pathlib import Path

import terarec
from tests.processes import run_new_python

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
_BLOCK = re.compile(
    r"^```(?:py|toml)\n# src/terarec/(?P<file>\S+), (?P<place>[^\n]+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PREAMBLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, {root!r})
import terarec
assert terarec.__file__.startswith({root!r}), terarec.__file__
ROOT = {root!r}
"""


def edits(section: str) -> list[tuple[str, str, str]]:
    """(file, place, code) of each edit that a section of the page shows."""
    text = PAGE.read_text()
    start = text.index(f"## {section}\n")
    part = text[start : text.find("\n## ", start + 1)]
    return [(found["file"], found["place"], found["code"]) for found in _BLOCK.finditer(part)]


def edited_package(section: str, root: Path) -> Path:
    """Copy the package to `root` and carry out the edits of a section; returns the folder to import from."""
    target = root / "terarec"
    shutil.copytree(Path(terarec.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
    for core in ("_embedding", "_encoding", "_rowfile"):
        library = Path(str(importlib.import_module(f"terarec.kernels.cpu.{core}").__file__))
        shutil.copy(library, target / "kernels" / "cpu" / library.name)
    for file, place, code in edits(section):
        path = target / file
        path.write_text(_edited(path.read_text() if path.exists() else "", place, code))
    return root


def _edited(text: str, place: str, code: str) -> str:
    if place == "new":
        assert not text
        return code
    if place == "at the end":
        return f"{text}\n\n{code}"
    word, _, name = place.partition(" ")
    lines = text.splitlines(keepends=True)
    if place == "imports":
        last = max(index for index, line in enumerate(lines) if line.startswith("from terarec"))
        at = last if lines[last].endswith("(\n") else last + 1
    elif place.startswith("in place of "):
        name = place.removeprefix("in place of ")
        at = next(index for index, line in enumerate(lines) if re.match(rf"\s*{name}\b", line))
        del lines[at]
    elif word == "after":
        at = 1 + next(index for index, line in enumerate(lines) if re.match(rf"{name}\b", line))
    elif word == "before":
        at, code = next(index for index, line in enumerate(lines) if re.match(rf"{name}\b", line)), f"{code}\n\n"
    else:
        expected = "new, imports, at the end, after NAME, before NAME, in NAME or in place of NAME"
        assert word == "in", f"{place!r}: expected {expected}"
        at = 1 + next(index for index, line in enumerate(lines) if re.match(rf"{name}\b.*[(\[{{]$", line))
    return "".join([*lines[:at], code, *lines[at:]])


def run(root: Path, script: str) -> str:
    """Run `script` with the package in `root`; returns what it prints."""
    code = _PREAMBLE.format(root=str(root)) + script
    # Processes of `run_python` have imported the package as it is.
    done = run_new_python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout
