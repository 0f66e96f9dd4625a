"""The command line: each command parses options, makes specs, calls one function and shows its result."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``terarec ARGUMENTS`` (those of the process by default) and exit with its code: see docs/cli.md."""
    try:
        # Here, so that Ctrl-C while the commands load ends as at any other time.
        from terarec.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("terarec: interrupted; nothing was left half-written", file=sys.stderr)
        code = 130
    sys.exit(code)
