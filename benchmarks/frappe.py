"""DeepFM on Frappe_x1 with the settings of its published result, by the native API.

The published figures are those of the BARS benchmark (github.com/reczoo/BARS, DeepFM_frappe_x1). Its data may not be
passed on, so the files stay where they are: ``train_rebuilt.csv.gz``, ``valid.csv.gz`` and ``test.csv.gz``, each with a
label and ten categories.
"""

import argparse
import copy
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from record import Row, append_rows
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.data import Reader
from terarec.embedding import EmbeddingCollection
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, DatasetSpec, FeatureSpec, RowOptions, SplitByFiles, TableSpec, TrainingSpec
from terarec.train import Callback, Evaluation, Trainer, evaluate

FIELDS = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
WIDTH, HIDDEN, DROPOUT, INIT_SCALE, L2, LR, BATCH_SIZE, PATIENCE = 10, (400, 400, 400), 0.2, 1e-4, 0.05, 1e-3, 4096, 2
PUBLISHED_AUC, PUBLISHED_LOGLOSS = 0.9842, 0.1482


class DeepFM(nn.Module):
    """Linear terms, products of all pairs of fields, and an MLP with batch normalization over the same vectors."""

    def __init__(self, spec: DatasetSpec, seed: int) -> None:
        super().__init__()
        self.vectors, self.weights = (_collection(spec, width, seed) for width in (WIDTH, 1))
        self.bias = nn.Parameter(torch.zeros(1))
        sizes = (WIDTH * len(spec.categorical), *HIDDEN)
        layers: list[nn.Module] = []
        for size, next_size in pairwise(sizes):
            layers += [nn.Linear(size, next_size), nn.BatchNorm1d(next_size), nn.ReLU(), nn.Dropout(DROPOUT)]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, batch: Batch) -> Tensor:
        """The logits [B, 1]."""
        pooled = self.vectors(batch.sparse).pooled
        fields = pooled.unflatten(1, (-1, WIDTH))
        products = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True)
        linear = self.weights(batch.sparse).pooled.sum(1, keepdim=True) + self.bias
        logits: Tensor = linear + products + self.mlp(pooled)
        return logits


def _collection(spec: DatasetSpec, width: int, seed: int) -> EmbeddingCollection:
    tables = [
        TableSpec(
            name=f"{column.name}.{width}",
            rows=column.rows or 1,
            width=width,
            initializer="normal",
            init_scale=INIT_SCALE,
        )
        for column in spec.categorical
    ]
    features = [FeatureSpec(name=column.name, table=f"{column.name}.{width}") for column in spec.categorical]
    return EmbeddingCollection(tables, features, seed=seed)


class BestOnPlateau(Callback):
    """A tenth of the learning rates after an evaluation without improvement, and a copy of the best weights."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.row_optimizer is not None
        self.schedules = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.1, patience=0)
            for optimizer in (trainer.row_optimizer, trainer.dense_optimizer)
        ]
        self.best = 0.0
        self.weights: dict[str, Tensor] = {}

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Follow the validation AUC."""
        print(f"epoch {trainer.epoch}: AUC {evaluation.auc:.5f}, logloss {evaluation.logloss:.4f}", flush=True)
        for schedule in self.schedules:
            schedule.step(evaluation.auc)
        if evaluation.auc > self.best:
            self.best, self.weights = evaluation.auc, copy.deepcopy(trainer.model.state_dict())


def prepare(files: Path, out: Path) -> None:
    """Make the data set of the three files."""
    sources = [files / name for name in ("train_rebuilt.csv.gz", "valid.csv.gz", "test.csv.gz")]
    options = CsvOptions(label="label", categorical=FIELDS, split=SplitByFiles(valid=1, test=1))
    Workflow.of(csv_workflow(options)).prepare(sources, out)


def train(data: Path, seed: int) -> Evaluation:
    """Train until the validation AUC no longer rises, and evaluate the best weights on the test split."""
    torch.manual_seed(seed)
    reader = Reader(data, "train", batch_size=BATCH_SIZE, shuffle=True, seed=seed)
    model = DeepFM(reader.spec, seed)
    rows = RowOptimizer(model, AdamSpec(lr=LR, rows=RowOptions(mode="global", l2=L2)))
    trainer = Trainer(
        model, TrainingSpec(epochs=50, patience=PATIENCE), torch.optim.Adam(model.parameters(), lr=LR), rows
    )
    best = BestOnPlateau(trainer)
    trainer.callbacks.append(best)
    trainer.fit(reader, Reader(data, "valid", batch_size=BATCH_SIZE))
    model.load_state_dict(best.weights)
    return evaluate(model, Reader(data, "test", batch_size=BATCH_SIZE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, help="the directory of the three files")
    parser.add_argument("--seeds", type=int, default=2, help="how many models are trained")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare(options.files, data)
        for seed in range(options.seeds):
            result = train(data, seed)
            case = f"DeepFM, Frappe_x1, seed {seed}"
            auc = Row(case=case, metric="test AUC", value=result.auc, unit="", peer="BARS", peer_value=PUBLISHED_AUC)
            logloss = Row(
                case=case,
                metric="test logloss",
                value=result.logloss,
                unit="nat",
                peer="BARS",
                peer_value=PUBLISHED_LOGLOSS,
            )
            append_rows("frappe", [auc, logloss], dry=options.dry)


if __name__ == "__main__":
    main()
