# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: their schedule and content, and the continuation or start of a training from one."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn, optim
from typing_extensions import override

from terarec.checkpoint import Checkpoint, TrainState, follow_changes, load, mark_best, save
from terarec.checkpoint.directory import MANIFEST, keep_newest, step_path
from terarec.config import load_run
from terarec.config.files import RUN_FILE
from terarec.data.reader import BatchReader
from terarec.errors import ConfigError, DataNotFoundError, StorageError, TrainingError
from terarec.formats import read_dataset
from terarec.models.artifact import dense_state, find_checkpoint, load_dense_state, load_weights, tables
from terarec.models.trained_columns import check_added_ids, check_columns, check_missing_ids
from terarec.optim.dense import build_dense_optimizer
from terarec.spec import (
    DatasetSpec,
    DenseOptimizerSpec,
    RowOptions,
    RunSpec,
    SparseOptimizerSpec,
    TorchOptimizerSpec,
    to_data,
)
from terarec.spec.codec import differences
from terarec.train.devices import collections_of
from terarec.train.evaluation import Evaluation
from terarec.train.extending import check_growth
from terarec.train.run_dir import RunDirectory, check_run
from terarec.train.trainer import Callback, Trainer

NO_OPTIMIZER: Mapping[str, Any] = {"state": {}, "param_groups": []}
"""State of a model without dense parameters."""


_logger = logging.getLogger(__name__)


_SAME = {"kind", "tables.kind", "tables.dtype"}
"""Fields that have to be equal though the shapes of weights, which loading compares, do not show them."""


class Checkpointing(Callback):
    """A callback that saves every ``checkpoint_every`` steps or at every epoch's end, the best step, and the last one.

    The last step is saved for any end of the training. With ``delta_every`` the checkpoints in between, of the best
    step and of an interrupted training hold only the changes since the previous one. A training that extends the
    chain of another one saves no complete ones either, as long as few rows change.

    Layers and rows with a weight that is not finite are not saved: the training ends, and the checkpoints before are
    kept.

    Args:
        directory: ``RUN/checkpoints``.
        every: Steps between checkpoints; None for epochs' ends.
        delta_every: Steps between deltas; None for none.
        keep: Number of the newest checkpoints that stay.
        keep_best: Whether the step of the best evaluation is saved, marked and kept as well.
        extends: Whether the training extends the chain of another one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int | None,
        keep: int,
        keep_best: bool,
        delta_every: int | None = None,
        extends: bool = False,
    ) -> None:
        self.directory = directory
        self.every = every
        self.delta_every = delta_every
        self.keep = keep
        self.keep_best = keep_best
        self.extends = extends
        self.newest: Path | None = None
        self._saved_step = 0  # no step, no checkpoint
        self._marked_step: int | None = None

    def continue_from(self, trainer: Trainer, newest: Path) -> None:
        """Take `newest` as the checkpoint of the present step, which is not saved again."""
        self.newest, self._saved_step = newest, trainer.step
        if self.delta_every is not None or self.extends:
            # The next delta has what changes after this checkpoint.
            follow_changes(tables(trainer.model), newest)

    @override
    def on_start(self, trainer: Trainer) -> None:
        # The process may have been killed before it did so.
        self._mark_best(trainer)

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        # This step's checkpoint, if it was saved before its evaluation.
        if trainer.step == self._saved_step:
            self._mark_best(trainer)

    @override
    def on_step(self, trainer: Trainer) -> None:
        if self.every is not None and trainer.step % self.every == 0:
            self._save(trainer, is_whole=True)
        elif self.every is None and trainer.is_epoch_end:
            return  # saved there, after all that callbacks do in the step
        elif self._is_best(trainer) or (self.delta_every is not None and trainer.step % self.delta_every == 0):
            self._save(trainer)

    @override
    def on_epoch_end(self, trainer: Trainer) -> None:
        if self.every is None:
            self._save(trainer, is_whole=True)
        elif self._is_best(trainer):  # evaluated behind its step, where the epoch had fewer batches than expected
            self._save(trainer)

    @override
    def on_interrupt(self, trainer: Trainer) -> None:
        self._save(trainer)

    @override
    def on_error(self, trainer: Trainer) -> None:
        # With several ranks, others may have gone on, unless `RanksCallbacks` knows better.
        if trainer.ranks.size == 1:
            self.save_after_error(trainer)

    def save_after_error(self, trainer: Trainer) -> None:
        """Save the last step after an exception between two steps, on all ranks, if its weights are finite."""
        if _non_finite_weights(trainer.model) is None:
            self._save(trainer)

    @override
    def on_finish(self, trainer: Trainer) -> None:
        self._save(trainer, is_whole=True)

    def _is_best(self, trainer: Trainer) -> bool:
        return self.keep_best and trainer.early_stopping.best_step == trainer.step

    def _save(self, trainer: Trainer, *, is_whole: bool = False) -> None:
        if self._saved_step == trainer.step:
            return
        _ = trainer.loss  # waits for a GPU: its steps are no part of the time of saving
        begun = time.perf_counter()
        self._save_anew(trainer, is_whole=is_whole)
        trainer.saving_seconds += time.perf_counter() - begun

    def _save_anew(self, trainer: Trainer, *, is_whole: bool) -> None:
        layer = _non_finite_weights(trainer.model)
        if layer is not None:
            raise TrainingError(
                f"step {trainer.step} (epoch {trainer.last_epoch})",
                f"the update left {layer} with weights that are not finite, which are not saved; a lower learning rate "
                "may help",
                layer=layer,
            )
        kind: Literal["full", "base", "delta", "shorter"] = "base" if is_whole else "delta"
        if self.extends:
            kind = "shorter" if is_whole else "delta"
        elif self.delta_every is None:
            kind = "full"
        self.newest = save(self.directory, capture(trainer), kind=kind, writers=trainer.ranks)
        self._saved_step = trainer.step
        self._mark_best(trainer)  # before anything is removed: a crash in between leaves one checkpoint too many
        # Of all ranks, which share the directory, one removes.
        if trainer.ranks.is_first:
            keep_newest(self.directory, self.keep)

    def _mark_best(self, trainer: Trainer) -> None:
        best = trainer.early_stopping.best_step
        if not self.keep_best or best is None or best == self._marked_step:
            return
        if trainer.ranks.is_first and (step_path(self.directory, best) / MANIFEST).is_file():
            mark_best(self.directory, best)
            self._marked_step = best


def _non_finite_weights(model: nn.Module) -> str | None:
    """Return the name of the first parameter of the layers with a weight that is not finite; None for no such one."""
    # Those of tables are empty and stand for their rows.
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.numel())
    return next((name for name, weight in weights if not bool(weight.isfinite().all())), None)


def capture(trainer: Trainer, reader_state: Mapping[str, Any] | None = None) -> TrainState:
    """Return the state of a trainer between two steps; nothing is copied.

    Args:
        trainer: The trainer.
        reader_state: Position of the train reader; None for that of the running `Trainer.fit`.
    """
    dense, rows = trainer.optimizers.dense, trainer.optimizers.rows
    return TrainState(
        step=trainer.step,
        dense=dense_state(trainer.model),
        tables=tables(trainer.model),
        optimizer=NO_OPTIMIZER if dense is None else dense.state_dict(),
        rng=torch.get_rng_state(),
        progress={
            "trainer": trainer.state_dict(),
            "reader": trainer.reader_state() if reader_state is None else dict(reader_state),
            "row_optimizer": None if rows is None else rows.step_state(),
            "device_rng": _device_rng(trainer.device),
        },
    )


def restore(trainer: Trainer, reader: BatchReader, checkpoint: Checkpoint) -> None:
    """Bring `trainer` and its train reader to where `checkpoint` was saved.

    Raises:
        ConfigError: Model, optimizers or reader were described otherwise.
        FormatError: A damaged file.
    """
    load_weights(trainer.model, checkpoint, with_state=True)
    progress = checkpoint.progress
    dense, rows = trainer.optimizers.dense, trainer.optimizers.rows
    if dense is not None:
        dense.load_state_dict(checkpoint.optimizer())
    if rows is not None:
        rows.load_step_state(progress["row_optimizer"])
    try:
        reader.load_state_dict(progress["reader"])
    except ConfigError as error:
        raise ConfigError(
            error.where, f"{error.problem}; a new run with init_from=RUN continues with other data"
        ) from None
    trainer.load_state_dict(progress["trainer"])
    # Last, as building and loading draw random numbers.
    torch.set_rng_state(checkpoint.rng)
    _set_device_rng(trainer.device, progress["device_rng"])


def columns_read(model: nn.Module, *specs: object) -> frozenset[str]:
    """Return the names of columns that a model looks up, and all texts in `specs`, which may name others."""
    features = {feature.name for collection in collections_of(model) for feature in collection.features}
    return frozenset(features.union(*(_texts(to_data(spec)) for spec in specs)))


def _texts(data: object) -> set[str]:
    if isinstance(data, Mapping):
        return set[str]().union(*(_texts(value) for value in (*data, *data.values())))
    if isinstance(data, list | tuple):
        return set[str]().union(*map(_texts, data))
    return {data} if isinstance(data, str) else set()


def start_from(trainer: Trainer, spec: RunSpec, dataset: DatasetSpec) -> Checkpoint:
    """Load the weights that ``spec.init_from`` names and, unless ``spec.reset_optimizer``, the optimizers' states.

    Learning rates and other options of the optimizers stay those of `spec`. The state of an optimizer of another kind
    is left out, which a warning says. With ``spec.extend_chain`` it is rejected, and ids may be added.

    Args:
        trainer: Trainer of a model that `spec` and `dataset` describe, before its first step.
        spec: The run to start.
        dataset: Its data.

    Returns:
        The checkpoint that was loaded.

    Raises:
        DataNotFoundError: There is no such run or checkpoint.
        ConfigError: Another model, other tables, other columns, or a workflow that gives other ids.
        FormatError: A damaged file.
    """
    assert spec.init_from is not None, "a run without init_from starts from its initial weights"
    run_dir, checkpoint = _find(Path(spec.init_from))
    old = load_run(run_dir / RUN_FILE)
    # Other differences of the models show in the shapes of weights, which loading compares.
    for path, before, now in differences(to_data(old.model), to_data(spec.model)):
        if path in _SAME:
            raise ConfigError(
                "init_from",
                f"model.{path} is {json.dumps(before)} in {run_dir / RUN_FILE}, got {json.dumps(now)}, "
                "expected the same model",
            )
    directory = RunDirectory(run_dir)
    check = check_added_ids if spec.extend_chain else check_columns
    trained_on = read_dataset(directory.dataset)
    check(dataset, Path(spec.data), trained_on, directory.dataset)
    check_missing_ids(dataset, trained_on, columns_read(trainer.model, spec.model, spec.objective))
    left_out = _left_out(old, spec, trainer.device)
    if left_out and spec.extend_chain:
        raise ConfigError(
            left_out[0], f"is another than in {run_dir / RUN_FILE}, expected the same one: a chain keeps its states"
        )
    if left_out:
        _logger.warning("init_from: the state of %s was not loaded", " and ".join(left_out))
    with_rows = "sparse_optimizer" not in left_out
    if spec.extend_chain:
        check_growth(trainer, checkpoint)
    # Layers first: they show another model before large tables are read.
    try:
        load_dense_state(trainer.model, checkpoint.dense(), may_grow=spec.extend_chain)
    except ConfigError as error:
        raise ConfigError("init_from", f"{checkpoint.path}: {error}") from None
    try:
        _load(
            trainer,
            checkpoint,
            with_dense="dense_optimizer" not in left_out,
            with_rows=with_rows,
            may_grow=spec.extend_chain,
        )
    except (ConfigError, StorageError) as error:
        hint = "; reset_optimizer=True loads the weights alone" if with_rows and not spec.extend_chain else ""
        raise ConfigError("init_from", f"{checkpoint.path}: {error}{hint}") from None
    return checkpoint


def _find(path: Path) -> tuple[Path, Checkpoint]:
    """Return the run and the checkpoint that `path`, one of them, names."""
    if not (path / MANIFEST).is_file():
        check_run(path)
        return path, load(find_checkpoint(path, load_run(path / RUN_FILE)))
    # RUN/checkpoints/step-N.
    run_dir = path.absolute().parents[1]
    if not (run_dir / RUN_FILE).is_file():
        raise DataNotFoundError(
            path, f"{run_dir} holds no {RUN_FILE}, which says what ids mean, expected a RUN or a checkpoint in one"
        )
    return run_dir, load(path)


def _left_out(old: RunSpec, new: RunSpec, device: torch.device) -> list[str]:
    """Return the optimizers whose state is not loaded: those of another kind, or both if that is requested."""
    before, now = old.dense_optimizer, new.dense_optimizer
    is_other = {
        "dense_optimizer": _state_kind(before) != _state_kind(now) or _lacks_state(before, now, device),
        "sparse_optimizer": _row_kinds(old) != _row_kinds(new),
    }
    return [field for field, is_left_out in is_other.items() if new.reset_optimizer or is_left_out]


def _lacks_state(old: DenseOptimizerSpec, new: DenseOptimizerSpec, device: torch.device) -> bool:
    """Return whether a step by an optimizer of torch reads what `old` does not store, such as that of its amsgrad."""
    if old == new or not isinstance(new, TorchOptimizerSpec):
        return False
    names = []
    for spec in (old, new):
        weight = nn.Parameter(torch.zeros(1, 1, device=device))
        weight.grad = torch.zeros_like(weight)
        optimizer = build_dense_optimizer(spec, [weight])
        optimizer.step()
        names.append(set(optimizer.state[weight]))
    # Where nothing was stored the first step makes all.
    return bool(names[0]) and not names[1] <= names[0]


def _row_kinds(run: RunSpec) -> tuple[object, ...]:
    """Return the properties that determine the meaning of the rows' states: the rules, and the tables they update."""
    rules = {name: _state_kind(rule) for name, rule in run.row_optimizers.items()}
    assigned = getattr(getattr(run.model, "tables", None), "optimizers", None) or {}
    return _state_kind(run.sparse_optimizer), rules, dict(assigned)


def _state_kind(spec: DenseOptimizerSpec | SparseOptimizerSpec) -> tuple[object, ...]:
    """Return the properties that determine the meaning of an optimizer's state."""
    if isinstance(spec, TorchOptimizerSpec):
        return spec.kind, spec.name
    options = RowOptions() if spec.rows is None else spec.rows
    return spec.kind, options.mode, getattr(spec, "lr_in_momentum", False)


def _load(trainer: Trainer, checkpoint: Checkpoint, *, with_dense: bool, with_rows: bool, may_grow: bool) -> None:
    checkpoint.load_tables(tables(trainer.model), with_state=with_rows, may_grow=may_grow)
    dense, rows = trainer.optimizers.dense, trainer.optimizers.rows
    if with_dense and dense is not None:
        _load_state(dense, checkpoint.optimizer())
    if with_rows and rows is not None:
        # The number of steps continues, for the bias correction of Adam; the rates are those of the new run.
        rates = [group["lr"] for group in rows.param_groups]
        rows.load_step_state(checkpoint.progress["row_optimizer"])
        for group, rate in zip(rows.param_groups, rates, strict=True):
            group["lr"] = rate


def _load_state(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state` except for the options of its groups."""
    # torch replaces the options of groups, among them the rate, by those that are loaded.
    groups = optimizer.state_dict()["param_groups"]
    for group, saved in zip(groups, state["param_groups"], strict=True):
        group["params"] = saved["params"]
        if "num_steps" in group:  # `EpsilonHatAdam` counts them, torch's Adam for each parameter
            steps = [state["state"][number]["step"] for number in group["params"] if number in state["state"]]
            group["num_steps"] = int(max(steps, default=0))
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})


def _device_rng(device: torch.device) -> str | None:
    """Return the random state of a GPU, which dropout uses, as text; None for the CPU, whose state checkpoints hold."""
    if device.type == "cpu":
        return None
    state = torch.get_device_module(device).get_rng_state(device)
    return base64.b64encode(state.numpy().tobytes()).decode()


def _set_device_rng(device: torch.device, text: str | None) -> None:
    """Set the state of `_device_rng`; a checkpoint of another kind of device does not change it."""
    if text is not None and device.type != "cpu":
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(state, device)
