# SPDX-License-Identifier: Apache-2.0
"""A training that continues the chain of checkpoints of another one with other data, such as those of the next day."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from terarec.checkpoint import Checkpoint, latest
from terarec.checkpoint.directory import copy_chain, step_path
from terarec.config import load_run
from terarec.config.files import CHECKPOINT_DIRECTORY
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.models.artifact import tables
from terarec.spec import RunSpec, TableSpec
from terarec.train.run_dir import RunDirectory
from terarec.train.trainer import Trainer

_ROWS_AT_ONCE = 1 << 16


def with_extended_checkpoint(spec: RunSpec, directory: RunDirectory) -> RunSpec:
    """Return a description whose ``init_from`` names the checkpoint that it extends: the newest one of a RUN.

    If `directory` has a run to resume that extends that RUN, it is the one that this run extends.
    """
    if not spec.extend_chain or spec.init_from is None:
        return spec
    path = Path(spec.init_from)
    if path.parent.name == CHECKPOINT_DIRECTORY:  # it may be gone by now, where the run goes on
        return spec
    checkpoints = path / CHECKPOINT_DIRECTORY
    if directory.has_checkpoint:
        kept = load_run(directory.run_file).init_from
        if kept is not None and Path(kept).parent == checkpoints:
            return dataclasses.replace(spec, init_from=kept)
    # Not the best one: those who follow the chain are at the newest.
    return dataclasses.replace(spec, init_from=str(latest(checkpoints)))


def check_growth(trainer: Trainer, extended: Checkpoint) -> None:
    """Raise `ConfigError` unless the static tables with further rows than those of a checkpoint can continue them."""
    collections = [module for module in trainer.model.modules() if isinstance(module, EmbeddingCollection)]
    specs = {table.name: table for collection in collections for table in collection.specs}
    for name, rows in _grown(trainer, extended).items():
        table, where = specs[name], f"table {name!r}"
        assert isinstance(table, TableSpec), "only static tables have a number of rows"
        grown = f"grows from {rows:,} to {table.rows:,} rows"
        if trainer.ranks.size > 1:
            raise ConfigError(where, f"{grown} in a training of several ranks, expected one process for this day")
        if table.tiers is not None and table.initializer != "zeros" and table.init_scale is None:
            # Rows that no step has trained are not stored. They follow from this scale, by default from the rows.
            raise ConfigError(
                where,
                f"{grown} in tiers, which changes the initial weights, expected model.tables.init_scale to be set",
            )


def extend_chain(trainer: Trainer, extended: Checkpoint, directory: Path) -> Path:
    """Let a trainer, before its first step, continue the steps and the chain of the checkpoint that it has just loaded.

    Args:
        trainer: The trainer.
        extended: The checkpoint.
        directory: ``RUN/checkpoints`` of the trainer, which gets `extended` and those that it builds on.

    Returns:
        The copy of `extended` there.

    Raises:
        FormatError: A damaged checkpoint.
        StorageError: The disk is full.
    """
    trainer.extend(extended.step)
    # Now rather than with the first delta: by then the other run, or its older checkpoints, may be gone.
    trainer.ranks.on_first("chain of checkpoints", lambda: copy_chain(extended.path, directory))
    return step_path(directory, extended.step)


def mark_added_rows(trainer: Trainer, extended: Checkpoint) -> None:
    """Count the rows that static tables have beyond those of a checkpoint as changed: no checkpoint has them.

    Raises:
        FormatError: A damaged checkpoint.
        StorageError: The disk of a tier is full.
    """
    stores = tables(trainer.model)
    for name, rows in _grown(trainer, extended).items():
        store = stores[name]
        for first in range(rows, len(store), _ROWS_AT_ONCE):
            store.import_(store.export(torch.arange(first, min(first + _ROWS_AT_ONCE, len(store)))))


def _grown(trainer: Trainer, extended: Checkpoint) -> dict[str, int]:
    """Return the static tables that have more rows than in a checkpoint, and their rows there."""
    files = extended.table_files()
    stores = {name: store for name, store in tables(trainer.model).items() if name in files.names}
    num_rows = {name: files.num_rows(name) for name, store in stores.items() if not store.is_dynamic}
    return {name: rows for name, rows in num_rows.items() if not files.is_dynamic(name) and rows < len(stores[name])}
