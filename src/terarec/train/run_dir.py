# SPDX-License-Identifier: Apache-2.0
"""The layout of a RUN directory, and how a run is started and locked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terarec.checkpoint import complete_checkpoints
from terarec.checkpoint.directory import newest_checkpoint, remove_checkpoint, step_of
from terarec.config import load_run, save_run
from terarec.config.files import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.errors import ConfigError, DataNotFoundError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.dataset import workflow_files
from terarec.formats.hugectr.records import RECORDS_FILE
from terarec.io.files import atomic_file
from terarec.io.locks import file_lock
from terarec.io.opening import copy_file
from terarec.io.remote import final_name
from terarec.io.removal import remove_tree
from terarec.models.artifact import extended_step
from terarec.models.trained_columns import check_columns
from terarec.spec import BinarySpec, DatasetSpec, RunSpec, to_data
from terarec.spec.codec import differences
from terarec.spec.run import without_calibration

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
_LOCK_FILE = ".lock"
_NAMES = frozenset(
    {
        *(RUN_FILE, DATASET_DIRECTORY, CHECKPOINT_DIRECTORY, METRICS_FILE, RECORDS_FILE, TENSORBOARD_DIRECTORY),
        *("report.html", _LOCK_FILE),
    }
)  # what a start that was killed may leave
_CONTENT = r"dataset\.json|workflow|step-.*|best\.json|events\..*"
"""Names of the entries of the directories in a run."""


_MAY_CHANGE = frozenset(
    {
        "data",
        "model.tables.tiers",
        "model.tables.tiers.device",
        "model.tables.tiers.host",
        "model.tables.tiers.file",
        "model.tables.tiers.direct",
        "training.epochs",
        "training.max_steps",
        "training.device",
        "training.compile",
        "training.metrics",
        "training.group",
        "training.slices",
        "training.patience",
        "training.min_delta",
        "training.eval_split",
        "training.eval_every",
        "training.checkpoint_every",
        "training.delta_every",
        "training.keep_checkpoints",
        "training.keep_best",
        "training.threads",
        "training.reader_threads",
        "training.rank_timeout",
        "training.schedule.ends_with_run",
    }
)
"""Fields of `RunSpec` that a resumed run may set anew; any other would change what the steps so far meant."""


class RunDirectory:
    """Paths of a RUN.

    Attributes:
        path: The directory itself.
        run_file: The resolved `RunSpec`.
        dataset: Description of the data and what encodes raw values, without samples.
        checkpoints: The checkpoints.
        metrics: The curves, as JSON lines.
        tensorboard: The curves, as events of TensorBoard.
        holds_work: Whether steps were trained, so that the directory stays whatever happens.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / RUN_FILE
        self.dataset = path / DATASET_DIRECTORY
        self.checkpoints = path / CHECKPOINT_DIRECTORY
        self.metrics = path / METRICS_FILE
        self.tensorboard = path / TENSORBOARD_DIRECTORY
        self.holds_work = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the directory, made if need be, to one training while the block runs.

        If the block fails before a step was trained, what it has put here is removed again.

        Raises:
            ConfigError: `path` holds something else than a run, or another training runs there.
        """
        # Before the directory is made or locked: what is not a run gets no lock file.
        self._check_is_run_or_empty()
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        # What was there stays if this start fails.
        before = {*self.path.iterdir(), *complete_checkpoints(self.checkpoints)}
        try:
            with file_lock(self.path / _LOCK_FILE) as is_held:
                if not is_held:
                    raise ConfigError(self.path, "another training runs there, expected a directory of its own")
                try:
                    yield
                except BaseException:
                    # A rejected start, such as of a wrong spec, leaves no trace; steps that were trained stay.
                    if not (self.has_checkpoint or self.holds_work):
                        self._remove_all_but(before)
                    raise
        finally:
            if is_new and not any(self.path.iterdir()):
                self.path.rmdir()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a complete checkpoint to resume from: none that was copied from a run that is extended."""
        newest = newest_checkpoint(self.checkpoints)
        # Without the description nothing tells what they are of: `check` refuses them.
        if newest is None or not self.run_file.is_file():
            return False
        # By what the run here extends, whatever a run to start here would extend.
        extended = extended_step(load_run(self.run_file))
        return extended is None or step_of(newest) > extended

    def check(self, spec: RunSpec, dataset: DatasetSpec, *, resume: bool) -> None:
        """Raise `ConfigError` if training `spec` here would overwrite or mix with existing content.

        That is so if there are checkpoints and `resume` is false, if `spec` differs from the run to resume in anything
        but how long to continue, how often to save and score, and how many threads to use, or if `dataset`, that of
        `spec`, has other columns or another workflow. A run that was killed before its first checkpoint may start over.
        """
        newest = newest_checkpoint(self.checkpoints)
        if newest is not None and not self.run_file.is_file():
            raise ConfigError(self.path, f"holds checkpoints but no {RUN_FILE}, expected a new or an empty directory")
        if newest is None or (not self.has_checkpoint and self._is_of_chain(newest, spec)):
            return
        if not resume:
            expected = "expected an empty directory, or resume=True"
            raise ConfigError(self.path, f"holds the checkpoints of a run, {expected}")
        for path, old, new in differences(_comparable(load_run(self.run_file)), _comparable(spec)):
            if path not in _MAY_CHANGE:
                raise ConfigError(
                    self.run_file,
                    f"{path} is {json.dumps(old)}, got {json.dumps(new)}; "
                    "a resumed run cannot change it; init_from=RUN starts another run from its weights",
                )
        trained_on = read_dataset(self.dataset)
        check_columns(dataset, Path(spec.data), trained_on, self.dataset)

    def begin(self, spec: RunSpec, dataset: DatasetSpec) -> None:
        """Write ``run.json`` and the description of the data for serving: the columns and their encoding."""
        # Before `run.json`, by which a directory counts as a run.
        for file in workflow_files(dataset, Path(spec.data)):
            _copy(Path(spec.data) / file, self.dataset / file)
        # Without shards: serving needs columns and workflow, and the data may move or go.
        write_dataset(dataclasses.replace(dataset, splits={}), self.dataset)
        # Further steps change the weights that a calibration was fitted for: a resumed run has none.
        save_run(without_calibration(spec), self.run_file)

    def _is_of_chain(self, newest: Path, spec: RunSpec) -> bool:
        """Return whether the checkpoints here are copies up to `newest` of the chain that `spec` extends."""
        step, kept = extended_step(spec), load_run(self.run_file).init_from
        is_later = step is not None and step >= step_of(newest)
        return is_later and Path(str(kept)).parent == Path(str(spec.init_from)).parent

    def _check_is_run_or_empty(self) -> None:
        expected = "expected a new or an empty directory, or a RUN"
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError("out", f"{self.path} is a file, {expected}")
        # A start that was killed may have left unfinished files of a run.
        unexpected = {final_name(entry.name) for entry in self.path.iterdir()} - _NAMES
        if unexpected and not (self.run_file.is_file() and self.dataset.is_dir()):
            raise ConfigError(
                "out", f"{self.path} is not a run directory (unexpected entry {min(unexpected)!r}), {expected}"
            )

    def _remove_all_but(self, paths: set[Path]) -> None:
        """Remove all files and checkpoints of a run except those of `paths`."""
        for path in reversed(complete_checkpoints(self.checkpoints)):
            if path not in paths:
                remove_checkpoint(path)
        new = {entry for entry in self.path.iterdir() if entry.name in _NAMES - {_LOCK_FILE}} - paths
        # The description last: a kill in between leaves no checkpoints without one.
        for path in sorted(new, key=lambda path: path.name == RUN_FILE):
            if path.is_dir():
                remove_tree(path, names=_CONTENT, ignore_errors=True)
            else:
                path.unlink()


def _comparable(spec: RunSpec) -> dict[str, object]:
    """Return a spec without what is written after training, as JSON data; the default objective is that of none."""
    plain = without_calibration(spec)
    if plain.objective == BinarySpec():
        plain = dataclasses.replace(plain, objective=None)
    data: dict[str, object] = to_data(plain)
    return data


def check_run(path: Path) -> None:
    """Raise unless `path` looks like a RUN."""
    if not path.is_dir():
        raise DataNotFoundError(
            path, f"no such directory, expected a RUN made by 'terarec train', which holds {RUN_FILE}"
        )
    if not (path / RUN_FILE).is_file():
        around = [parent for parent in path.absolute().parents[:2] if (parent / RUN_FILE).is_file()]
        expected = f"the RUN around it, {around[0]}" if around else "a RUN made by 'terarec train'"
        raise DataNotFoundError(path, f"holds no {RUN_FILE}, expected {expected}")


def _copy(source: Path, target: Path) -> None:
    with atomic_file(target) as partial:
        copy_file(source, partial)
