"""Compare `Model.fit` of the HugeCTR facade, and `Trainer` on its graph, with another commit or a plain loop.

The model is Deep & Cross on Criteo-shaped samples in a Raw file: 13 numbers, 26 slots. Each side has its own process
and its own reader, and the sides take turns. `fit` also displays losses, applies its learning rate schedule and checks
its workspace.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from hugectr_fit_side import DENSE, ROWS, SLOTS, layout
from json_process import JsonProcess
from record import Row, append_rows

from terarec.formats.hugectr import FixedRecordWriter, raw_types

CASE = "DCN, 26 slots of 40 k keys, width 16, 6 cross layers, deep 1024-1024, Adam, batch {batch}, Raw"


def write_data(path: Path, samples: int) -> None:
    """Write random samples with power-law keys."""
    rng = np.random.default_rng(0)
    keys = [(ROWS * rng.random(samples) ** 4).astype(np.int64) for _ in range(SLOTS)]
    label = (rng.random((samples, 1)) < 0.25).astype(np.float32)
    with FixedRecordWriter(path, layout(), raw_types(layout(), float_label_dense=True)) as writer:
        writer.write(label, rng.random((samples, DENSE), dtype=np.float32), keys)
        writer.close()


@contextlib.contextmanager
def importing_from(source: Path | None) -> Iterator[None]:
    """Let processes that start in the block import terarec from `source`, the ``src`` of another checkout."""
    before = os.environ.get("PYTHONPATH")
    if source is not None:
        os.environ["PYTHONPATH"] = str(source)
    try:
        yield
    finally:
        if source is not None:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


def time_sides(batch: int, iterations: int, repeats: int, other: Path | None) -> list[Row]:
    """Return the rates of `fit` and `Trainer.train_step`; their peer is a loop, at the other commit if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        path, samples = Path(folder) / "train.bin", batch * iterations
        write_data(path, samples)
        kinds = {"fit": ("fit", None), "loop": ("loop", None)} | ({"other": ("loop", other)} if other else {})
        sides = {}
        for name, (kind, source) in kinds.items():
            with importing_from(source):
                sides[name] = JsonProcess(
                    Path(sys.executable), "hugectr_fit_side", [kind, str(path), str(samples), str(batch)]
                )
        if len({side.version for side in sides.values()}) != 1 + bool(other):
            raise SystemExit(f"hugectr_fit: --other {other} is not imported, expected the src of another checkout")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats + 1):
            for name, side in sides.items():
                took = side.request("run", iterations=iterations)
                if turn:  # the first turn warms up, and inserts the keys
                    seconds[name].append(took)
        losses = {name: side.request("loss") for name, side in sides.items()}
        for side in sides.values():
            side.close()
        if len(set(losses.values())) != 1:
            raise SystemExit(f"hugectr_fit: got the losses {losses}, expected the same bits on all sides")
    rates = {name: samples / statistics.median(taken) for name, taken in seconds.items()}
    peer, title = (
        ("other", "GraphTrainer.step in a loop, 9e651d5") if other else ("loop", "Trainer.train_step in a loop")
    )
    titles = {"fit": "fit through the HugeCTR facade", "loop": "Trainer.train_step in a loop"}
    return [
        Row(
            case=CASE.format(batch=batch),
            metric=titles[name],
            value=rates[name],
            unit="samples/s",
            peer=title,
            peer_value=rates[peer],
        )
        for name in titles
        if name != peer
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other", type=Path, help="src of a checkout of 9e651d5, the last commit with GraphTrainer")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    if options.other is not None:  # that commit uses torch's own matmul, and the losses must be equal bit for bit
        os.environ["TERAREC_LINEAR"] = "torch"
    for batch in options.batches:
        rows = time_sides(batch, options.iterations, options.repeats, options.other)
        append_rows("hugectr_fit", rows, dry=options.dry)


if __name__ == "__main__":
    main()
