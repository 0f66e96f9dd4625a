# SPDX-License-Identifier: Apache-2.0
"""Models of RUN directories, for evaluation, prediction and serving."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terarec.checkpoint import Checkpoint, complete_checkpoints, find, load
from terarec.checkpoint.directory import best_step, step_of
from terarec.config import load_run
from terarec.config.files import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import BagSource, LookupCollection, RowLookup
from terarec.embedding.modules import replace_modules
from terarec.embedding.tables import record_tables
from terarec.errors import ConfigError, FormatError
from terarec.formats import read_dataset
from terarec.formats.delta import StateId
from terarec.io.owned import own_directory
from terarec.models.registry import build_model
from terarec.nn.objectives import build_objective
from terarec.spec import DatasetSpec, DynamicTableSpec, RunSpec, TableSpec, Tiers
from terarec.spec.checks import is_count
from terarec.spec.model import ModelSpec
from terarec.spec.run import calibrated_for, calibration_of
from terarec.storage import Store


class LoadedModel(NamedTuple):
    """A trained model and its description.

    Attributes:
        model: The model in evaluation mode, without optimizer and optimizer state.
        spec: Spec of the run that trained it; its calibration of the scores is one for these weights.
        dataset: Columns, without shards; its workflow is relative to ``RUN/dataset``.
        state: The checkpoint of its weights and tables.
    """

    model: nn.Module
    spec: RunSpec
    dataset: DatasetSpec
    state: StateId

    @property
    def step(self) -> int:
        """Training steps of its weights."""
        return self.state.step


_LOGGER = logging.getLogger(__name__)

_LOADED = ".terarec-loaded"
"""Start of the names of directories with the tables of loaded runs."""


def find_checkpoint(run_dir: Path, spec: RunSpec, which: int | str | None = None) -> Path:
    """Return the checkpoint of a run that `which` names.

    Args:
        run_dir: The run.
        spec: Spec of the run.
        which: "last", "best" or a step; None for the best one of a run with ``training.patience``, which stops it after
            its best step, and for the last one of any other.

    Raises:
        DataNotFoundError: The run holds no complete checkpoint.
        ConfigError: It holds none that `which` names.
    """
    directory = run_dir / CHECKPOINT_DIRECTORY
    if which is None:
        # A run that was resumed without keep_best may be past the best step that is marked.
        wants_best = spec.training.patience is not None and spec.training.keep_best
        has_best = wants_best and best_step(directory) is not None
        which = "best" if has_best else "last"
    return find(directory, which)


def extended_step(spec: RunSpec) -> int | None:
    """Return the step of the checkpoint whose chain a run extends; None for a run that extends none.

    Raises:
        ConfigError: ``init_from`` names no checkpoint, as it does in every ``run.json`` of such a run.
    """
    if not spec.extend_chain or spec.init_from is None:
        return None
    name = Path(spec.init_from).name
    if not is_count(name.removeprefix("step-")):
        raise ConfigError("init_from", f"got {spec.init_from}, expected RUN/{CHECKPOINT_DIRECTORY}/step-N")
    return step_of(Path(name))


def load_model(
    run_dir: Path | str,
    checkpoint: int | str | None = None,
    *,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
) -> LoadedModel:
    """Load the model of a run.

    Args:
        run_dir: Directory of the run.
        checkpoint: "last", "best" or a step; None for the one of `find_checkpoint`.
        device: Device of the model; the CPU by default, wherever it was trained.
        allow_import: Packages whose code the model may name.

    Raises:
        DataNotFoundError: `run_dir` is not a run, or holds no complete checkpoint.
        ConfigError: It holds no such checkpoint, or its model is of a package that is not allowed.
        FormatError: A file of it is damaged.
        StorageError: Not enough memory for the tables.
    """
    run_dir = Path(run_dir)
    spec = load_run(run_dir / RUN_FILE)
    dataset = read_dataset(run_dir / DATASET_DIRECTORY)
    model = _build(spec, _with_own_files(spec.model, run_dir), dataset, allow_import)
    if device is not None:
        model = model.to(device)
    while True:
        path = find_checkpoint(run_dir, spec, checkpoint)
        try:
            opened = load(path)
            load_weights(model, opened, with_state=False)
            spec = _calibrated(run_dir, spec, opened.step)
            return LoadedModel(model=model.eval(), spec=spec, dataset=dataset, state=opened.state)
        except (FormatError, FileNotFoundError):
            # A training that continues there may have removed it for a newer one since it was found.
            if path in complete_checkpoints(run_dir / CHECKPOINT_DIRECTORY):
                raise


def _calibrated(run_dir: Path, spec: RunSpec, step: int) -> RunSpec:
    """Return `spec` without a calibration that is for other weights than those of a step."""
    calibration = calibration_of(spec)
    if calibration is not None and calibration.step != step:
        message = "%s: its calibration is for the weights of step %d; those of step %d are scored without it"
        _LOGGER.warning(message, run_dir, calibration.step, step)
    return calibrated_for(spec, step)


class ModelWithoutTables(NamedTuple):
    """A trained model whose collections are `LookupCollection`, to be connected to rows elsewhere.

    Attributes:
        model: The model in evaluation mode.
        spec: Spec of the run that trained it; its calibration of the scores is one for these weights.
        dataset: Columns, without shards.
        checkpoint: The checkpoint, which has the tables.
        tables: Tables of all collections, by name.
    """

    model: nn.Module
    spec: RunSpec
    dataset: DatasetSpec
    checkpoint: Checkpoint
    tables: Mapping[str, TableSpec | DynamicTableSpec]

    def connect(self, lookups: Mapping[str, RowLookup], bags: BagSource | None = None) -> None:
        """Look the rows of each table up in `lookups`; see `terarec.embedding.LookupCollection.connect`."""
        for module in self.model.modules():
            if isinstance(module, LookupCollection):
                module.connect(lookups, bags)


def load_without_tables(
    run_dir: Path,
    checkpoint: int | str | None = None,
    *,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
) -> ModelWithoutTables:
    """Load only the dense weights of a run's model; arguments and errors are those of `load_model`."""
    spec = load_run(run_dir / RUN_FILE)
    dataset = read_dataset(run_dir / DATASET_DIRECTORY)
    # Tables of one row each, since their specs alone are needed: the rows are elsewhere.
    with record_tables():
        model = _build(spec, _without_tiers(spec.model), dataset, allow_import)
    model = without_tables(model)
    opened = load(find_checkpoint(run_dir, spec, checkpoint))
    load_dense_state(model, opened.dense())
    if device is not None:
        model = model.to(device)
    lookups = [module for module in model.modules() if isinstance(module, LookupCollection)]
    return ModelWithoutTables(
        model=model.eval(),
        spec=_calibrated(run_dir, spec, opened.step),
        dataset=dataset,
        checkpoint=opened,
        tables={table.name: table for collection in lookups for table in collection.specs},
    )


def without_tables(model: nn.Module) -> nn.Module:
    """Replace the collections of `model` by ones without rows, and return it."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    replace_modules(model, {one: LookupCollection(one.specs, one.features) for one in collections})
    return model


def _build(run: RunSpec, model: ModelSpec, dataset: DatasetSpec, allow_import: Sequence[str]) -> nn.Module:
    """Return the model of a run, its weights not loaded, with `model` in place of the run's spec of it."""
    num_outputs = build_objective(run.objective).num_outputs(len(dataset.labels))
    return build_model(model, dataset, num_outputs=num_outputs, seed=run.training.seed, allow_import=allow_import)


def _without_tiers(spec: ModelSpec) -> ModelSpec:
    described: Any = spec
    if getattr(getattr(described, "tables", None), "tiers", None) is None:
        return spec
    loaded: ModelSpec = replace(described, tables=replace(described.tables, tiers=None))
    return loaded


def _with_own_files(spec: ModelSpec, run_dir: Path) -> ModelSpec:
    """Return `spec` with a separate directory for tables in a file tier: the run's, or for temporary files.

    A training may be using the directory of the spec, and whoever loads a run of somebody else has not chosen it.
    """
    described: Any = spec
    tiers: Tiers | None = getattr(getattr(described, "tables", None), "tiers", None)
    if tiers is None or tiers.file is None:
        return spec
    parent = run_dir.absolute() if os.access(run_dir, os.W_OK) else Path(tempfile.gettempdir())
    own = replace(tiers, file=str(own_directory(parent, _LOADED)))
    loaded: ModelSpec = replace(described, tables=replace(described.tables, tiers=own))
    return loaded


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, with_state: bool) -> None:
    """Copy the dense weights and the tables of `checkpoint` into `model`.

    Args:
        model: Model of the same spec as the one that was saved.
        checkpoint: An open checkpoint.
        with_state: Whether to load the row optimizer's state, too, for which the tables must have room.

    Raises:
        ConfigError: The model was described otherwise.
        FormatError: A damaged file.
    """
    load_dense_state(model, checkpoint.dense())
    checkpoint.load_tables(tables(model), with_state=with_state)


def tables(model: nn.Module) -> dict[str, Store]:
    """Return all embedding tables of `model` by name, as checkpoints hold them."""
    collections = (module for module in model.modules() if isinstance(module, EmbeddingCollection))
    return {name: table for collection in collections for name, table in collection.stores.items()}


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of ``model.state_dict()`` that is not in tables, sharing memory with the model.

    Made without ``state_dict()``, which copies dynamic tables.
    """
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, EmbeddingCollection):
            # The method that `state_dict` calls for each module: it knows which buffers are persistent.
            module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    return state


def load_dense_state(model: nn.Module, state: Mapping[str, Tensor], *, may_grow: bool = False) -> None:
    """Copy `state`, as `dense_state` gives it, into `model`.

    Args:
        model: Model of the same spec.
        state: The tensors by name.
        may_grow: Whether one side may have further ids: the shorter of two buffers with an element for each id, which
            the attribute ``id_buffers`` of a module names, gets zeros for them.

    Raises:
        ConfigError: A tensor is missing, unknown or of another shape; nothing was copied then.
    """
    mine = dense_state(model)
    of_ids = _id_buffers(model) if may_grow else set()
    grown: dict[str, Tensor] = {}
    for key in of_ids & state.keys():
        own, length = mine[key], max(mine[key].shape[:1], state[key].shape[:1])
        state = {**state, key: _lengthened(state[key], length)}
        mine[key] = _lengthened(own, length)
        if mine[key] is not own:
            grown[key] = mine[key]
    for key in (*mine, *state):
        # All keys are compared before the first copy; `load_state_dict` would copy what fits and then raise.
        got = list(state[key].shape) if key in state else None
        expected = list(mine[key].shape) if key in mine else None
        if got != expected:
            raise ConfigError(
                f"weights {key!r}", f"got shape {got}, expected {expected}; was the model described otherwise?"
            )
    for key, longer in grown.items():
        path, _, name = key.rpartition(".")
        setattr(model.get_submodule(path), name, longer)
    # Not strict, since the collections' own entries are absent from `state`.
    model.load_state_dict(state, strict=False)


def _id_buffers(model: nn.Module) -> set[str]:
    """Return the names in `dense_state` of the buffers with an element for each id."""
    names = ((path, name) for path, module in model.named_modules() for name in getattr(module, "id_buffers", ()))
    return {f"{path}.{name}" if path else name for path, name in names}


def _lengthened(values: Tensor, length: tuple[int, ...]) -> Tensor:
    """Return `values` with zeros behind them where they are shorter than `length`, the first of their dimensions."""
    if not values.dim() or values.shape[:1] >= length:
        return values
    return torch.cat([values, values.new_zeros(length[0] - len(values), *values.shape[1:])])
