# SPDX-License-Identifier: Apache-2.0
"""A training run from its description: model, optimizers, readers, log and checkpoints in one RUN directory."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from terarec.checkpoint import latest, load
from terarec.checkpoint.directory import step_of
from terarec.config.files import load_run, with_graph
from terarec.data import BatchReader, RankShare, open_reader, read_spec
from terarec.dist import Ranks, ShardingPlan, shard
from terarec.dist.plan import default_plan, described
from terarec.dist.shard import named_memory
from terarec.embedding import EmbeddingCollection
from terarec.embedding.tables import record_tables
from terarec.errors import ConfigError, RunInterruptedError
from terarec.formats import read_dataset
from terarec.metrics.samples import NamesOfIds
from terarec.models import build_model
from terarec.models.artifact import dense_state, find_checkpoint
from terarec.models.trained_columns import check_missing_ids
from terarec.nn.objectives import BinaryObjective, Objective, build_objective, untrained_labels
from terarec.spec import (
    BinarySpec,
    CosineSchedule,
    DatasetSpec,
    LinearSchedule,
    PythonModelSpec,
    RunSpec,
    schedule_of_run,
    to_data,
)
from terarec.spec.checks import FieldError, did_you_mean, quoted
from terarec.spec.run import DEFAULT_EVAL_SPLIT, without_calibration
from terarec.spec.schedule import has_open_end
from terarec.train.checkpointing import Checkpointing, columns_read, restore, start_from
from terarec.train.class_weights import balanced_weights
from terarec.train.devices import check_room, keep_freed_memory, resolve_device
from terarec.train.extending import extend_chain, mark_added_rows, with_extended_checkpoint
from terarec.train.metrics_log import MetricsLog
from terarec.train.optimizers import Optimizers
from terarec.train.passes import PartPasses
from terarec.train.plan import plan_run
from terarec.train.ranks_callbacks import RanksCallbacks
from terarec.train.run_dir import RunDirectory
from terarec.train.stopping import FitReport
from terarec.train.trainer import Callback, Trainer, steps_of_epoch, steps_of_run

_logger = logging.getLogger(__name__)


class Run:
    """A training run in a directory. The model is allocated when it is first used.

    Attributes:
        spec: Description of the run.
        dataset: Description of the data.
        directory: RUN directory.
        callbacks: Besides those that log and save; those of a kind that is not for the first rank alone on every rank.
        initial: The checkpoint of another run that this one started from in this process, if any.
        ranks: The processes that train together, each of which has such a run; this one alone by default.
        plan: Placements of the tables on several ranks; None for `terarec.dist.plan.default_plan`.
        placements: A line for people for each table that is on several ranks; there once the model is.
    """

    def __init__(
        self,
        spec: RunSpec,
        out: Path,
        callbacks: Sequence[Callback] = (),
        *,
        allow_import: Sequence[str] = (),
        ranks: Ranks | None = None,
        plan: ShardingPlan | None = None,
        names: NamesOfIds | None = None,
    ) -> None:
        self._names = names
        self.ranks = ranks or Ranks()
        self.plan = plan
        self.placements: tuple[str, ...] = ()
        spec = with_graph(spec, Path.cwd())  # run.json holds the graph, since its file may change
        # run.json must name other files from wherever it is read.
        init_from = None if spec.init_from is None else os.path.normpath(Path(spec.init_from).absolute())
        spec = dataclasses.replace(spec, data=str(Path(spec.data).absolute()), init_from=init_from)
        # That of the run to resume or to start from was fitted to other weights.
        spec = without_calibration(spec)
        self.directory = RunDirectory(out)
        self.spec = spec = with_extended_checkpoint(spec, self.directory)
        self.initial: Path | None = None
        self.dataset: DatasetSpec = read_spec(spec.data)
        self._check_slices()
        self.spec = self._with_complete_schedule()
        if getattr(spec.model, "has_own_loss", False):
            self._check_own_loss()
        self.callbacks = list(callbacks)
        self._allow_import = tuple(allow_import)
        self.spec = spec = self._with_class_weights()
        training = spec.training
        self._checkpointing = Checkpointing(
            self.directory.checkpoints,
            every=training.checkpoint_every,
            delta_every=training.delta_every,
            keep=training.keep_checkpoints,
            keep_best=training.keep_best,
            extends=spec.extend_chain,
        )

    @cached_property
    def objective(self) -> Objective:
        """Objective of the training."""
        return build_objective(self.spec.objective, self.dataset)

    @cached_property
    def device(self) -> torch.device:
        """Device of the model, its optimizers and its batches."""
        return resolve_device(self.spec.training.device)

    @cached_property
    def model(self) -> nn.Module:
        """The model, with initial weights until `fit` has trained or restored it."""
        spec, dataset = self.spec, self.dataset
        objective = spec.objective
        if isinstance(objective, BinarySpec) and not objective.class_weights:  # "auto", which the data give later
            objective = dataclasses.replace(objective, positive_weight=1.0)
        num_outputs = build_objective(objective, dataset).num_outputs(len(dataset.labels))
        is_alone = self.ranks.size == 1
        if self.plan is not None:
            self.plan.check_size(self.ranks.size)
        if is_alone and not isinstance(spec.model, PythonModelSpec):  # whose code may be slow or do other things, too
            plan_run(spec, device=self.device, reads_keysets=False).check(only_known=True)
        # A rank allocates only its own rows: tables are recorded here and made by `shard`.
        with nullcontext() if is_alone else record_tables():
            model = build_model(
                spec.model, dataset, num_outputs=num_outputs, seed=spec.training.seed, allow_import=self._allow_import
            )
        if hasattr(model, "training_loss"):  # of a Python model, too
            self._check_own_loss()
        specs = [
            table for module in model.modules() if isinstance(module, EmbeddingCollection) for table in module.specs
        ]
        if self.plan is not None:
            self.plan.check(specs, self.ranks.size)
        if is_alone:
            return model.to(self.device)
        self.plan = self.plan or default_plan(specs, self.ranks.size)
        check_room(self.plan.rank_bytes, self.device)
        self.placements = tuple(described(self.plan, specs))
        model = shard(model, self.plan, self.ranks)
        with named_memory(model, "tables and layers"):
            return model.to(self.device)

    @cached_property
    def trainer(self) -> Trainer:
        """The loop around `model`."""
        spec = self.spec
        log = MetricsLog(self.directory.metrics, split=spec.training.eval_split or DEFAULT_EVAL_SPLIT)
        callbacks = self.callbacks
        if self.ranks.size > 1:
            callbacks = [RanksCallbacks(callbacks, self.ranks, self._checkpointing.save_after_error)]
        rules = {"default": spec.sparse_optimizer, **spec.row_optimizers}
        with named_memory(self.model, "states of optimizers"):
            optimizers = Optimizers.of(self.model, spec.dense_optimizer, rules, seed=spec.training.seed)
        trainer = Trainer(
            self.model,
            spec.training,
            optimizers,
            objective=self.objective,
            labels=[label.name for label in self.dataset.labels],
            dataset=self.dataset,
            callbacks=(
                *([PartPasses()] if spec.training.passes else []),
                *([log] if self.ranks.is_first else []),
                self._checkpointing,
                *callbacks,
            ),
            ranks=self.ranks,
            names=self._names,
        )
        schedule = spec.training.schedule
        if schedule is not None:
            optimizers.follow(schedule, monitor=trainer.early_stopping.monitor)
        return trainer

    def reader(self, split: str) -> BatchReader:
        """Return a reader of `split`: shuffled as the run requests if it is "train", else in input order."""
        return self._open(split, self._share(split))

    def _open(self, split: str, share: RankShare | None) -> BatchReader:
        training = self.spec.training
        return open_reader(
            Path(self.spec.data),
            split,
            batch_size=training.batch_size,
            shuffle=training.shuffle and split == "train",
            seed=training.seed,
            threads=training.reader_threads,
            repeat=training.repeat and split == "train",
            drop_last=training.drop_last and split == "train",
            by_parts=training.passes and split == "train",
            share=share,
        )

    def _with_complete_schedule(self) -> RunSpec:
        """Return the description with a schedule whose end is a number, so that ``run.json`` has it.

        The number is that of the run to resume, or follows from the length of this one.
        """
        training = self.spec.training
        schedule = training.schedule
        if not has_open_end(schedule):
            return self.spec
        if self.directory.has_checkpoint:
            kept = load_run(self.directory.run_file).training.schedule
            if isinstance(kept, type(schedule)) and _with_open_end(kept) == _with_open_end(schedule):
                return dataclasses.replace(self.spec, training=dataclasses.replace(training, schedule=kept))
        # At least one: a split without batches is rejected when training starts.
        per_epoch = max(1, steps_of_epoch(training, self._open("train", None)))
        steps = steps_of_run(training, per_epoch)
        try:
            complete = schedule_of_run(schedule, steps=steps, epochs=-(-steps // per_epoch))
        except FieldError as error:
            raise ConfigError(f"training.schedule.{error.field}", error.problem) from None
        return dataclasses.replace(self.spec, training=dataclasses.replace(training, schedule=complete))

    def _check_slices(self) -> None:
        """Raise for a slice of no column, which the first evaluation would find after an epoch."""
        known = [column.name for column in self.dataset.metadata]
        known += [column.name for column in self.dataset.categorical]
        for name in self.spec.training.slices:
            if name not in known:
                problem = f"got {quoted(name)}{did_you_mean(name, known)}, expected one of {', '.join(known)}"
                raise FieldError("training", "slices", problem)

    def _check_own_loss(self) -> None:
        if not self.directory.has_checkpoint:  # a run to resume, which keeps its description
            self.spec.check_own_loss()

    def _with_class_weights(self) -> RunSpec:
        """Return the description with the weights of classes that the run to resume has, or that the data give."""
        spec = self.spec
        objective, has_known = spec.objective, self.directory.has_checkpoint
        if not isinstance(objective, BinarySpec) or objective.positive_weight != "auto":
            return spec
        # Those that a description has were counted for the run that wrote it.
        objective = dataclasses.replace(objective, class_weights=())
        kept = without_calibration(load_run(self.directory.run_file)).objective if has_known else None
        if isinstance(kept, BinarySpec) and dataclasses.replace(kept, class_weights=()) == objective:
            return dataclasses.replace(spec, objective=kept)
        if isinstance(spec.model, PythonModelSpec):
            _ = self.model  # which refuses weights where it has a loss of its own, before the whole split is read
        labels = [label.name for label in self.dataset.labels]
        reader = open_reader(Path(spec.data), "train", batch_size=spec.training.batch_size)
        weights = balanced_weights(reader, labels, untrained=untrained_labels(BinaryObjective(objective), labels))
        return dataclasses.replace(spec, objective=dataclasses.replace(objective, class_weights=weights))

    def _share(self, split: str) -> RankShare | None:
        """Return the part of every batch that this rank reads; None for one rank."""
        if self.ranks.size == 1:
            return None
        assert self.model is not None, "the plan is made with the model"
        # A validation split, and gradients in deterministic mode, keep the order of whole batches.
        is_span = split != "train" or self.plan is None or self.plan.deterministic
        return RankShare(rank=self.ranks.rank, size=self.ranks.size, is_span=is_span)

    def _valid_reader(self) -> BatchReader | None:
        """Return a reader of the split to evaluate on, or None if there is none."""
        split, patience = self.spec.training.eval_split, self.spec.training.patience
        # Runs that were described before None was accepted turned the evaluation off by a split that is not there.
        if split in (None, "none") or (split == DEFAULT_EVAL_SPLIT and split not in self.dataset.splits):
            if patience is not None:
                raise ConfigError(
                    "training.patience",
                    f"got {patience} without a split to evaluate on, expected "
                    f"training.eval_split to be one of {', '.join(map(repr, self.dataset.splits))}, or patience none",
                )
            return None
        try:
            has_rows = self.dataset.num_rows(split) > 0
        except ConfigError as error:
            raise ConfigError("training.eval_split", error.where, f"{error.problem}, or none") from None
        if has_rows:
            return self.reader(split)
        if patience is not None:
            raise ConfigError(
                "training.patience",
                f"got {patience}, but split {split!r} has no samples to evaluate on, expected another "
                "training.eval_split, or patience none",
            )
        _logger.warning("split %r has no samples: nothing is evaluated", split)
        return None

    def fit(self, *, resume: bool = False, log: Callable[[str], None] | None = None) -> FitReport:
        """Train, log and save; set ``training.threads`` and the policy of freed memory for the process.

        Args:
            resume: Continue from the newest complete checkpoint, bit for bit as without a stop; from the start if there
                is none yet.
            log: Function called with lines about the run, such as the placement of tables, before the first step.

        Raises:
            ConfigError: The directory holds a run and `resume` is false, or other files than a run; another training
                runs there; or the run to resume, or the one that ``spec.init_from`` names, has another model, other
                columns or another workflow.
            FormatError: The data set or a checkpoint is damaged.
            StorageError: Memory or disk is full; earlier checkpoints stay complete.
            TrainingError: The loss is NaN or infinite; the last checkpoint and the log stay.
            RunInterruptedError: SIGINT or SIGTERM; a checkpoint of the last step is there to resume from.

        Whatever a callback, the reader or an evaluation raises: the last step has a checkpoint; on several ranks after
        errors of callbacks of all ranks alone. The errors of the other ranks name the one that failed, and why. Before
        the first step nothing is left of this start, and a rejected run is unchanged.
        """
        with self.ranks.telling(), ExitStack() as stack:
            self.ranks.on_first("begin of a run", lambda: self._begin(stack, resume=resume))
            return self._fit(log)

    def _begin(self, stack: ExitStack, *, resume: bool) -> None:
        """Lock the directory, which is that of all ranks, and check what is there."""
        stack.enter_context(self.directory.locked())
        self.directory.check(self.spec, self.dataset, resume=resume)

    def _fit(self, log: Callable[[str], None] | None) -> FitReport:
        training = self.spec.training
        train_reader = self.reader("train")
        valid_reader = self._valid_reader()
        keep_freed_memory()
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        loaded = None
        if self.directory.has_checkpoint:
            read = columns_read(self.trainer.model, self.spec.model, self.spec.objective)
            check_missing_ids(self.dataset, read_dataset(self.directory.dataset), read)
            newest = load(latest(self.directory.checkpoints))
            restore(self.trainer, train_reader, newest)
            self._checkpointing.continue_from(self.trainer, newest.path)
        else:
            if self.spec.init_from is not None:
                loaded = start_from(self.trainer, self.spec, self.dataset)
                self.initial = loaded.path
            # For dropout, after all random draws of building and loading: the same numbers for any start of the
            # model.
            torch.manual_seed(training.seed)
        if self.ranks.size > 1:
            self._check_same(train_reader)
        # A run that could not be restored keeps its description.
        self.ranks.on_first("description of a run", lambda: self.directory.begin(self.spec, self.dataset))
        if loaded is not None and self.spec.extend_chain:
            # After the description, by which these checkpoints are told from those of this run.
            copied = extend_chain(self.trainer, loaded, self.directory.checkpoints)
            self._checkpointing.continue_from(self.trainer, copied)
            mark_added_rows(self.trainer, loaded)
        # From here on dropout draws, and must draw other numbers on each rank.
        if self.ranks.size > 1:
            self.trainer.seed_rank()
        if log is not None:
            for line in self.placements:
                log(line)
        # By every rank: each draws for its own samples, and a user's items are in all parts of the split.
        learn = getattr(self.model, "learn_positives", None)
        if learn is not None:
            learn(open_reader(Path(self.spec.data), "train", batch_size=training.batch_size))
        try:
            report = self.trainer.fit(train_reader, valid_reader)
        except RunInterruptedError as error:
            saved = self._checkpointing.newest
            raise RunInterruptedError(
                f"{error}; resume from {saved} with resume=True",
                signal=error.signal,
                step=error.step,
                checkpoint=saved,
            ) from None
        finally:
            self.directory.holds_work |= self.trainer.step > self.trainer.first_step
        served = None
        if self.ranks.is_first:  # which marks the best one
            served = step_of(find_checkpoint(self.directory.path, self.spec))
        return dataclasses.replace(report, checkpoint=self._checkpointing.newest, served_step=served)

    def _check_same(self, train_reader: BatchReader) -> None:
        """Check that all ranks have the same data, reader position and layers."""
        directory, splits = Path(self.spec.data), self.dataset.splits
        paths = {shard.file: directory / shard.file for shards in splits.values() for shard in shards}
        sizes = {file: path.stat().st_size for file, path in paths.items() if path.is_file()}
        data = {"description": to_data(self.dataset), "bytes": sizes, "position": train_reader.state_dict()}
        self.ranks.check_same("data", data)
        self.ranks.check_same("layers", {name: _digest(value) for name, value in dense_state(self.model).items()})


def _with_open_end(schedule: CosineSchedule | LinearSchedule) -> CosineSchedule | LinearSchedule:
    """Return the schedule with a fall that ends with the run, whatever end a run has computed."""
    return dataclasses.replace(schedule, t_max=None, ends_with_run=False)


def _digest(values: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, shortened."""
    content = values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content.data).hexdigest()[:16]


def build(
    spec: RunSpec,
    out: Path | str,
    callbacks: Sequence[Callback] = (),
    *,
    init_from: Path | str | None = None,
    reset_optimizer: bool = False,
    extend_chain: bool = False,
    allow_import: Sequence[str] = (),
    ranks: Ranks | None = None,
    plan: ShardingPlan | None = None,
    names: NamesOfIds | None = None,
) -> Run:
    """Return a run of `spec` in the directory `out`.

    Args:
        spec: Description of the run.
        out: RUN directory; made by `Run.fit`.
        callbacks: Called after those that log and save, for example a `ProgressBar`; the same kinds on all ranks.
        init_from: ``spec.init_from``, if given here: a RUN or a checkpoint in one to start from.
        reset_optimizer: ``spec.reset_optimizer`` with it: take its weights alone.
        extend_chain: ``spec.extend_chain`` with it: continue its chain of checkpoints.
        allow_import: Packages from which the model may come by name.
        ranks: Processes that train together; None for this one alone.
        plan: Placements of the tables on several ranks; None for one by their sizes.
        names: Names of the ids in slice columns, such as `terarec.etl.workflow.ValueNames`; None to report the ids.

    Raises:
        DataNotFoundError: ``spec.data`` is not a data set.
        FormatError: Its description is damaged.
        ConfigError: The warm-up of the schedule is as long as the run.
    """
    if init_from is not None:
        spec = dataclasses.replace(
            spec, init_from=str(init_from), reset_optimizer=reset_optimizer, extend_chain=extend_chain
        )
    return Run(spec, Path(out), callbacks, allow_import=allow_import, ranks=ranks, plan=plan, names=names)
