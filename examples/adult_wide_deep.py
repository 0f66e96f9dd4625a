# SPDX-License-Identifier: Apache-2.0
"""Train Wide & Deep on UCI Adult: does a person earn more than 50,000 dollars a year?

It prepares the CSV files under examples/data/adult/, trains, and scores the test file once. Columns and settings were
chosen on the end of the training file, which is the valid split here.

    python examples/adult_wide_deep.py --out adult-output
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from terarec.etl import prepare
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow
from terarec.spec import AdaGradSpec, AdamSpec, RunSpec, SplitByFiles, TrainingSpec, WideDeepSpec
from terarec.train import ProgressBar, build, evaluate

ADULT = Path(__file__).resolve().parent / "data" / "adult"

NAMES = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
)

COLUMNS = CsvOptions(
    label="income",
    positives=(">50K", ">50K."),  # labels of the test file end with a dot
    dense=("age", "education_num", "hours_per_week"),
    log=("capital_gain", "capital_loss"),
    categorical=(
        *("workclass", "education", "marital_status", "occupation"),
        *("relationship", "race", "sex", "native_country"),
    ),
    # There are few distinct gains and losses, and some of them reveal the income.
    ids=("capital_gain", "capital_loss"),
    buckets={"age": 20, "hours_per_week": 20},
    split=SplitByFiles(valid=0, test=1, valid_fraction=0.1),
    names=NAMES,
)

MODEL = WideDeepSpec(width=8, hidden=(64, 32), dropout=0.2)


def train(out: Path, seed: int, epochs: int) -> dict:
    """Prepare, train and score; return the figures."""
    started = time.perf_counter()
    _clear(out)
    files = [ADULT / "adult.data.gz", ADULT / "adult.test.gz"]
    prepared = prepare(Workflow.of(csv_workflow(COLUMNS)), files, out / "data")
    spec = RunSpec(
        data=str(out / "data"),
        model=MODEL,
        dense_optimizer=AdamSpec(lr=0.001),
        sparse_optimizer=AdaGradSpec(lr=0.05),
        training=TrainingSpec(batch_size=256, epochs=epochs, seed=seed, threads=1),  # too small a batch to share
    )
    run = build(spec, out / "run", callbacks=[ProgressBar()])
    report = run.fit()
    test = evaluate(run.model, run.reader("test"))
    return {
        "train_rows": prepared.splits["train"],
        "test_rows": prepared.splits["test"],
        "valid_auc": report.evaluation.auc,
        "test_auc": test.auc,
        "test_logloss": test.logloss,
        "samples_per_second": report.samples_per_second,
        "seconds": time.perf_counter() - started,
    }


def _clear(out: Path) -> None:
    """Remove what a former call has written; a directory with anything else ends the program."""
    names = {entry.name for entry in out.iterdir()} if out.exists() else set()
    if names and (names != {"data", "run"} or not (out / "run" / "run.json").is_file()):
        sys.exit(f"--out: {out} holds other files, expected a new directory, or one that this program has written")
    for name in names:
        shutil.rmtree(out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("adult-output"), help="output directory; that of a former call is replaced"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    arguments = parser.parse_args()
    figures = train(arguments.out, arguments.seed, arguments.epochs)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:20}{value:,.5g}")


if __name__ == "__main__":
    sys.exit(main())
