# SPDX-License-Identifier: Apache-2.0
"""Compare the wall time of training DeepFM on Frappe_x1 with FuxiCTR and DeepCTR-Torch.

Run ``make peers-frappe``, then ``python benchmarks/frappe_peers.py DIR`` with the directory of the three files. Every
side runs in a process of its own, in the interpreter that has its libraries, with the same keys, settings, number of
epochs and threads. The sides take turns; each trains a new model to the last epoch, with an evaluation after each
epoch. The peers have the data in memory in the form that their loaders take; terarec reads its files in every epoch.
The program exits with an error if a side's test AUC after `LEAST_EPOCHS` or more is below `LEAST_AUC`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from json_process import HERE, JsonProcess, median_of, threads
from peer_sides.frappe_job import LABEL, SPLITS, FrappeJob
from record import Row, append_rows

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data
from terarec.data import Reader
from terarec.etl import prepare
from terarec.etl.workflow import Workflow
from terarec.spec import DeepFMSpec, StaticTablesSpec

DATA, MODEL = "frappe_x1", "deepfm"

OURS = "terarec"
PEERS = {"fuxictr": "FuxiCTR", "deepctr": "DeepCTR-Torch"}
FRAPPE_PYTHON = HERE.parent / ".venv-peers-frappe" / "bin" / "python"
LEAST_AUC, LEAST_EPOCHS = 0.98, 10  # the published AUC is 0.9842, that of FM 0.967


@dataclass(frozen=True, kw_only=True)
class FrappePeerRow(Row):
    """A row with the fastest runs, the number of runs, the models' test AUC and logloss, and the versions."""

    minimum: float
    peer_minimum: float
    runs: int
    auc: float
    peer_auc: float
    logloss: float
    peer_logloss: float
    peer_version: str


def make_job(files: Path, folder: Path) -> FrappeJob:
    """Prepare the data set, and write its keys as arrays for the peers."""
    data, source, run = folder / "data", load_recipe_data(DATA), load_recipe(DATA, MODEL).run
    prepare(Workflow.of(source.workflow), find_recipe_files(source, files), data)
    for split in SPLITS:
        reader = Reader(data, split, batch_size=1 << 20)
        (batch,) = reader
        # Every field has one key a sample, so that the keys are a matrix [S, B].
        keys = batch.sparse.keys.numpy().reshape(len(batch.sparse.names), -1)
        labels = batch.label[:, 0].numpy()
        np.savez(folder / f"{split}.npz", **{LABEL: labels}, **dict(zip(batch.sparse.names, keys, strict=True)))
    rows = run.sparse_optimizer.rows
    assert isinstance(run.model, DeepFMSpec)
    tables = run.model.tables
    assert isinstance(tables, StaticTablesSpec)
    assert tables.init_scale is not None
    assert rows is not None
    return FrappeJob(
        folder=str(folder),
        data=str(data),
        rows={column.name: column.rows or 1 for column in reader.spec.categorical},
        width=run.model.width,
        hidden=run.model.hidden,
        dropout=run.model.dropout,
        init_scale=tables.init_scale,
        l2=rows.l2,
        lr=run.sparse_optimizer.lr,
        batch_size=run.training.batch_size,
        threads=threads(),
    )


Answers = Mapping[str, Sequence[Mapping[str, float]]]
"""The time and the test figures of each training, by side."""


def in_turns(sides: Mapping[str, JsonProcess], options: argparse.Namespace) -> Answers:
    """Train all sides in turns."""
    answers: dict[str, list[Mapping[str, float]]] = {name: [] for name in sides}
    for name in sides:
        sides[name].request("train", seed=0, epochs=1)
    for seed in range(options.repeats):
        for name in sides:
            answer = sides[name].request("train", seed=seed, epochs=options.epochs)
            print(f"{name}, seed {seed}: {answer}", flush=True)
            if options.epochs >= LEAST_EPOCHS and answer["auc"] < LEAST_AUC:
                raise SystemExit(f"{name}: got a test AUC of {answer['auc']:.4f}, expected at least {LEAST_AUC}")
            answers[name].append(answer)
    return answers


def rows_of(answers: Answers, versions: Mapping[str, str], options: argparse.Namespace) -> Iterator[FrappePeerRow]:
    """Yield a row for each peer."""
    for peer in options.peer:
        yield FrappePeerRow(
            case=f"DeepFM, Frappe_x1, {options.epochs} epochs, {threads()} threads",
            metric="training with an evaluation an epoch",
            value=median_of(answers[OURS], "seconds"),
            unit="s",
            peer=PEERS[peer],
            peer_value=median_of(answers[peer], "seconds"),
            minimum=min(answer["seconds"] for answer in answers[OURS]),
            peer_minimum=min(answer["seconds"] for answer in answers[peer]),
            runs=options.repeats,
            auc=median_of(answers[OURS], "auc"),
            peer_auc=median_of(answers[peer], "auc"),
            logloss=median_of(answers[OURS], "logloss"),
            peer_logloss=median_of(answers[peer], "logloss"),
            peer_version=versions[peer],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, help="the directory of the three files")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--epochs", type=int, default=15, help="epochs of every training; the published run had 15")
    parser.add_argument("--repeats", type=int, default=3, help="trainings of each side")
    parser.add_argument("--python", type=Path, default=FRAPPE_PYTHON, help="the interpreter that has the peers")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="terarec-frappe-") as directory:
        described = json.dumps(dataclasses.asdict(make_job(options.files, Path(directory))))
        pythons = {OURS: Path(sys.executable), **dict.fromkeys(options.peer, options.python)}
        sides = {
            name: JsonProcess(python, "peer_sides.frappe_worker", [name, described]) for name, python in pythons.items()
        }
        answers = in_turns(sides, options)
        versions = {name: side.version for name, side in sides.items()}
        append_rows("frappe_peers", rows_of(answers, versions, options), dry=options.dry)
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
