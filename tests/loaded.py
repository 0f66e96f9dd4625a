# SPDX-License-Identifier: Apache-2.0
"""Run the suite on a busy machine: `make test-loaded`.

Four processes compute all the time, and a second copy of the suite runs beside the first. A test that depends on how
fast the machine is, on a port or on a file that another run uses fails here.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUSY_PROCESSES = 4
COPIES = 2


def run_round(command: list[str], folder: Path) -> bool:
    """Run the copies of the suite to their end; print how each ended, and the output of those that failed.

    Args:
        command: What runs the suite.
        folder: Directory for their output.

    Returns:
        Whether all passed.
    """
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_PROCESSES)]
    start = time.monotonic()
    try:
        logs = [folder / f"copy{number}.log" for number in range(COPIES)]
        copies = []
        for log in logs:
            with log.open("wb") as output:
                copies.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        statuses = [copy.wait() for copy in copies]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for log, status in zip(logs, statuses, strict=True):
        text = log.read_text(errors="replace").rstrip()
        print(text if status else text.splitlines()[-1], flush=True)
    print(f"{sum(status == 0 for status in statuses)} of {COPIES} copies passed in {time.monotonic() - start:.0f} s")
    return not any(statuses)


def main() -> int:
    """Run the rounds; stop at the first that fails."""
    parser = argparse.ArgumentParser(description="Run the suite on a busy machine.")
    parser.add_argument("--rounds", type=int, default=1, help="how often (default 1)")
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            if not run_round([sys.executable, "-m", "pytest", *arguments.options], Path(folder)):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
