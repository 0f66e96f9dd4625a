"""Every tutorial runs as its reader would run it: block by block, in an empty directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_blocks_of_a_tutorial_run(page: Path, tmp_path: Path) -> None:
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", COLUMNS="120")
    assert blocks(page)
    for language, code in blocks(page):
        command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{language}:\n{code}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r"([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    assert navigation == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
