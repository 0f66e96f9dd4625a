# SPDX-License-Identifier: Apache-2.0
"""Run a chain of cases in a folder of its own, each file in a process with a time limit."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.upstream_files import setups
from tools.upstream_files.cases import HPS_TF, INSTALLABLE, LEGACY_KERAS, MISTAKES, NOT_HERE, SOK, Case
from tools.upstream_files.changes import CONVERTED, Changes, shrink
from tools.upstream_files.data import LEAST_ROWS, Generated, generate, place_named_files
from tools.upstream_files.pages import TRACEBACK, is_upstreams, needs_gpu, notebook_arguments, notebook_scripts

from terarec.hugectr.alias import MODULES

PROJECT = Path(__file__).resolve().parents[2]
_OLDER_LIBRARIES = Path(__file__).with_name("older_libraries")
_COPIED = (".py", ".json", ".txt", ".ipynb", ".md")
_NO_END = -1
_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np")
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


@dataclass(frozen=True, slots=True)
class Row:
    """Result of a case.

    Attributes:
        case: What was run.
        outcome: "unchanged", "changed", "failed" or "not run".
        detail: The changes; what failed and where; why it was not run.
        generated: Lines about the data that was generated.
        seconds: Time that it took.
    """

    case: Case
    outcome: str
    detail: str = ""
    generated: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings of a run.

    Attributes:
        checkout: Upstream's files.
        release: Release to behave like.
        timeout: Seconds for each file.
    """

    checkout: Path
    release: str
    timeout: float


class Folder:
    """The folder of a chain: ``copy`` has the files, ``root`` stands for the root of upstream's containers.

    Args:
        base: The folder, which is empty.
        options: Settings.
    """

    def __init__(self, base: Path, options: Options) -> None:
        self.copy, self.root, self.work = base / "copy", base / "root", base / "work"
        for folder in (self.copy, self.root, self.work):
            folder.mkdir()
        # Some scripts start at the root of the container.
        (self.root / "onnx_converter").mkdir()
        (self.work / "onnx_converter").symlink_to(self.root / "onnx_converter")
        self._options, self.checkout = options, options.checkout
        self._log = base / "log.txt"
        self.changes: dict[str, Changes] = {}

    def add(self, path: str) -> None:
        """Copy a file and those next to it, with smaller counts."""
        checkout = self.checkout
        folder = (checkout / path).parent
        near = [checkout / path] if path.endswith((".md", ".ipynb")) else sorted(folder.rglob("*"))
        for file in [*near, *sorted((checkout / "test" / "scripts").glob("*.json"))]:
            name = file.relative_to(checkout).as_posix()
            if file.suffix in _COPIED and file.is_file() and name not in self.changes:
                self._copy(name)

    def _copy(self, name: str) -> None:
        text = (self.checkout / name).read_text(errors="replace")
        root = PurePosixPath(self.root)
        target = self.copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith(".ipynb"):
            text, self.changes[name] = shrink(text, root)
        else:
            # By cells: quotation marks inside a notebook's file are escaped.
            notebook, changes = json.loads(text), Changes()
            for cell in notebook["cells"]:
                source, of_cell = shrink("".join(cell["source"]), root)
                cell["source"] = source
                cell.pop("outputs", None)
                if cell["cell_type"] == "code":
                    cell["outputs"] = []
                    for count, numbers in of_cell.counts.items():
                        changes.counts.setdefault(count, {}).update(numbers)
            text, self.changes[name] = json.dumps(notebook), changes
        target.write_text(text)
        # Upstream's jobs make these folders before they start the scripts.
        for found in re.findall(rf"{re.escape(str(self.root))}/[\w./-]*", text):
            path = Path(found)
            (path.parent if path.suffix else path).parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)

    def arguments(self, case: Case) -> list[str]:
        """Return a case's arguments, with paths of this folder."""
        placed = []
        for argument in case.arguments:
            text, _ = shrink(f'"{argument}"', PurePosixPath(self.root))
            text = ",".join(
                part if part.startswith("/") else re.sub(r"^/", f"{self.root}/", part) for part in [text[1:-1]]
            )
            placed.append(str(self.copy / text) if text.startswith("test/scripts/") else text)
        return placed

    def call(self, command: list[str], case: Case | None = None) -> tuple[int, str]:
        """Run a command of this Python in the working directory; return its exit code and output.

        The time limit is that of a file, whether the command runs it or prepares what it needs.
        """
        words = [*_MPIRUN, str(case.processes)] if case is not None and case.processes > 1 else []
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (PROJECT, MODULES, _OLDER_LIBRARIES))),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "TERAREC_HUGECTR_RELEASE": self._options.release,
            "MPLBACKEND": "agg",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        if case is not None and _needs_legacy_keras(case):
            environment[_LEGACY_KERAS] = "1"
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            try:
                code = subprocess.run(
                    [*words, sys.executable, *command],
                    cwd=self.work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=self._options.timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = _NO_END
        with self._log.open("rb") as log:
            log.seek(start)
            return code, log.read().decode(errors="replace")


def _needs_legacy_keras(case: Case) -> bool:
    return any(fnmatch.fnmatch(case.path, pattern) for pattern in LEGACY_KERAS)


def run_chain(chain: list[Case], base: Path, options: Options) -> list[Row]:
    """Run the cases of a chain in `base`."""
    folder = Folder(base, options)
    generated: list[Generated] = []
    rows = []
    for case in chain:
        try:
            rows.append(_run(case, folder, generated, options))
        except Exception as error:  # of this tool: the other cases still have their rows
            rows.append(Row(case, "failed", f"the tool: {type(error).__name__}: {error}"))
    return rows


def _run(case: Case, folder: Folder, generated: list[Generated], options: Options) -> Row:
    if case.reason:
        return Row(case, "not run", case.reason)
    start = time.monotonic()
    folder.add(case.path)
    lines = _prepare(case, folder, generated, options)
    script = folder.copy / case.path
    if case.path.endswith(".md"):
        command = ["-m", "tools.upstream_files.pages", str(script), str(setups.prelude(folder.work))]
    elif case.path.endswith(".ipynb"):
        command = ["-m", "tools.upstream_files.pages", str(script)]
    elif case.is_training_file:
        command = ["-m", "terarec.hugectr", "--compat-release", options.release, "--train", str(script)]
    elif re.search(r"^(?:def test_|class Test)", script.read_text(), re.M):
        command = ["-m", "pytest", "-q", "--tb=native", "-p", "no:cacheprovider", str(script)]
    else:
        command = ["-m", "terarec.hugectr", "--compat-release", options.release, str(script), *folder.arguments(case)]
    code, output = folder.call(command, case)
    outcome, detail = ("", "") if code == 0 else explain(code, output, folder, options)
    for pattern, error, mistake in MISTAKES:
        if outcome == "failed" and fnmatch.fnmatch(case.title, pattern) and error in detail:
            outcome, detail = "not run", f"from {detail.partition(':')[0]} on: {mistake}"
    files = [case.path, *(argument for argument in case.arguments if argument in folder.changes)]
    has_fewer_iterations = any("iterations" in folder.changes[file].counts for file in files)
    missed = _THRESHOLD.match(detail) if outcome == "failed" and has_fewer_iterations else None
    if missed or not outcome:
        changes = "; ".join(str(folder.changes[file]) for file in files if str(folder.changes[file]))
        outcome, detail = ("changed", changes) if changes else ("unchanged", "")
        if _needs_legacy_keras(case):
            detail = f"{detail}; with {_LEGACY_KERAS}=1".removeprefix("; ")
        left_out = re.findall(r"^block at line (\d+): ", output, re.M)
        if left_out:
            detail = f"{detail}; without blocks that are not complete, lines {', '.join(left_out)}".removeprefix("; ")
    if missed:
        detail = (
            f"{detail}; {missed.group(1)}: an AUC below the {missed.group(2)} of upstream's own data and iterations"
        )
    cells = re.findall(r"^left out ((?:from )?cells? .*)$", output, re.M)
    if cells and outcome != "failed":
        reasons = [*([detail] if outcome == "not run" else []), *reversed(cells)]  # the last cells are printed first
        outcome, detail = "not run", "; ".join(reasons)
    return Row(case, outcome, detail, tuple(lines), time.monotonic() - start)


def _prepare(case: Case, folder: Folder, generated: list[Generated], options: Options) -> list[str]:
    """Generate what a case reads; return a line for each file."""
    scripts = {folder.copy / case.path: folder.arguments(case)}
    if case.path.endswith(".ipynb"):
        text, scripts = (folder.copy / case.path).read_text(), {}
        for number, (name, code) in enumerate(notebook_scripts(text, case.path)):
            script = folder.copy / f"{case.path}.{number}.py"
            script.write_text(code)
            scripts[script] = notebook_arguments(text, name) if name else []
    lines = setups.prepare(case, folder)
    if case.path.endswith(".md") or case.path.startswith((*SOK, *HPS_TF)):
        return lines
    out = folder.copy / "demands.json"
    for script, arguments in scripts.items():
        out.unlink(missing_ok=True)
        words = ["-m", "tools.upstream_files.probe", str(out), str(script), *arguments]
        code, _ = folder.call(words)
        if code == _NO_END:
            raise TimeoutError(f"{script.name}: what it reads was not known within {options.timeout:g} s")
        if out.exists():
            made = generate(json.loads(out.read_text()), folder.work, CONVERTED if "onnx" in case.path else LEAST_ROWS)
            generated += made
            lines += [one.note for one in made]
    texts = "\n".join(script.read_text() for script in scripts)
    named = re.findall(r"[\"']((?:\./)?[\w./-]+\.(?:parquet|data|dat))[\"']", texts)
    return lines + place_named_files(named, generated, folder.work)


# Training has ended then: nothing but upstream's data and all of its iterations can reach such a value.
_THRESHOLD = re.compile(r"(line \d+): RuntimeError: Cannot reach the AUC threshold ([\d.]+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_MISSING = re.compile(r"No module named '(\w+)")


def explain(code: int, output: str, folder: Folder, options: Options) -> tuple[str, str]:
    """Return the outcome and the reason of a case that ended with an error."""
    if code == _NO_END:
        return "failed", f"no end within {options.timeout:g} s"
    frames = [(path, line) for path, line in _FRAME.findall(output) if path.startswith(str(folder.copy))]
    blocks = re.findall(r"block at line \d+ failed in line (\d+)|(cell \d+) failed", output)
    place = f"line {frames[-1][1]}" if frames else next((cell or f"line {line}" for line, cell in blocks), "no line")
    if len(blocks) > 1:
        place = f"lines {', '.join(line for line, _ in blocks)}"
    elif frames and Path(frames[-1][0]).name != Path(frames[0][0]).name:
        place = f"{Path(frames[-1][0]).name} {place}"
    errors = [line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    error = errors[-1] if errors else (output.strip().splitlines() or ["no output"])[-1]
    missing = _MISSING.search(error)
    last = output[output.rfind(TRACEBACK) :] if TRACEBACK in output else output
    own = last[last.rfind(str(folder.copy)) + 1 :]  # frames of terarec above the file's are those that started it
    wanted = INSTALLABLE | (NOT_HERE if is_upstreams(own) else {})
    if missing and (reason := wanted.get(missing.group(1))):
        return "not run", f"from {place} on: {reason}"
    if needs_gpu(own):
        return "not run", f"from {place} on: needs a GPU"
    return "failed", f"{place}: {error}".replace(str(folder.copy) + "/", "").replace(str(folder.root), "")[:400]
