# SPDX-License-Identifier: Apache-2.0
"""Errors of a command -> one readable line and one exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from terarec.errors import ConfigError, RunInterruptedError, TerarecError, UserCodeError
from terarec.user_code import place_of

EXIT_DATA = 1
EXIT_USAGE = 2
EXIT_DEFECT = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

# Errors name arguments of Python functions; these are the options that set them.
_OPTIONS = {
    r"replace=True": "--force",
    r"restart=True": "--restart",
    r"resume=True": "--resume",
    r"allow_import=\('([^']*)',\)": r"--allow-import \1",
    r"model\.tables\.kind=dynamic": "--tables dynamic",
    r"parts=N": "--parts N",
    r"keysets=True": "--keysets",
    r"init_from=RUN": "--init-from RUN",
    r"the assignment (\S+?=.*)$": r"--set '\1'",
    r"reset_optimizer=True": "--reset-optimizer",
    r"extend_chain=True": "--extend-chain",
}

# What libraries say, in errors of several classes, where a system, a limit (ulimit -v) or a device has no memory left.
_NO_MEMORY = re.compile(
    r"(?i)can't allocate memory|cannot allocate memory|out of memory|not enough memory|can't start new thread"
    r"|failed to map segment|Storage size calculation overflowed|std::bad_alloc"
)

# Typer carries its own copy of Click since 0.16 and used Click itself before; this finds the class in both.
_CommandLineError: Any = typer.BadParameter.__mro__[2]


@dataclass(frozen=True)
class Failure:
    """The end of a command that failed.

    Attributes:
        exit_code: One of this module's constants; 0 where the reader of the output has left, which is not a failure.
        line: What to print on stderr after ``terarec: ``; None if nothing is to be printed.
        type: Name of the error's class; `ConfigError` for wrong usage, "defect" for a fault of terarec,
            "UserCodeError" for any exception of a user's code.
        where: The error's `where` with the names of options; the option or argument if usage is wrong.
    """

    exit_code: int
    line: str | None
    type: str
    where: str = ""

    @property
    def message(self) -> str | None:
        """`line` without its ``error: ``."""
        return None if self.line is None else self.line.removeprefix("error: ")


def failure_of(error: BaseException) -> Failure:
    """Return the line, the exit code and the place for `error`."""
    kind = type(error).__name__
    # Before OSError, which it is as well.
    if isinstance(error, BrokenPipeError):
        return Failure(0, None, kind)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Failure(EXIT_INTERRUPTED, "interrupted; nothing was left half-written", "KeyboardInterrupt")
    if isinstance(error, RunInterruptedError):
        return Failure(EXIT_INTERRUPTED, _one_line(f"interrupted: {error}"), kind)
    if isinstance(error, _CommandLineError):
        return Failure(EXIT_USAGE, _one_line(f"error: {_usage(error)}"), ConfigError.__name__, _parameter(error))
    # Before OSError: a missing file of terarec is a FileNotFoundError, too.
    if isinstance(error, TerarecError):
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_DATA
        return Failure(code, _one_line(f"error: {error}"), kind, _one_line(error.where))
    place = None if isinstance(error, MemoryError) else place_of(error)
    if place is not None:
        line = f"error: {kind}: {error}, raised at {place} (terarec --debug ... shows the traceback)"
        return Failure(EXIT_DATA, _one_line(line), UserCodeError.__name__, place)
    if isinstance(error, OSError):
        return Failure(EXIT_DATA, _one_line(f"error: {_system(error)}"), kind, _one_line(str(error.filename or "")))
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return Failure(EXIT_DATA, _one_line(f"error: out of memory: {str(error).partition(chr(10))[0]}"), kind)
    line = f"error: a defect in terarec: {kind}: {error} (terarec --debug ... shows the traceback)"
    return Failure(EXIT_DEFECT, _one_line(line), "defect")


def _parameter(error: Any) -> str:
    """Return the option or argument of a usage error, as the user typed it; "" if the error has none."""
    parameter, typed = getattr(error, "param", None), getattr(error, "option_name", None)
    if parameter is None:
        return typed or ""
    name: str = next((name for name in parameter.opts if name.startswith("--")), parameter.name.upper())
    return name


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    # An unknown option: Click suggests names that are spelled alike, which --lr and --dense-lr are not.
    if context is not None and hasattr(error, "option_name") and hasattr(error, "possibilities"):
        message = f"{error.message.rstrip('.')}{_near_options(error.option_name, context.command.params)}"
    else:
        message = _rejected_value(error) or error.format_message().rstrip(".")
    return f"{message}; see {context.command_path} --help" if context is not None else message


def _rejected_value(error: Any) -> str | None:
    """Return the message for a value that Typer rejected by Pydantic, whose own message leaves the value out."""
    from terarec.spec.checks import quoted

    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return None
    first = details()[0]
    # "Input should be a valid integer, unable to parse string as an integer", "Input should be greater than or equal to
    # 0", and by Typer "Value error, 'foo' is not one of 'latest', '1m'."
    match = re.fullmatch(r"Input should be (.*?)(, unable .*)?|Value error, .* is not (one of .*?)\.?", first["msg"])
    if match is None:
        return None
    expected = match[1] or match[3]
    value = f"a value {expected}" if expected.startswith(("greater", "less")) else expected
    return f"{_parameter(error)}: got {quoted(first['input'])}, expected {value}"


def _near_options(typed: str, parameters: Sequence[Any]) -> str:
    """Return the options whose words include those of `typed` (``--dense-lr`` for ``--lr``), or the nearest one."""
    from terarec.spec.checks import nearest

    known = [name[2:] for parameter in parameters for name in parameter.opts if name.startswith("--")]
    words = set(typed.strip("-").split("-"))
    close = [name for name in known if words <= set(name.split("-"))] or [nearest(typed.strip("-"), known)]
    hint = " or ".join(f"--{name}" for name in close if name is not None)
    return f" (did you mean {hint}?)" if hint else ""


def _system(error: OSError) -> str:
    """Return the system's message with the file that it is about; libraries leave parts of it out."""
    if error.errno is None:
        return str(error)
    words = os.strerror(error.errno)
    if error.filename is not None:
        return f"{error.filename}: {words}"
    text = str(error.strerror or "")
    return words if text.lower() == words.lower() or not text else f"{words} ({text})"


def _one_line(text: str) -> str:
    from terarec.spec.checks import one_line

    # Libraries do not know the command line, so that the option is named here.
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return one_line(" ".join(text.split()))
