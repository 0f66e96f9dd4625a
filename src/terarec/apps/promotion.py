# SPDX-License-Identifier: Apache-2.0
"""`promote`: a checkpoint of a run becomes a version of a model repository, and answers from then on."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terarec.batch import Batch
from terarec.checkpoint import complete_checkpoints
from terarec.checkpoint.directory import read_chain
from terarec.closer import wait_closed
from terarec.config import load_run
from terarec.config.files import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.data import open_reader, read_spec
from terarec.errors import DataNotFoundError, FormatError
from terarec.formats import read_dataset
from terarec.io.directories import atomic_dir
from terarec.io.files import write_bytes
from terarec.io.opening import link_or_copy, read_bytes, sha256_of
from terarec.io.removal import remove_tree
from terarec.models.artifact import find_checkpoint, load_without_tables
from terarec.models.trained_columns import check_columns
from terarec.serve import InferenceSession, ServedTables
from terarec.serve.executor_file import EXECUTORS_FILE
from terarec.serve.golden import GoldenRecords
from terarec.serve.repository import GOLDEN_FILE, ModelRepository, now, write_version
from terarec.spec import TableSpec
from terarec.spec.checks import FieldError
from terarec.spec.run import DEFAULT_EVAL_SPLIT
from terarec.spec.serving_repository import PromotionSpec, VersionSpec
from terarec.train.metrics_log import read_log
from terarec.train.run_dir import METRICS_FILE, check_run

GOLDEN_RECORDS = 64
"""Samples that a version must score as its run does before it answers."""
_KEY_BYTES = 32  # of a dynamic table's index, for each key
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionReport:
    """What a promotion has done.

    Attributes:
        version: Number of the version.
        path: Its directory.
        step: Training steps of its weights.
        bytes: Bytes of its files.
        linked_bytes: Those of files that the run has, too, and which take their space once.
        golden_records: Samples that a server compares.
        removed: Versions that were removed.
    """

    version: int
    path: Path
    step: int
    bytes: int
    linked_bytes: int
    golden_records: int
    removed: tuple[int, ...] = ()


def promote(
    run: Path,
    repository: Path,
    name: str,
    spec: PromotionSpec | None = None,
    *,
    checkpoint: int | str | None = None,
    data: Path | None = None,
    allow_import: Sequence[str] = (),
    tables: ServedTables | None = None,
) -> PromotionReport:
    """Make a checkpoint of a run a version of a model, and let it answer.

    The version is a copy, by links where the file system allows, so that the run may go on or be removed. It appears
    complete or not at all. Beside it are samples with the scores of the run, which a server compares.

    Args:
        run: Directory of the run.
        repository: Directory of the repository; made if it is not there.
        name: Name of the model.
        spec: What the version does; None for all answers.
        checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.
        data: Data set of the samples; None for that of the training.
        allow_import: Packages whose code the workflow or the model may name.
        tables: Location of the tables while the samples are scored; None for memory.

    Raises:
        ConfigError: A name that is none, no such checkpoint, another promotion of the model runs, a share of the
            requests where no version answers, or scores that are not numbers.
        DataNotFoundError: No such run or data set.
        FormatError: A damaged file.
        StorageError: The disk is full, or not enough memory for the tables.
    """
    spec = spec or PromotionSpec()
    check_run(run)
    model = ModelRepository(repository).model(name)
    model.check_second(spec, model.pointer())  # before a large model is copied and scored
    with model.promoting() as version:
        out = model.path / str(version)
        with atomic_dir(out) as partial:
            step, size, linked = _copy_run(run, partial, checkpoint)
            golden = _write_golden(partial, data, spec.split, allow_import, tables)
            write_version(partial, _described(partial, run, step, follow=spec.follow, allow_import=allow_import))
        # Complete from here on; an error below leaves a version that does not answer.
        model.promote(version, spec)
        removed = () if spec.keep is None else model.remove_old(spec.keep)
    return PromotionReport(
        version=version,
        path=out,
        step=step,
        bytes=size,
        linked_bytes=linked,
        golden_records=golden,
        removed=removed,
    )


def _copy_run(run: Path, out: Path, checkpoint: int | str | None) -> tuple[int, int, int]:
    """Copy what serving needs; return the step, the bytes, and those of files that are shared."""
    spec = load_run(run / RUN_FILE)
    for name in (RUN_FILE, EXECUTORS_FILE):
        if (run / name).is_file():
            # Files of their own: both may be written anew.
            write_bytes(out / name, read_bytes(run / name), flushes=False)
    dataset = run / DATASET_DIRECTORY
    for file in sorted(dataset.rglob("*")):
        if file.is_file():
            _link(file, out / DATASET_DIRECTORY / file.relative_to(dataset), run)
    while True:
        path = find_checkpoint(run, spec, checkpoint)
        try:
            # A delta needs the checkpoints before it, down to its base.
            chain = read_chain(path)
            linked = sum(_link_checkpoint(part, out / CHECKPOINT_DIRECTORY, run) for part, _ in chain)
            break
        except (FormatError, FileNotFoundError):
            # A training that goes on may have removed it for a newer one since it was found.
            if path in complete_checkpoints(run / CHECKPOINT_DIRECTORY):
                raise
            remove_tree(out / CHECKPOINT_DIRECTORY, names=r"step-\d+")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return chain[-1][1].step, size, linked


def _link_checkpoint(checkpoint: Path, out: Path, run: Path) -> int:
    """Link the files of a checkpoint of `run`; return the bytes of those that are shared."""
    shared = 0
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file() and _link(file, out / checkpoint.name / file.relative_to(checkpoint), run):
            shared += file.stat().st_size
    return shared


def _link(source: Path, target: Path, run: Path) -> bool:
    # A run of another party must not put files from elsewhere into the repository.
    if not source.resolve().is_relative_to(run.resolve()):
        raise FormatError(source, f"a link to {source.resolve()}, expected a file inside {run}")
    target.parent.mkdir(parents=True, exist_ok=True)
    return link_or_copy(source, target)


def _write_golden(
    version: Path,
    data: Path | None,
    split: str | None,
    allow_import: Sequence[str],
    tables: ServedTables | None,
) -> int:
    """Score samples with the run's weights, and write both beside them; return the number of samples."""
    spec = load_run(version / RUN_FILE)
    source = Path(spec.data) if data is None else data
    try:
        described = read_spec(source)
    except DataNotFoundError as error:
        if data is not None:
            raise
        raise DataNotFoundError(
            error.where, f"{error.problem}; data=DIR names another place of the run's data"
        ) from None
    check_columns(described, source, read_dataset(version / DATASET_DIRECTORY), version / DATASET_DIRECTORY)
    if split is None:
        split = spec.training.eval_split or DEFAULT_EVAL_SPLIT
        # A day's data may have samples of one split alone, and any show whether a copy scores as its run does.
        if split not in described.splits and described.splits:
            split = next(iter(described.splits))
    batch = next(iter(open_reader(source, split, batch_size=GOLDEN_RECORDS)), None)
    if batch is None:
        raise FieldError("PromotionSpec", "split", f"got {split!r}, which has no samples, expected a split of {source}")
    _scored(batch, version, allow_import, tables).write(version / GOLDEN_FILE)
    # Tables in a file tier have working files beside the run that is loaded; they are none of the version.
    gc.collect()
    wait_closed()
    return batch.batch_size


def _scored(batch: Batch, version: Path, allow_import: Sequence[str], tables: ServedTables | None) -> GoldenRecords:
    # From the copy: its files are those of the run, and this shows that it can be served without it.
    with InferenceSession.open(version, allow_import=allow_import, tables=tables, executor="eager") as session:
        return GoldenRecords.of(batch, session.score_batch)


def _described(version: Path, run: Path, step: int, *, follow: bool, allow_import: Sequence[str]) -> VersionSpec:
    spec = load_run(version / RUN_FILE)
    metrics, metrics_step, metrics_split = _last_evaluation(run / METRICS_FILE, step)
    checked = [version / RUN_FILE, version / GOLDEN_FILE, *sorted((version / DATASET_DIRECTORY).rglob("*"))]
    return VersionSpec(
        run=run.resolve().name,
        model=spec.model.kind,
        step=step,
        data=read_dataset(version / DATASET_DIRECTORY).name,
        made=now(),
        memory_bytes=_memory_bytes(version, allow_import),
        files={path.relative_to(version).as_posix(): sha256_of(path) for path in checked if path.is_file()},
        metrics=metrics,
        metrics_step=metrics_step,
        metrics_split=metrics_split,
        follows=str(run.resolve()) if follow else None,
    )


def _last_evaluation(path: Path, step: int) -> tuple[dict[str, float], int | None, str]:
    """Return metrics, step and split of the last evaluation up to a step."""
    if not path.is_file():
        return {}, None, ""
    log = read_log(path)
    points = [point for point in log.evaluations if point["step"] <= step]
    if not points:
        return {}, None, ""
    numbers = {name: points[-1].get(name) for name in log.metrics}
    # Of an undefined metric, and of one that has several values, there is no number to show.
    metrics = {
        name: float(value) for name, value in numbers.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    return metrics, int(points[-1]["step"]), str(points[-1]["split"])


def _memory_bytes(version: Path, allow_import: Sequence[str]) -> int:
    """Return the bytes that the tables and layers of a version take in memory."""
    loaded = load_without_tables(version, allow_import=allow_import)
    files = loaded.checkpoint.table_files()
    size = sum(tensor.numel() * tensor.element_size() for tensor in loaded.checkpoint.dense().values())
    for name, table in loaded.tables.items():
        row_bytes = table.width * _WEIGHT_BYTES[table.dtype]
        if isinstance(table, TableSpec):
            size += table.rows * row_bytes
        else:
            size += files.shape(name).num_rows * (row_bytes + _KEY_BYTES)
    return size
