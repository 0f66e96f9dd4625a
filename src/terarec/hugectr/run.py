# SPDX-License-Identifier: Apache-2.0
"""A model of the facade as a RUN, which `terarec train --resume`, `evaluate`, `predict`, `export` and `serve` take."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from terarec.checkpoint import TrainState, save
from terarec.checkpoint.directory import newest_checkpoint
from terarec.data import BatchReader, open_reader, read_spec
from terarec.errors import ConfigError
from terarec.formats.hugectr.records import RECORDS_FILE, write_records
from terarec.hugectr.compilation import Compiled
from terarec.hugectr.data import file_url
from terarec.hugectr.enums import Check_t
from terarec.hugectr.objects import DataReaderParams, Solver
from terarec.hugectr.readers import KIND_OF_READER, DataReader, drops_short_batches
from terarec.hugectr.schedule import LearningRateScheduler
from terarec.io.remote import is_remote
from terarec.models import GraphModel
from terarec.optim import LearningRateSchedule, build_schedulers
from terarec.optim.schedules import scheduler_states
from terarec.spec import (
    DenseOptimizerSpec,
    GraphModelSpec,
    GraphSpec,
    RecordLayout,
    RecordsSpec,
    RunSpec,
    SparseOptimizerSpec,
    TableSpec,
    WarmupDecaySchedule,
)
from terarec.spec.dataset import RecordSplit
from terarec.train import Trainer
from terarec.train.checkpointing import capture
from terarec.train.run_dir import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Content of the RUN of a model in training.

    Attributes:
        trainer: Trains a graph.
        dense: Rule of the layers.
        rules: Rules of tables by name.
        schedule: Rates of the iterations.
        next_step: Number of the next iteration in `schedule`, from 1.
        shuffle: Whether the training data is shuffled.
        repeat: Whether the training data repeats without an end.
        drop_last: Whether a short last batch of the training data is left out.
        reader_threads: Threads that read.
        reader_state: Position in the training data; None for its start.
    """

    trainer: Trainer
    dense: DenseOptimizerSpec
    rules: Mapping[str, SparseOptimizerSpec]
    schedule: LearningRateSchedule
    next_step: int
    shuffle: bool
    repeat: bool
    drop_last: bool
    reader_threads: int
    reader_state: Mapping[str, Any] | None


def describe_data(
    graph: GraphSpec,
    layout: RecordLayout,
    reader: DataReaderParams,
    readers: Mapping[str, DataReader],
    async_layout: tuple[bool, bool],
) -> RecordsSpec:
    """Describe the data of a model, with absolute paths.

    Args:
        graph: The model.
        layout: Layout of a sample in the files.
        reader: The `DataReaderParams`.
        readers: Split -> the model's reader of it.
        async_layout: Result of `async_layout_of`.

    Raises:
        FileCannotOpenError: A file is not there.
        BrokenFileError: A file does not hold what it should.
    """
    kind = KIND_OF_READER[reader.data_reader_type]
    # Without offsets of the reader, sizes bound keys instead: those of static tables, as a run checks keys.
    has_offsets = bool(layout.slot_sizes) and kind in ("parquet", "raw")
    if not has_offsets:
        sizes = _static_rows(graph, layout)
        layout = dataclasses.replace(layout, slot_sizes=sizes if any(sizes) else ())
    multi_hot, is_float = async_layout
    return RecordsSpec(
        kind=kind,
        layout=layout,
        splits={
            split: RecordSplit(
                path=_absolute(file_url(reader.data_source_params, one.name)), rows=sum(one.open_source().group_rows)
            )
            for split, one in readers.items()
        },
        label_names=tuple(name for label in graph.labels for name in _numbered(label.name, label.dim)),
        dense_names=_numbered(graph.dense_name, graph.dense_dim),
        checksum=reader.check_type is Check_t.Sum,
        float_label_dense=is_float if kind == "raw_async" else reader.float_label_dense or kind != "raw",
        keys="with_offsets" if has_offsets else "as_read",
        multi_hot=multi_hot or kind != "raw_async",
        shuffles_rows=False,
    )


def run_parts(
    compiled: Compiled, params: DataReaderParams, solver: Solver, scheduler: LearningRateScheduler, *, is_running: bool
) -> tuple[RecordsSpec, Training]:
    """Describe the data and the training of a compiled model.

    While a `fit` runs, its reader may be ahead of the trainer.

    Raises:
        FileCannotOpenError: A file is not there.
        BrokenFileError: A file does not hold what it should.
    """
    trainer, reader = compiled.trainer, compiled.train_reader
    # The position of a reader whose batches are read ahead is beyond what was trained on.
    started = trainer.reader_state() if is_running else reader.state_dict() if reader.is_started() else None
    readers = {"train": reader, "valid": compiled.eval_reader}
    records = describe_data(compiled.plan.spec, compiled.layout, params, readers, compiled.async_layout)
    training = Training(
        trainer=trainer,
        dense=compiled.dense,
        rules=compiled.plan.rules,
        schedule=scheduler.schedule,
        next_step=scheduler.get_step() + 1,
        shuffle=compiled.is_shuffled,
        repeat=solver.repeat_dataset,
        drop_last=drops_short_batches(solver, params)[0],
        reader_threads=min(params.num_workers, os.cpu_count() or 1),
        reader_state=started,
    )
    return records, training


def save_run(path: Path, records: RecordsSpec, training: Training) -> None:
    """Write a RUN that continues `training`.

    Args:
        path: A new or empty directory.
        records: The data.
        training: The model in training.

    Raises:
        ConfigError: The directory holds something else, or a run that has checkpoints.
        StorageError: The disk is full.
    """
    directory = RunDirectory(path)
    with directory.locked():
        # Also copies of a chain that a run to start over there extends.
        if newest_checkpoint(directory.checkpoints) is not None:
            raise ConfigError(path, "holds the checkpoints of a run, expected a new or an empty directory")
        described = path.absolute() / RECORDS_FILE
        write_records(records, described)
        spec = _run_spec(str(described), records, training)
        reader = _open_train(spec)
        try:
            if training.reader_state is not None:
                reader.load_state_dict(training.reader_state)  # raises for another description of the data
            reader_state = reader.state_dict() if training.reader_state is None else training.reader_state
        finally:
            reader.close()
        directory.begin(spec, read_spec(described))
        save(directory.checkpoints, _state(training, spec, reader_state))
        directory.holds_work = True


def _open_train(spec: RunSpec) -> BatchReader:
    """Open the training data as `terarec.train.Run` does."""
    training = spec.training
    return open_reader(
        spec.data,
        "train",
        batch_size=training.batch_size,
        shuffle=training.shuffle,
        seed=training.seed,
        drop_last=training.drop_last,
        repeat=training.repeat,
        threads=training.reader_threads,
    )


def _run_spec(data: str, records: RecordsSpec, training: Training) -> RunSpec:
    trainer, base = training.trainer, training.schedule.base_lr
    assert isinstance(trainer.model, GraphModel)
    settings = dataclasses.replace(
        trainer.spec,
        shuffle=training.shuffle,
        repeat=training.repeat,
        drop_last=training.drop_last,
        epochs=max(1, trainer.spec.epochs, trainer.epoch),
        max_steps=max(1, trainer.step, trainer.spec.max_steps or 0) if training.repeat else None,
        reader_threads=training.reader_threads,
        schedule=_schedule(training.schedule),
        freeze=_frozen(trainer),
    )
    rules = {name: dataclasses.replace(rule, lr=base) for name, rule in training.rules.items()}
    return RunSpec(
        data=data,
        model=GraphModelSpec(graph=_with_columns(trainer.model.spec, records)),
        dense_optimizer=dataclasses.replace(training.dense, lr=base),
        training=settings if "valid" in records.splits else dataclasses.replace(settings, eval_split=None),
        row_optimizers=rules,
    )


def _schedule(schedule: LearningRateSchedule) -> WarmupDecaySchedule | None:
    # HugeCTR's default, one step of warm-up, is not a schedule.
    if schedule.warmup_steps <= 1 and schedule.decay_start == 0:
        return None
    return WarmupDecaySchedule(
        warmup_steps=schedule.warmup_steps,
        decay_start=schedule.decay_start,
        decay_steps=schedule.decay_steps,
        decay_power=schedule.decay_power,
        end_lr=schedule.end_lr,
    )


def _state(training: Training, spec: RunSpec, reader_state: Mapping[str, Any]) -> TrainState:
    """Return the checkpoint, with the rates of the next step and the schedules' positions."""
    trainer, schedule = training.trainer, spec.training.schedule
    states: list[Any] = []
    state = capture(trainer, reader_state)
    progress = dict(state.progress)
    optimizer = dict(state.optimizer)
    if isinstance(schedule, WarmupDecaySchedule):
        # The schedulers of a run set the rate after a step, HugeCTR's loop before it: a checkpoint has the next one.
        lr = training.schedule.lr(training.next_step)
        states = _schedule_states(schedule, training, lr)
        optimizer["param_groups"] = [{**group, "lr": lr} for group in state.optimizer["param_groups"]]
        rows = progress["row_optimizer"]
        if rows is not None:
            rates = rows["lr"]
            progress["row_optimizer"] = {**rows, "lr": [lr] * len(rates) if isinstance(rates, list) else lr}
    progress["trainer"] = {**progress["trainer"], "schedules": states}
    return dataclasses.replace(state, progress=progress, optimizer=optimizer)


def _schedule_states(spec: WarmupDecaySchedule, training: Training, lr: float) -> list[Any]:
    """Return the state of the run's schedulers as if every step had advanced them."""
    # Schedulers need optimizers to be made for; their rates are taken, the model's stay untouched.
    stand_ins = [
        torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in optimizer.param_groups], lr=training.schedule.base_lr)
        for optimizer in training.trainer.optimizers
    ]
    schedulers = build_schedulers(spec, stand_ins)
    done = training.next_step - 1
    for scheduler, optimizer in zip(schedulers, stand_ins, strict=True):
        state = {**scheduler.state_dict(), "last_epoch": done, "_step_count": done + 1}
        scheduler.load_state_dict({**state, "_last_lr": [lr] * len(optimizer.param_groups)})
    return scheduler_states(schedulers)


def _frozen(trainer: Trainer) -> tuple[str, ...]:
    """Return the patterns of frozen parameters and tables."""
    assert isinstance(trainer.model, GraphModel)
    weights = list(trainer.model.layers.parameters())
    is_dense_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    rows = trainer.optimizers.rows
    return (*(("layers.*",) if is_dense_frozen else ()), *(sorted(rows.frozen) if rows is not None else ()))


def _with_columns(graph: GraphSpec, records: RecordsSpec) -> GraphSpec:
    """Return `graph` for batches whose features have the names of a data set's columns."""
    column_of = dict(zip(records.layout.slot_names, records.key_names, strict=True))
    embeddings = tuple(
        dataclasses.replace(
            embedding,
            features=tuple(
                dataclasses.replace(
                    feature,
                    column=column_of[feature.read_column] if column_of[feature.read_column] != feature.name else None,
                )
                for feature in embedding.features
            ),
        )
        for embedding in graph.embeddings
    )
    return dataclasses.replace(graph, embeddings=embeddings)


def _static_rows(graph: GraphSpec, layout: RecordLayout) -> tuple[int, ...]:
    """Return for each slot the rows of the smallest static table that it is looked up in; 0 without any."""
    counts = dict.fromkeys(layout.slot_names, 0)
    for embedding in graph.embeddings:
        rows = {table.name: table.rows for table in embedding.tables if isinstance(table, TableSpec)}
        for feature in embedding.features:
            if feature.table in rows:
                known, own = counts[feature.read_column], rows[feature.table]
                counts[feature.read_column] = min(known, own) if known else own
    return tuple(counts.values())


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}.{number}" for number in range(count))


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)
