# SPDX-License-Identifier: Apache-2.0
"""Each source file names the license of the package in its first line."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "csrc", "tests", "benchmarks", "tools", "examples", "docs", "deploy")
COMMENTS = {
    **dict.fromkeys((".py", ".pyi", ".toml", ".txt", ".yaml", ".yml", ".service"), "#"),
    **dict.fromkeys((".cpp", ".h", ".inc"), "//"),
}


def source_files() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in COMMENTS]
    return [path for path in files if path.suffix != ".txt" or path.name == "CMakeLists.txt"]


def test_each_source_file_names_the_license_first() -> None:
    expression = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    files = source_files()
    assert {path.suffix for path in files} == set(COMMENTS)
    wrong = []
    for path in files:
        with path.open() as file:
            if file.readline() != f"{COMMENTS[path.suffix]} SPDX-License-Identifier: {expression}\n":
                wrong.append(path.relative_to(ROOT).as_posix())
    assert not wrong, f"the first line must be: # SPDX-License-Identifier: {expression}"
