# SPDX-License-Identifier: Apache-2.0
"""Every tutorial runs as its reader would run it: block by block, in an empty directory."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from terarec.cli.app import command_line
from tests.params import in_every_run
from tests.processes import Ended, run_python

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of each block; Python blocks in a row share one program, as in a notebook."""
    found = re.findall(r"^```(python|sh)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    joined: list[tuple[str, str]] = []
    for language, code in found:
        if joined and language == joined[-1][0] == "python":
            joined[-1] = (language, joined[-1][1] + "\n" + code)
        else:
            joined.append((language, code))
    return joined


# Commands in processes of their own take 60 s in all: the others run in the workflow of the docs and in the long suite.
@pytest.mark.parametrize("name", in_every_run(["plain-torch"], [page.stem for page in TUTORIALS]))
def test_the_blocks_of_a_tutorial_run(name: str, tmp_path: Path) -> None:
    page = DOCS / "tutorials" / f"{name}.md"
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    assert blocks(page)
    for language, code in blocks(page):
        if language == "python":
            ended = run_python(code, cwd=tmp_path, environment=environment)
        else:
            ended = run_shell(code, tmp_path, environment)
        assert ended.returncode == 0, f"{language}:\n{code}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


def run_shell(code: str, cwd: Path, environment: dict[str, str]) -> Ended:
    """Run code as bash does, up to the first command that fails."""
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_is_valid(page: Path) -> None:
    """Python compiles, and the commands have the options that they are given."""
    for language, code in blocks(page):
        if language == "python":
            compile(code, str(page), "exec")
            continue
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.rstrip("&")) if line.startswith("terarec ") else []
            if words:
                parse(command_line(), words)


def parse(command: Any, words: list[str]) -> None:
    """Parse a command line; what it rejects is raised."""
    context = command.make_context(words[0], words[1:])
    if hasattr(command, "resolve_command"):
        name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(inner.load() if hasattr(inner, "load") else inner, [name, *rest])


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r"([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    assert navigation == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
