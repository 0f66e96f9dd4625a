# SPDX-License-Identifier: Apache-2.0
"""Run the Python files of a checkout of HugeCTR on terarec, and print what became of each.

``python tools/upstream.py DIR`` runs the tests, samples, notebooks and documentation below DIR that need no program for
GPUs, on data that is generated in the layout that each file describes. Counts are made smaller; nothing else is
changed. It ends with 1 if a file fails, or if none fits. The checkout stays as it is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from tools.upstream_files.cases import Case, find_cases, in_chains  # noqa: E402
from tools.upstream_files.changes import table_of_rules  # noqa: E402
from tools.upstream_files.running import Options, Row, run_chain  # noqa: E402
from tools.upstream_files.table import lines, write_csv  # noqa: E402

from terarec.hugectr.release import NEWEST, RELEASES  # noqa: E402


def main() -> int:
    """Run the files and print the table."""
    arguments = _parse()
    checkout = arguments.checkout.resolve()
    cases = find_cases(checkout, tuple(arguments.only))
    if not cases:
        print(f"{checkout}: no file to run", file=sys.stderr)
        return 1
    release = arguments.compat_release or release_of(checkout)
    print(f"{checkout}: {len(cases)} cases, as release {release}. Smaller counts:")
    print(table_of_rules(), flush=True)
    options = Options(checkout=checkout, release=release, timeout=arguments.timeout)
    with ExitStack() as stack:
        # Not relative: the files run in folders below it.
        folder = Path(tempfile.mkdtemp(prefix="upstream-", dir=arguments.folder)).resolve()
        if not arguments.keep:
            stack.callback(shutil.rmtree, folder)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            futures = []
            for number, chain in enumerate(in_chains(cases)):
                futures.append(pool.submit(_run, chain, folder / f"{number:03}", options, arguments.keep))
            rows = []
            for future in futures:
                for row in future.result():
                    rows.append(row)
                    _show(row)
                if arguments.csv:  # as far as it is, since a run takes long
                    write_csv(rows, arguments.csv, checkout.name)
        if arguments.keep:
            print(f"kept in {folder}")
    print("\n".join(lines(rows)))
    return int(any(row.outcome == "failed" for row in rows))


def _run(chain: list[Case], base: Path, options: Options, is_kept: bool) -> list[Row]:
    base.mkdir()
    try:
        return run_chain(chain, base, options)
    finally:
        if not is_kept:  # a file may write tens of GB, and there are hundreds
            shutil.rmtree(base)


def _show(row: Row) -> None:
    for line in row.generated:
        print(f"    generated {line}")
    print(f"{row.outcome}: {row.case.title} {row.detail}", flush=True)


def release_of(checkout: Path) -> str:
    """Return the release of a checkout, by its name (v24.04.00) or its release notes; the newest if neither says."""
    notes = checkout / "release_notes.md"
    texts = [checkout.name, *re.findall(r"New in Version (\S+)", notes.read_text() if notes.exists() else "")]
    for text in texts:
        found = re.match(r"v?(\d+\.\d+)", text)
        if found and found.group(1) in RELEASES:
            return found.group(1)
    return NEWEST


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="DIR", help="checkout of upstream")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="files to run, such as onnx or *hps*"
    )
    parser.add_argument("--compat-release", choices=RELEASES, help="release to behave like; the checkout's by default")
    parser.add_argument("--jobs", type=int, default=1, help="files that run at once (default: 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each file (default: 600)")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder, with a log of each file")
    parser.add_argument("--csv", type=Path, help="file to put the table into, in place of older rows of these files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
