"""What stops a command -> one line for people and one exit code for scripts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import typer

from terarec.errors import ConfigError, RunInterruptedError, TerarecError
from terarec.spec.quoting import one_line

DATA = 1
USAGE = 2
DEFECT = 3
INTERRUPTED = 130

# Typer carries its own copy of Click since 0.16 and used Click itself before; this finds the class in both.
_CommandLineError: Any = typer.BadParameter.__mro__[2]


@dataclass(frozen=True)
class Failure:
    """How a command ends that did not succeed.

    Attributes:
        exit_code: one of this module's constants.
        line: what to print on stderr after ``terarec: ``; None when there is nobody to tell.
    """

    exit_code: int
    line: str | None


def failure_of(error: BaseException) -> Failure:
    """The line and the exit code for `error`."""
    if isinstance(error, BrokenPipeError):
        return Failure(DATA, None)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Failure(INTERRUPTED, "interrupted; nothing was left half-written")
    if isinstance(error, RunInterruptedError):
        return Failure(INTERRUPTED, _one_line(f"interrupted: {error}"))
    if isinstance(error, _CommandLineError):
        return Failure(USAGE, _one_line(f"error: {_usage(error)}"))
    if isinstance(error, ConfigError):
        return Failure(USAGE, _one_line(f"error: {error}"))
    if isinstance(error, TerarecError):
        return Failure(DATA, _one_line(f"error: {error}"))
    if isinstance(error, OSError):
        return Failure(DATA, _one_line(f"error: {_system(error)}"))
    if isinstance(error, MemoryError):
        return Failure(DATA, _one_line(f"error: out of memory: {error}"))
    told = f"{type(error).__name__}: {error}"
    return Failure(DEFECT, _one_line(f"error: a defect in terarec: {told} (terarec --debug ... shows the traceback)"))


def _usage(error: Any) -> str:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see {context.command_path} --help" if context is not None else message


def _system(error: OSError) -> str:
    """The system's own words, with the file it speaks of; libraries leave parts of it out."""
    if error.errno is None:
        return str(error)
    words = os.strerror(error.errno)
    if error.filename is not None:
        return f"{error.filename}: {words}"
    text = str(error.strerror or "")
    return words if text.lower() == words.lower() or not text else f"{words} ({text})"


def _one_line(text: str) -> str:
    return one_line(" ".join(text.split()))
