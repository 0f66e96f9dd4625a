# SPDX-License-Identifier: Apache-2.0
"""Measure start-up time beyond Python's own: ``import terarec``, ``terarec --help``, and one command's help.

Each runs in a process of its own, in turns with an empty Python. The limits are the project's promises: 0.15 s and
0.4 s. A command's help loads its options, and therefore the specs.
"""

import argparse
import subprocess
import sys

from record import Row, append_rows, measure_in_turns

CASES = {
    "import terarec": ("import terarec", 0.15),
    "terarec --help": ("from terarec.cli import main; main(['--help'])", 0.4),
    "terarec train --help": ("from terarec.cli import main; main(['train', '--help'])", None),
}


def run(program: str) -> None:
    """Run Python with `program` in a process of its own."""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Time the starts and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    programs = {"": "pass", **{case: program for case, (program, _) in CASES.items()}}
    timings = measure_in_turns(
        {case: lambda program=program: run(program) for case, program in programs.items()}, options.repeats
    )
    own = timings[""].minimum  # of the fastest runs: other load on the machine only adds time
    rows = [
        Row(case=case, metric="time beyond Python's start", value=timings[case].minimum - own, unit="s", limit=limit)
        for case, (_, limit) in CASES.items()
    ]
    append_rows("startup", rows, dry=options.dry)


if __name__ == "__main__":
    main()
