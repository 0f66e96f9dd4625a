"""``terarec-hugectr`` and ``python -m terarec.hugectr``: HugeCTR's own commands, and scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from terarec.errors import TerarecError
from terarec.hugectr.runner import run_script
from terarec.hugectr.schema.types import RELEASES
from terarec.spec.quoting import one_line

HELP = """usage: terarec-hugectr --train CONFIG.json
       terarec-hugectr [--compat-release RELEASE] SCRIPT.py [ARGUMENTS]
       terarec-hugectr data_generator CONFIG.json DIRECTORY VOCABULARY_SIZE MAX_NNZ
                       [--files N] [--samples N] [--long-tail long|medium|short]
       terarec-hugectr data_generator --config-file CONFIG.json --voc-size-array N,N,...
                       [--nnz-array N,N,...] [--data-folder DIRECTORY] [--files N] [--samples N]
                       [--distribution powerlaw|unified] [--alpha A | --long-tail long|medium|short]
       terarec-hugectr --version | --help

Runs what was written for HugeCTR: a training file (2.3 to 3.0), a Python script of any release with not a line
changed, or the generator of random data for a training file. `python -m terarec.hugectr` does the same.
With --compat-release 3.1, for instance, it displays, evaluates and saves when that release does.
docs/hugectr-compat.md lists every name and parameter."""

USAGE_ERROR, FAILURE = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for an error of the work, 2 for one of the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    release = None
    if given[:1] == ["--compat-release"]:
        release, given = given[1] if given[1:] else "", given[2:]
        if release not in RELEASES:
            return _report(f"--compat-release: got {release!r}, expected one of {', '.join(RELEASES)}", USAGE_ERROR)
    first = given[0] if given else "--help"
    if first in ("--help", "-h"):
        print(HELP)
        return 0
    if first == "--version":
        print(_version())
        return 0
    if first.startswith("-") and first != "--train":
        return _report(f"got an unknown option {first!r}, expected --train, --version or --help", USAGE_ERROR)
    if first == "--train" and len(given) != 2:
        return _report(f"--train: got {len(given) - 1} files, expected one training file", USAGE_ERROR)
    if first not in ("--train", "data_generator"):
        if not Path(first).is_file():
            return _report(f"{first}: does not exist, expected a script, --train or data_generator", USAGE_ERROR)
        # A script's errors are its own: they keep their traceback.
        run_script(first, given[1:], release=release)
        return 0
    return _run_command(first, given[1:])


def _run_command(command: str, arguments: Sequence[str]) -> int:
    try:
        if command == "--train":
            from terarec.hugectr.session import train  # loads torch

            train(arguments[0])
        else:
            from terarec.hugectr.tools import generate

            generate(arguments)
    except TerarecError as error:
        return _report(str(error), FAILURE)
    return 0


def _version() -> str:
    from terarec import __version__
    from terarec.hugectr import __version__ as release

    return f"terarec {__version__}, with the interface of HugeCTR 2.3 to {release}"


def _report(problem: str, code: int) -> int:
    print(one_line(f"terarec-hugectr: error: {problem}"), file=sys.stderr)
    return code
