# SPDX-License-Identifier: Apache-2.0
"""The command line: each command parses options, makes specs, calls one function and shows its result."""

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``terarec ARGUMENTS`` (those of the process by default) and exit with its code: see docs/cli.md."""
    _open_streams()
    try:
        # Here, so that Ctrl-C while the commands load ends as at any other time.
        from terarec.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("terarec: interrupted; nothing was left half-written", file=sys.stderr)
        code = 130
    sys.exit(code)


def _open_streams() -> None:
    """Lead standard streams that the caller has closed to the null device.

    Otherwise the first files that are opened get their numbers, and what is printed goes into these.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open until the end
