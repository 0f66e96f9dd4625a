"""Starting a run from the weights of another one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import optim

from terarec.checkpoint import MANIFEST, Checkpoint, load
from terarec.config import load_run
from terarec.errors import ConfigError, DataNotFoundError, StorageError
from terarec.formats import read_dataset
from terarec.models.artifact import RUN_FILE, find_checkpoint
from terarec.models.state import load_dense_state, tables
from terarec.spec import (
    DatasetSpec,
    DenseOptimizerSpec,
    RowOptions,
    RunSpec,
    SparseOptimizerSpec,
    TorchOptimizerSpec,
    to_data,
)
from terarec.train.columns import check_columns
from terarec.train.run_dir import RunDirectory, check_run, differences
from terarec.train.trainer import Trainer

_logger = logging.getLogger(__name__)
_SAME = {"kind", "tables.kind", "tables.dtype"}
"""Fields that have to be equal though the shapes of weights, which loading compares, do not tell them."""


def start_from(trainer: Trainer, spec: RunSpec, dataset: DatasetSpec) -> Path:
    """Load the weights that ``spec.init_from`` names and, unless ``spec.reset_optimizer``, the optimizers' states.

    Learning rates and other options of the optimizers stay those of `spec`. The state of an optimizer of another kind
    is left out, which a warning says.

    Args:
        trainer: of a model that `spec` and `dataset` describe, before its first step.
        spec: the run to start.
        dataset: its data.

    Returns:
        The checkpoint that was loaded.

    Raises:
        DataNotFoundError: there is no such run or checkpoint.
        ConfigError: another model, other tables, other columns, or a workflow that gives other ids.
        FormatError: a damaged file.
    """
    assert spec.init_from is not None, "a run without init_from starts from its first weights"
    run_dir, checkpoint = _find(Path(spec.init_from))
    old = load_run(run_dir / RUN_FILE)
    for path, before, now in differences(to_data(old.model), to_data(spec.model)):
        if path in _SAME:
            raise ConfigError(
                f"init_from: model.{path} is {json.dumps(before)} in {run_dir / RUN_FILE}, got {json.dumps(now)}, "
                "expected the same model"
            )
    directory = RunDirectory(run_dir)
    check_columns(dataset, Path(spec.data), read_dataset(directory.dataset), directory.dataset)
    left_out = _left_out(old, spec)
    if left_out:
        _logger.warning("init_from: the state of %s was not loaded", " and ".join(left_out))
    with_rows = "sparse_optimizer" not in left_out
    try:
        load_dense_state(trainer.model, checkpoint.dense())
    except ConfigError as error:
        raise ConfigError(f"init_from: {checkpoint.path}: {error}") from None
    try:
        _load(trainer, checkpoint, with_dense="dense_optimizer" not in left_out, with_rows=with_rows)
    except (ConfigError, StorageError) as error:
        hint = "; --reset-optimizer loads the weights alone" if with_rows else ""
        raise ConfigError(f"init_from: {checkpoint.path}: {error}{hint}") from None
    return checkpoint.path


def _find(path: Path) -> tuple[Path, Checkpoint]:
    """The run and the checkpoint that `path`, one of them, stands for."""
    if not (path / MANIFEST).is_file():
        check_run(path)
        return path, load(find_checkpoint(path, load_run(path / RUN_FILE)))
    run_dir = path.absolute().parents[1]
    if not (run_dir / RUN_FILE).is_file():
        raise DataNotFoundError(
            f"{path}: {run_dir} holds no {RUN_FILE}, which says what ids mean, expected a RUN or a checkpoint in one"
        )
    return run_dir, load(path)


def _left_out(old: RunSpec, new: RunSpec) -> list[str]:
    """The optimizers whose state is not loaded: those of another kind, or both if that is asked for."""
    kinds = {
        "dense_optimizer": [_state_kind(run.dense_optimizer) for run in (old, new)],
        "sparse_optimizer": [_row_kinds(run) for run in (old, new)],
    }
    return [field for field, (before, now) in kinds.items() if new.reset_optimizer or before != now]


def _row_kinds(run: RunSpec) -> tuple[object, ...]:
    """What the meaning of the rows' states depends on: the rules, and which tables they move."""
    rules = {name: _state_kind(rule) for name, rule in run.row_optimizers.items()}
    assigned = getattr(getattr(run.model, "tables", None), "optimizers", None) or {}
    return _state_kind(run.sparse_optimizer), rules, dict(assigned)


def _state_kind(spec: DenseOptimizerSpec | SparseOptimizerSpec) -> tuple[object, ...]:
    """What the meaning of an optimizer's state depends on."""
    if isinstance(spec, TorchOptimizerSpec):
        return spec.kind, spec.name
    options = RowOptions() if spec.rows is None else spec.rows
    return spec.kind, options.mode, getattr(spec, "lr_in_momentum", False)


def _load(trainer: Trainer, checkpoint: Checkpoint, *, with_dense: bool, with_rows: bool) -> None:
    checkpoint.load_tables(tables(trainer.model), with_state=with_rows)
    dense, rows = trainer.optimizers.dense, trainer.optimizers.rows
    if with_dense and dense is not None:
        _load_state(dense, checkpoint.optimizer())
    if with_rows and rows is not None:
        rates = [group["lr"] for group in rows.param_groups]
        rows.load_step_state(checkpoint.progress["row_optimizer"])
        for group, rate in zip(rows.param_groups, rates, strict=True):
            group["lr"] = rate


def _load_state(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state` but for the options of its groups."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, mine in zip(optimizer.param_groups, options, strict=True):
        group.update(mine)
