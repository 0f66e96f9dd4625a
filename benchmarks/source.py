# SPDX-License-Identifier: Apache-2.0
"""Read Criteo's text as typed columns: compare `Source.blocks` with pyarrow.csv with the same types; parser alone.

All sides read the same generated log from the page cache, in turns, on one thread and on two.
"""

import argparse
import tempfile
from pathlib import Path

import pyarrow as pa
from pyarrow import csv
from record import Row, append_rows, measure_in_turns

from terarec.apps.synthetic import generate
from terarec.etl.source.source import open_source
from terarec.kernels.cpu.delimited import DelimitedField, DelimitedLayout, parse_delimited
from terarec.spec import SourceColumn, SourceSpec

NAMES = ["label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
BLOCK_BYTES = 2 << 20


def type_of(name: str) -> str:
    return "hex32" if name.startswith("C") else "integer"


def with_source(log: Path, threads: int) -> int:
    columns = tuple(SourceColumn(name=name, type=type_of(name)) for name in NAMES)
    source = open_source(SourceSpec(format="delimited", columns=columns), [log], threads=threads)
    return sum(block.num_rows for block in source.blocks())


def with_arrow(log: Path, threads: int) -> int:
    """Hexadecimal values stay text: PyArrow does not read them."""
    pa.set_cpu_count(threads)
    types = {name: pa.string() if type_of(name) == "hex32" else pa.int64() for name in NAMES}
    reader = csv.open_csv(
        log,
        csv.ReadOptions(column_names=NAMES, use_threads=threads > 1),
        csv.ParseOptions(delimiter="\t"),
        csv.ConvertOptions(column_types=types),
    )
    return sum(batch.num_rows for batch in reader)


def parser_alone(log: Path, rows: int) -> float:
    """Return the rows per second of the parser, repeated on the first block."""
    with log.open("rb") as file:
        text = file.read(BLOCK_BYTES)
    text = text[: text.rfind(b"\n") + 1]
    layout = DelimitedLayout(fields=tuple(DelimitedField(type_of(name)) for name in NAMES))
    timing = measure_in_turns({"": lambda: parse_delimited(text, layout)}, 20)[""]
    return text.count(b"\n") / timing.median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory) / "logs", rows=options.rows, days=1)
        log = next((Path(directory) / "logs").glob("*.tsv"))
        alone = parser_alone(log, options.rows)
        results = [Row(case="parse Criteo, one thread, one block", metric="rate", value=alone, unit="rows/s")]
        for threads in (1, 2):
            sides = {
                "terarec": lambda threads=threads: with_source(log, threads),
                "pyarrow.csv": lambda threads=threads: with_arrow(log, threads),
            }
            times = measure_in_turns(sides, options.repeats)
            results.append(
                Row(
                    case=f"read Criteo as typed columns, {options.rows:,} rows, threads {threads}",
                    metric="rate",
                    value=options.rows / times["terarec"].median,
                    unit="rows/s",
                    peer="pyarrow.csv",
                    peer_value=options.rows / times["pyarrow.csv"].median,
                )
            )
        append_rows("source", results, dry=options.dry)


if __name__ == "__main__":
    main()
