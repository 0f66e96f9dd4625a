"""What lies where in a RUN directory, and how one is begun."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from terarec.checkpoint import whole
from terarec.config import load_run, save_run
from terarec.errors import ConfigError
from terarec.formats import AtomicFile, write_dataset
from terarec.models.artifact import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.spec import DatasetSpec, RunSpec, TrainingSpec, VocabularyEncoder

METRICS_FILE = "metrics.jsonl"

_MAY_CHANGE = frozenset(
    {
        "epochs",
        "max_steps",
        "eval_split",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "threads",
        "reader_threads",
    }
)
"""Fields of `TrainingSpec` that a resumed run may set anew; any other would change what the steps so far meant."""


class RunDirectory:
    """Paths of a RUN.

    Attributes:
        path: the directory itself.
        run_file: the resolved `RunSpec`.
        dataset: description and vocabularies of the data, without samples.
        checkpoints: the checkpoints.
        metrics: the curves, as JSON lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / RUN_FILE
        self.dataset = path / DATASET_DIRECTORY
        self.checkpoints = path / CHECKPOINT_DIRECTORY
        self.metrics = path / METRICS_FILE

    def check(self, spec: RunSpec, *, resume: bool) -> None:
        """Raise `ConfigError` if training `spec` here would spoil what is here.

        That is so if there are checkpoints and `resume` is false, or if `spec` differs from the run to resume in
        anything but how long to go on, how often to save and score, and how many threads to use.
        """
        if not whole(self.checkpoints):
            return
        if not resume:
            raise ConfigError(f"{self.path}: holds the checkpoints of a run, expected an empty directory, or --resume")
        before = load_run(self.run_file)
        for field in dataclasses.fields(RunSpec):
            old, new = getattr(before, field.name), getattr(spec, field.name)
            if field.name == "training":
                old, new = _lasting(old), _lasting(new)
            if field.name != "data" and old != new:
                raise ConfigError(f"{self.run_file}: {field.name} is {old}, got {new}; a resumed run cannot change it")

    def begin(self, spec: RunSpec, dataset: DatasetSpec) -> None:
        """Write ``run.json`` and the description of the data, as serving needs it: columns and vocabularies."""
        self.path.mkdir(parents=True, exist_ok=True)
        for column in dataset.categorical:
            if isinstance(column.encoder, VocabularyEncoder):
                _copy(Path(spec.data) / column.encoder.file, self.dataset / column.encoder.file)
        write_dataset(dataclasses.replace(dataset, splits={}), self.dataset)
        save_run(spec, self.run_file)


def _lasting(training: TrainingSpec) -> dict[str, object]:
    return {
        field.name: getattr(training, field.name)
        for field in dataclasses.fields(training)
        if field.name not in _MAY_CHANGE
    }


def _copy(source: Path, target: Path) -> None:
    file = AtomicFile(target)
    with file.guard():
        shutil.copyfile(source, file.partial)
    file.commit()
