# SPDX-License-Identifier: Apache-2.0
"""Compare Mult-VAE and MF-BPR on MovieLens-100K with RecBole's own models, in the protocol of the recipe ``ml_100k``.

Run ``make peers-recbole``, then ``python benchmarks/accuracy_recbole.py DIR`` with the directory of the file. Both
sides have the same splits, widths, rates, batches and epochs, and the same metrics of the first 10 of all items without
those that the user has in training. RecBole trains and measures with its own code, on one thread; with
``OMP_NUM_THREADS=1`` ours has one, too. Afterwards ``python benchmarks/accuracy_page.py`` writes docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accuracy import RankingRow, ranking_row, run_recipe
from json_process import HERE, JsonProcess
from record import append_rows

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data
from terarec.apps.recipes.data_sets import prepare_ratings
from terarec.batch import feature_keys
from terarec.data import Reader
from terarec.spec import MFBPRSpec, MultVAESpec, RunSpec
from terarec.spec.recipe import RatingDataSpec

DATA = "ml_100k"
RECBOLE_PYTHON = HERE.parent / ".venv-peers-recbole" / "bin" / "python"
PEERS = {"mf_bpr": "BPR", "mult_vae": "MultiVAE"}
"""Recipe -> RecBole's model."""
FILES = "ratings"


@dataclass(frozen=True, kw_only=True)
class PeerRankingRow(RankingRow):
    """A ranking row whose peer is RecBole's model with the same seed, and the other figures of that."""

    peer_ndcg: float
    peer_recall: float
    peer_precision: float
    peer_seconds: float | None
    peer_version: str


def write_splits(directory: Path, folder: Path) -> None:
    """Write the splits of the recipe as RecBole's files; the validation, which it does not use, is the test."""
    described = load_recipe_data(DATA)
    assert isinstance(described, RatingDataSpec)
    folder.mkdir(parents=True)
    prepared = folder / "prepared"
    prepare_ratings(find_recipe_files(described, directory)[0], prepared, test=described.test)
    for split, names in {"train": ("train",), "test": ("valid", "test")}.items():
        lines = ["user_id:token\titem_id:token"]
        for batch in Reader(prepared, split, batch_size=1 << 16):
            pairs = zip(feature_keys(batch, "user").tolist(), feature_keys(batch, "item").tolist(), strict=True)
            lines += [f"{user}\t{item}" for user, item in pairs]
        for name in names:
            (folder / f"{FILES}.{name}.inter").write_text("\n".join(lines) + "\n")


def settings_of(run: RunSpec) -> dict[str, object]:
    """Return the options of RecBole's model for those of ours."""
    model, training = run.model, run.training
    common = {
        "epochs": training.epochs,
        "train_batch_size": training.batch_size,
        "learning_rate": run.sparse_optimizer.lr,
        "eval_batch_size": 1 << 20,
    }
    if isinstance(model, MFBPRSpec):
        return {**common, "embedding_size": model.width}
    assert isinstance(model, MultVAESpec)
    return {
        **common,
        "train_neg_sample_args": None,
        "mlp_hidden_size": list(model.hidden),
        "latent_dimension": 2 * model.latent,  # of the mean and the variance
        "dropout_prob": model.dropout,
        # There the factor rises by 1 / total in each batch, up to the cap.
        "anneal_cap": model.beta,
        "total_anneal_steps": round(model.anneal_steps / model.beta),
    }


def rows_of(model: str, options: argparse.Namespace, out: Path, files: Path) -> Iterator[PeerRankingRow]:
    """Yield a row for each seed."""
    run = load_recipe(DATA, model).run
    results = run_recipe(DATA, model, options.directory, out, options.seeds)
    side = JsonProcess(options.python, "peer_sides.recbole_worker", [str(files)])
    for result in results:
        theirs: Mapping[str, float] = side.request(
            "train", model=PEERS[model], seed=result["seed"], settings=settings_of(run)
        )
        print(f"RecBole's {PEERS[model]}, seed {result['seed']}: {theirs}", flush=True)
        ours = ranking_row(DATA, model, result, is_timed=not options.untimed)
        yield PeerRankingRow(
            **{**ours, "peer": "RecBole", "peer_value": theirs["hr"]},
            peer_ndcg=theirs["ndcg"],
            peer_recall=theirs["recall"],
            peer_precision=theirs["precision"],
            peer_seconds=None if options.untimed else theirs["seconds"],
            peer_version=side.version,
        )
    side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of the file of MovieLens-100K")
    parser.add_argument("--model", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", type=int, default=3, help="number of models trained by each side")
    parser.add_argument("--python", type=Path, default=RECBOLE_PYTHON, help="the interpreter that has RecBole")
    parser.add_argument("--out", type=Path, help="directory of the runs; finished runs are reused")
    parser.add_argument("--untimed", action="store_true", help="leave times blank: the machine has other work")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, files = options.out or Path(folder) / "runs", Path(folder) / FILES
        write_splits(options.directory, files)
        for model in options.model:
            append_rows("accuracy_recbole", rows_of(model, options, out, files), dry=options.dry)


if __name__ == "__main__":
    main()
