# SPDX-License-Identifier: Apache-2.0
"""Measure a session in this process, from raw records to scores: one record, and 1,024 next to the layers alone.

The records are generated in Criteo's layout of 39 fields; the runs are DLRMs after one step. One record should take at
most 150 us with the small model, and 1,024 records should reach 95 % of the rate of the layers of the large one.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from record import Row, append_rows, measure_in_turns

from terarec.apps.synthetic.criteo import generate
from terarec.etl import prepare
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.export.dense_part import DensePart
from terarec.serve import InferenceSession
from terarec.spec import DLRMSpec, RunSpec, SplitByFiles, TrainingSpec
from terarec.train.run import build

SMALL = DLRMSpec(width=16, bottom=(64, 16), top=(64, 32))
LARGE = DLRMSpec(width=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256))
# OpenMP threads that spin while they wait take the cores from ONNX Runtime's threads.
WAITING = ", OMP_WAIT_POLICY=passive" if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else ""
NUMBERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


def records(lines: list[str]) -> dict[str, list[object]]:
    """Return raw columns of log lines, as a client would send them."""
    rows = [line.split("\t") for line in lines]
    found: dict[str, list[object]] = {
        name: [int(row[1 + place]) if row[1 + place] else None for row in rows] for place, name in enumerate(NUMBERS)
    }
    return found | {name: [row[14 + place] for row in rows] for place, name in enumerate(CATEGORIES)}


def sessions(turns: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        report = generate(root / "raw", rows=4_000, days=2, seed=7)
        days = [root / "raw" / file for file in report.files]
        prepare(Workflow.of(criteo(min_count=2, split=SplitByFiles(valid=1))), days, root / "data")
        lines = days[-1].read_text().splitlines()
        for name, model in (("small", SMALL), ("large", LARGE)):
            training = TrainingSpec(batch_size=128, max_steps=1, reader_threads=1)
            build(RunSpec(data=str(root / "data"), model=model, training=training), root / name).fit()
            for executor in ("eager", "onnxruntime"):
                session = InferenceSession.open(root / name, executor=executor)
                for size in (1, 32, 1024):
                    case = f"{size:,} records of 39 fields, {name} DLRM in {executor}{WAITING}"
                    yield from timed(session, records(lines[:size]), case, size, turns * (20 if size == 1 else 1))


def timed(session: InferenceSession, raw: dict[str, list[object]], case: str, size: int, turns: int) -> Iterator[Row]:
    weights = session._weights.current
    part = DensePart.of(weights.model, weights.inputs.dataset, weights.objective.scores)
    values = part.random_values(size)

    programs = weights.programs
    run = programs._programs["onnxruntime"] if programs is not None else lambda values: part.module(*values)

    def layers() -> None:
        with torch.inference_mode():
            run(values)

    encoded = session.workflow.encode(raw)
    found = measure_in_turns(
        {
            "raw": lambda: session.predict(raw),
            "encoded": lambda: session.score_batch(weights.inputs.batches(encoded)),
            "workflow": lambda: session.workflow.encode(raw),
            "layers": layers,
        },
        turns,
    )
    alone = found["layers"].median
    for metric, key in (("raw to scores", "raw"), ("encoded to scores", "encoded"), ("workflow", "workflow")):
        yield Row(
            case=case,
            metric=metric,
            value=1e6 * found[key].median,
            unit="us",
            peer="layers alone",
            peer_value=1e6 * alone,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    append_rows("session", sessions(options.turns), dry=options.dry)


if __name__ == "__main__":
    main()
