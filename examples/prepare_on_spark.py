# SPDX-License-Identifier: Apache-2.0
"""Prepare Criteo-format logs on Spark and on this machine, and compare the two data sets byte for byte.

    pip install 'terarec[spark]'      # and Java 17 or later
    python examples/prepare_on_spark.py --out spark-output
    python examples/prepare_on_spark.py --out /shared/output --master spark://host:7077

The executors of a cluster need terarec and the same path for the output; see docs/spark.md.
"""

import argparse
import filecmp
import sys
import time
from pathlib import Path

from terarec.apps.synthetic import generate
from terarec.errors import TerarecError
from terarec.etl import prepare
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions, SplitByFiles

OWN = {"report.json", "_file_list.txt"}
"""Files with times, or with the paths of their own data set."""


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of files that only one of two folders has, or that differ."""
    names = sorted({file.relative_to(root).as_posix() for root in (one, other) for file in files_below(root)})
    return [name for name in names if not is_same(one / name, other / name)]


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name not in OWN]


def is_same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("spark-output"), help="new folder for logs and data sets")
    parser.add_argument("--master", default="local[2]", help="URL of Spark's master")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the generated logs")
    options = parser.parse_args()
    logs = [options.out / "raw" / name for name in generate(options.out / "raw", rows=options.rows, days=3).files]
    engines = {"local": PrepareOptions(), "spark": PrepareOptions(engine="spark", spark_master=options.master)}
    try:
        for engine, chosen in engines.items():
            started = time.perf_counter()
            workflow = Workflow.of(criteo(min_count=5, split=SplitByFiles(valid=1)))
            prepare(workflow, logs, options.out / engine, chosen)
            print(f"{engine}: {options.rows / (time.perf_counter() - started):,.0f} rows/s")
    except TerarecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    different = differences(options.out / "local", options.out / "spark")
    print(f"files that differ: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
