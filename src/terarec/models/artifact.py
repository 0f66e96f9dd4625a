"""The part of a RUN directory that makes a model: what evaluation, prediction and serving open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from terarec.checkpoint import Checkpoint, find, load, whole
from terarec.checkpoint.directory import best_step
from terarec.config import load_run
from terarec.errors import FormatError
from terarec.formats import read_dataset
from terarec.models.registry import build_model
from terarec.models.state import load_dense_state, tables
from terarec.nn.objectives import build_objective
from terarec.spec import DatasetSpec, RunSpec

RUN_FILE = "run.json"
DATASET_DIRECTORY = "dataset"
CHECKPOINT_DIRECTORY = "checkpoints"


class LoadedModel(NamedTuple):
    """A trained model and what describes it.

    Attributes:
        model: in evaluation mode; no optimizer and no optimizer state comes with it.
        spec: of the run that trained it.
        dataset: columns, without shards; its workflow is relative to ``RUN/dataset``.
        step: training steps behind its weights.
    """

    model: nn.Module
    spec: RunSpec
    dataset: DatasetSpec
    step: int


def find_checkpoint(run_dir: Path, spec: RunSpec, which: int | str | None = None) -> Path:
    """The checkpoint of a run that `which` names.

    Args:
        run_dir: the run.
        spec: of the run.
        which: "last", "best" or a step; None for the best one of a run with ``training.patience``, which stops it after
            its best step, and for the last one of any other.

    Raises:
        DataNotFoundError: the run holds no whole checkpoint.
        ConfigError: it holds none that `which` names.
    """
    directory = run_dir / CHECKPOINT_DIRECTORY
    if which is None:
        # A run that was resumed without keep_best may be past the best step that is marked.
        wants_best = spec.training.patience is not None and spec.training.keep_best
        has_best = wants_best and best_step(directory) is not None
        which = "best" if has_best else "last"
    return find(directory, which)


def load_model(
    run_dir: Path,
    checkpoint: int | str | None = None,
    *,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
) -> LoadedModel:
    """Load the model of a run.

    Args:
        run_dir: What training wrote.
        checkpoint: "last", "best" or a step; None for the one of `find_checkpoint`.
        device: Where the model is to be; the CPU by default, wherever it was trained.
        allow_import: Packages whose code the model may name.

    Raises:
        DataNotFoundError: `run_dir` is no run, or holds no whole checkpoint.
        ConfigError: it holds no such checkpoint, or its model is of a package that is not allowed.
        FormatError: a file of it is damaged.
        StorageError: not enough memory for the tables.
    """
    spec = load_run(run_dir / RUN_FILE)
    dataset = read_dataset(run_dir / DATASET_DIRECTORY)
    num_outputs = build_objective(spec.objective).num_outputs(len(dataset.labels))
    model = build_model(
        spec.model, dataset, num_outputs=num_outputs, seed=spec.training.seed, allow_import=allow_import
    )
    if device is not None:
        model = model.to(device)
    while True:
        path = find_checkpoint(run_dir, spec, checkpoint)
        try:
            opened = load(path)
            load_weights(model, opened, with_state=False)
            return LoadedModel(model=model.eval(), spec=spec, dataset=dataset, step=opened.step)
        except (FormatError, FileNotFoundError):
            # A training that goes on there may have removed it for a newer one since it was found.
            if path in whole(run_dir / CHECKPOINT_DIRECTORY):
                raise


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, with_state: bool) -> None:
    """Copy the dense weights and the tables of `checkpoint` into `model`.

    Args:
        model: described as the one that was saved.
        checkpoint: an open checkpoint.
        with_state: also the row optimizer's state, for which the tables must have room.

    Raises:
        ConfigError: the model was described otherwise.
        FormatError: a damaged file.
    """
    load_dense_state(model, checkpoint.dense())
    checkpoint.load_tables(tables(model), with_state=with_state)
