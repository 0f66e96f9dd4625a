# SPDX-License-Identifier: Apache-2.0
"""Python processes that begin with torch and terarec loaded, and new ones.

Importing torch takes 1.5 s of CPU time and terarec 0.4 s, more than most of what tests start a process for. These
processes are forked from one that has imported them. A test of what a process imports, or of how the interpreter ends,
starts a new one.
"""

import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "numpy", "pyarrow.dataset"),
        *("terarec.cli.train", "terarec.cli.serving", "terarec.hugectr.model", "terarec.serve", "terarec.train"),
    ]
)


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        returncode: Exit status; the negative number of the signal that killed it.
        stdout: What it wrote.
        stderr: Its errors.
    """

    returncode: int
    stdout: str
    stderr: str


class Python:
    """A process that runs as ``python -c PROGRAM ARGUMENTS`` would.

    Args:
        program: Source text; for `module` its name.
        arguments: Command line.
        environment: Variables in addition to those of this process.
        cwd: Working directory; None for that of this process.
        is_module: Whether to run as ``python -m PROGRAM ARGUMENTS``.
    """

    def __init__(
        self,
        program: str,
        *arguments: object,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        is_module: bool = False,
    ) -> None:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        variables = {**os.environ, **(environment or {})}
        words = tuple(map(str, arguments))
        self._process = CONTEXT.Process(
            target=_main, args=(program, words, variables, cwd, is_module, *(writer for _, writer in pipes))
        )
        self._process.start()
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (io.TextIOWrapper(os.fdopen(os.dup(reader.fileno()), "rb")) for reader, _ in pipes)
        for reader, _ in pipes:
            reader.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process, and what it started, if they still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def read_line(self, timeout: float = 200) -> str:
        """Return the next line of stdout, without its end.

        Raises:
            AssertionError: The process, which is ended then, wrote no line within `timeout` seconds, or none at all.
        """
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            line = self.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            ended = self.wait()
            raise AssertionError(f"got no line within {timeout} s, exit status {ended.returncode}: {ended.stderr}")
        return line.rstrip("\n")

    def wait(self, timeout: float = 200) -> Ended:
        """Read the output to its end and return it with the exit status.

        Raises:
            TimeoutError: The process, which is ended then, ran for longer than `timeout` seconds.
        """
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            try:
                output = [read.result(timeout) for read in reads]
            except TimeoutError:
                self.kill()
                raise TimeoutError(f"process {self.pid} ran for longer than {timeout} s") from None
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"process {self.pid} did not end within {timeout} s"
        return Ended(self._process.exitcode, *output)

    def close(self) -> None:
        """End the process and close its pipes."""
        self.kill()
        self._process.join(60)
        self.stdout.close()
        self.stderr.close()


def run_python(
    program: str,
    *arguments: object,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    is_module: bool = False,
    timeout: float = 300,
) -> Ended:
    """Run a `Python` process to its end, of at most `timeout` seconds."""
    with contextlib.closing(
        Python(program, *arguments, environment=environment, cwd=cwd, is_module=is_module)
    ) as process:
        return process.wait(timeout)


def run_new_python(program: str, *arguments: object, environment: dict[str, str] | None = None) -> Ended:
    """Run ``python -c PROGRAM ARGUMENTS`` to its end in a process that has imported nothing before.

    Args:
        program: Source text.
        arguments: Command line.
        environment: Variables in addition to those of this process.
    """
    ended = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def _main(
    program: str,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    cwd: Path | None,
    is_module: bool,
    stdout: Connection,
    stderr: Connection,
) -> None:
    """Run in the new process."""
    os.setpgid(0, 0)
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    os.environ.clear()
    os.environ.update(variables)
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, os.getcwd() if is_module else "")
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), module.__dict__)
