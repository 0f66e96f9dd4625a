# SPDX-License-Identifier: Apache-2.0
"""Compare this checkout with another: ``python benchmarks/old_and_new.py OLD``, where OLD is built in place.

Every case runs in two processes, one of each checkout, with the same threads and allocator settings. Their runs take
turns, so that other load on the machine affects both alike. The speed of a row is the median over the turns of the old
time divided by the new time, so a value above 1 is faster. Processor time is compared too; it does not include waiting.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from json_process import HERE, JsonProcess
from old_and_new_side import CASES
from record import Row, append_rows

NEW = HERE.parent


@dataclass(frozen=True, kw_only=True)
class TurnsRow(Row):
    """A row with the medians of both checkouts; the peer is the old commit.

    Attributes:
        turns: Number of runs of each checkout.
        speed: Median over the turns of old seconds / new seconds.
        speed_by_cpu: The same ratio of processor time.
    """

    turns: int
    speed: float
    speed_by_cpu: float


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def python_of(checkout: Path) -> Path:
    """Return the interpreter of a checkout: the one in its ``.venv`` if there is one."""
    own = checkout / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


class Turns:
    """A case in a process of each checkout.

    Args:
        case: Name of the case.
        old: The other checkout.
        folder: Directory of the files.
    """

    def __init__(self, case: str, old: Path, folder: Path) -> None:
        self._case = case
        self._commit = commit_of(old)
        self._sides = {
            side: JsonProcess(python_of(checkout), "old_and_new_side", [str(checkout), case, str(folder / side)])
            for side, checkout in (("old", old), ("new", NEW))
        }
        self.names: list[str] = [process.request("names") for process in self._sides.values()][-1]

    def measure(self, name: str, seconds: float, least: int) -> TurnsRow:
        """Return the row of a function, after at least this many seconds of both sides and this many turns."""
        turns: list[dict[str, tuple[float, float]]] = []
        spent = 0.0
        while len(turns) < least or spent < seconds:
            order = list(self._sides) if len(turns) % 2 else list(self._sides)[::-1]
            turns.append({side: tuple(self._sides[side].request("time", name=name)) for side in order})
            spent += sum(wall for wall, _ in turns[-1].values())
        medians = {side: statistics.median(turn[side][0] for turn in turns) for side in self._sides}
        return TurnsRow(
            case=f"{self._case}: {name}",
            metric="time of a run",
            value=medians["new"] * 1e3,
            unit="ms",
            peer=f"commit {self._commit}",
            peer_value=medians["old"] * 1e3,
            turns=len(turns),
            speed=statistics.median(turn["old"][0] / turn["new"][0] for turn in turns),
            speed_by_cpu=statistics.median(turn["old"][1] / turn["new"][1] for turn in turns),
        )

    def close(self) -> None:
        """End both processes."""
        for process in self._sides.values():
            process.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout with a built core")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--only", help="only functions whose names contain this text")
    parser.add_argument("--seconds", type=float, default=6.0, help="least seconds of both sides for a figure")
    parser.add_argument("--turns", type=int, default=5, help="least number of turns for a figure")
    parser.add_argument("--rows", type=int, default=500_000, help="rows of Criteo's log for the preparation")
    parser.add_argument("--folder", type=Path, help="directory for files")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="terarec-turns-", dir=options.folder) as name:
        folder = Path(name)
        if "prepare" in options.case:
            from terarec.apps.synthetic.criteo import generate

            generate(folder / "log", rows=options.rows, days=1, seed=0)
        for case in options.case:
            turns = Turns(case, options.old.resolve(), folder)
            for function in turns.names:
                if not options.only or options.only in function:
                    row = turns.measure(function, options.seconds, options.turns)
                    append_rows("old_and_new", [row], dry=options.dry)
                    print(f"  {row.turns} turns: {row.speed:.3f}, by processor time {row.speed_by_cpu:.3f}", flush=True)
            turns.close()


if __name__ == "__main__":
    main()
