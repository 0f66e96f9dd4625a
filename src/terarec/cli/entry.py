"""Runs a command and turns whatever stops it into one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from terarec.cli.app import Frame, app
from terarec.cli.failures import INTERRUPTED, Failure, failure_of
from terarec.cli.show import print_json
from terarec.spec.quoting import printable


def run(arguments: Sequence[str]) -> int:
    """Run ``terarec ARGUMENTS`` and return its exit code, without ending the process."""
    frame = Frame()
    try:
        with _stopped_by_sigterm():
            result = app(list(arguments), prog_name="terarec", obj=frame, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:
        # Rich leaves so when the reader of stdout has gone, and has dealt with stdout by then; Typer after it has
        # completed a line for a shell. Neither is a failure: `terarec --help | head` has shown what was asked for.
        return 0
    except BaseException as error:
        failure = failure_of(error)
        if frame.debug:
            traceback.print_exc()
    else:
        # Typer's own way of telling that --help has printed (0), that a shell is unknown to it (1), which it has said,
        # or that Ctrl-C was pressed (130).
        if not isinstance(result, int) or result != INTERRUPTED:
            return result if isinstance(result, int) else 0
        failure = failure_of(KeyboardInterrupt())
    _tell(failure, as_json="--json" in arguments)
    return failure.exit_code


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """While this lasts, SIGTERM does as Ctrl-C does: nobody is there to press that where a scheduler ends a command."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(failure: Failure, *, as_json: bool) -> None:
    if failure.line is None:
        # The reader of our output has gone; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    sys.stdout.flush()
    print(f"terarec: {printable(failure.line)}", file=sys.stderr, flush=True)
    if as_json:
        print_json({"error": failure.message})
