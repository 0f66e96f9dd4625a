# SPDX-License-Identifier: Apache-2.0
"""Documentation pages and notebooks as code: which to execute, and how.

``python -m tools.upstream_files.pages PAGE.md PRELUDE.py`` executes the blocks of a page in one namespace, and
``python -m tools.upstream_files.pages NOTEBOOK.ipynb`` a notebook in a kernel. Errors name the line or the cell.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import runpy
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.upstream_files.cases import stop_of

import terarec

MISTAKES = ("EmbeddingTraingCache", "Selcte", "hugectr.parquet", "weight_dims = [13, 10]),")
"""Names that upstream's pages misspell, so that they exist in no release, and a parenthesis that ends a call early."""

TRACEBACK = "Traceback (most recent call last)"
_GPU = re.compile(r"NVIDIA driver|not compiled with CUDA|CUDA_HOME|nvidia-smi: not found|device:GPU")
_OURS = str(Path(terarec.__file__).parent)
_BLOCK = re.compile(r"^( *)```\s*python\n(.*?)^ *```", re.M | re.S)


def is_upstreams(error: str) -> bool:
    """Return whether an error, with its traceback, is none of terarec, which must not need what a CPU lacks."""
    return _OURS not in error


def needs_gpu(error: str) -> bool:
    """Return whether an error, with its traceback, is that of upstream's code which asks for a GPU."""
    return is_upstreams(error) and _GPU.search(error) is not None


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the Python blocks of a page, each with the number of its first line."""
    found = []
    for match in _BLOCK.finditer(text):
        indent = len(match.group(1))
        lines = [line[indent:] if line[:indent].isspace() else line for line in match.group(2).splitlines()]
        found.append((text.count("\n", 0, match.start(2)) + 1, "\n".join(lines)))
    return found


def notebook_code(text: str, path: str = "") -> str:
    """Return the Python code of a notebook in one; arguments are those of `notebook_scripts`."""
    return "\n".join(source for _, source in notebook_scripts(text, path))


def notebook_scripts(text: str, path: str = "") -> list[tuple[str, str]]:
    """Return (name, code) of a notebook's own cells under the name "", and of the scripts that it writes.

    Args:
        text: The notebook.
        path: Its path, for the cells that are not run.
    """
    scripts: list[tuple[str, str]] = []
    own: list[str] = []
    cells = json.loads(text)["cells"]
    sources = ["".join(cell["source"]) if cell["cell_type"] == "code" else "" for cell in cells]
    stop = stop_of(path, sources)
    for source in sources[: stop[0] if stop else None]:
        if source.startswith("%%writefile"):
            head, _, body = source.partition("\n")
            name = head.split()[-1].strip("'\"")
            if name.endswith(".py"):
                scripts.append((name, body))
        elif not source.startswith("%%"):
            own.append(re.sub(r"^\s*[!%].*$", "", source, flags=re.M))
    return [("", "\n".join(own)), *scripts]


def notebook_arguments(text: str, name: str) -> list[str]:
    """Return the arguments with which a notebook first runs a script that it writes."""
    sources = ("".join(cell["source"]) for cell in json.loads(text)["cells"])
    run = re.search(rf"^!\s*python3?\s+{re.escape(name)}[ \t]+(.*)$", "\n".join(sources), re.M)
    return run.group(1).split() if run else []


def run_page(path: Path, prelude: Path) -> int:
    """Execute the blocks of a page after `prelude`, which defines what its examples take as given.

    Returns:
        Number of blocks that failed.
    """
    # A file of that many lines shows each block at its place in tracebacks.
    linecache.lazycache(str(path), {})
    names: dict[str, Any] = runpy.run_path(str(prelude))
    failures = 0
    page = path.read_text()
    for line, source in blocks(page):
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            print(f"block at line {line}: not Python: {error.msg}")
            continue
        if any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree)):
            print(f"block at line {line}: incomplete: it leaves out values")
            continue
        if any(mistake in source for mistake in MISTAKES):
            print(f"block at line {line}: incomplete: it misspells something")
            continue
        if all(map(_is_heading, tree.body)):
            for statement in tree.body:
                _leave_call_out(statement)
        ast.increment_lineno(tree, line - 1)
        try:
            exec(compile(tree, str(path), "exec"), names)  # noqa: S102 - what this tool is for
        except Exception as error:
            if _is_of_page(error, path, page):
                print(f"block at line {line}: incomplete: {error}")  # it goes on from what the page does not show
                continue
            last = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            print(f"block at line {line} failed in line {last[-1].lineno if last else line}", file=sys.stderr)
            traceback.print_exc()
            failures += 1
    return failures


def _is_of_page(error: Exception, path: Path, page: str) -> bool:
    """Return whether a page itself uses a name, or a file that it names, that it does not define or write."""
    if isinstance(error, FileNotFoundError):
        named = re.findall(r"[\w./-]*[\w-]+", str(error))
        return any(name in page for name in named if "." in name or "/" in name)
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, NameError) and frames[-1].filename == str(path)


def _is_heading(statement: ast.stmt) -> bool:
    """Return whether a statement is the heading of a call's description, such as ``hugectr.Model.fit()``."""
    call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    is_bare = isinstance(call, ast.Call) and not call.args and not call.keywords
    return is_bare and ast.unparse(call).startswith("hugectr.")


def _leave_call_out(statement: Any) -> None:
    """Leave the name of a heading's call alone: that it exists is all that a heading says."""
    statement.value = statement.value.func


def run_notebook(path: Path) -> int:
    """Execute a notebook in a kernel, in the working directory; return 1 if a cell fails.

    A cell that asks for a GPU is left out, and so are later ones that use its names.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    stop = stop_of(path.as_posix(), [cell.source if cell.cell_type == "code" else "" for cell in notebook.cells])
    if stop is not None:
        number, reason = stop
        print(f"left out from cell {number} on: {reason}")
        del notebook.cells[number:]
    # Without a time limit for each cell: this process has one.
    client = NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": "."}})
    left_out: list[int] = []
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            with suppress(CellExecutionError):
                client.execute_cell(cell, number)
            text = _printed(cell)
            print(text)
            # A cell `!python3 train.py` does not fail itself when its script does.
            if TRACEBACK not in text and not any(one.output_type == "error" for one in cell.get("outputs", ())):
                continue
            error = _last_error(text)
            if needs_gpu(text[text.rfind(TRACEBACK) :]) or (left_out and error.startswith("NameError")):
                left_out.append(number)
            else:
                print(f"cell {number} failed: {error}", file=sys.stderr)
                return 1  # what later cells print follows from it
    if left_out:
        print(f"left out cell{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}: needs a GPU")
    return 0


def _printed(cell: Any) -> str:
    """Return what a cell printed, and its traceback, without colours."""
    texts = (one.get("text", "") or "\n".join(one.get("traceback", ())) for one in cell.get("outputs", ()))
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(texts))


def _last_error(text: str) -> str:
    # IPython writes the name of the error, and what it calls a traceback, above it, too.
    found = re.search(r"^[A-Za-z_.]*(?:Error|Exception)(?::.*)?$", text, re.M)
    return found.group() if found else ""


def main() -> int:
    """Execute a page or a notebook."""
    path = Path(sys.argv[1])
    return run_notebook(path) if path.suffix == ".ipynb" else min(1, run_page(path, Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
