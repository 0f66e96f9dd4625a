# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the disk: their files, the manifest, and directories, of which the newest and the best are kept."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from terarec.errors import ConfigError, DamagedFileError, DataNotFoundError, FormatError, NoSpaceError, StorageError
from terarec.formats.delta import DeltaLink, StateId
from terarec.io.directories import atomic_dir
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.io.opening import link_or_copy, read_bytes
from terarec.io.owned import OWNED, remove_abandoned
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.io.removal import remove_tree
from terarec.spec import checks, from_data, to_data
from terarec.spec.checks import FieldError, did_you_mean

MANIFEST = "manifest.json"
FORMAT = "terarec.checkpoint"
VERSION = 3
BEST = "best.json"
_BEST_FORMAT = "terarec.best"
_BEST_VERSION = 1
DENSE = "dense.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
KEYS = "keys"
WEIGHTS = "weights"
STATE_PREFIX = "state."
USE_PREFIX = "use."
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(rf"{_STEP.pattern}{re.escape(PARTIAL_SUFFIX)}{OWNED}")
_ENTRIES = (
    rf"(manifest|state)\.json|(dense|optimizer)\.safetensors|tables|rows|memory|changes|.*{re.escape(PARTIAL_SUFFIX)}"
)
"""Names of the entries of a checkpoint, by which one is recognized before it is removed."""
_logger = logging.getLogger(__name__)


class PieceFiles:
    """Names of the files in a folder of a checkpoint that hold the rows of tables, or what belongs to them, in pieces.

    Args:
        folder: Name of the folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # Five digits or more: several writers number their files in ranges of ten millions (`save_load.save_together`).
        self._pattern = re.compile(rf"{folder}/(.+)-(\d{{5,18}})\.safetensors")

    def name(self, table: str, index: int) -> str:
        """Return the file name of the `index`-th piece of `table`."""
        return f"{self._folder}/{table}-{index:05d}.safetensors"

    def parse(self, file: str) -> tuple[str, int] | None:
        """Return the table and the piece that `file` holds, or None for other files."""
        match = self._pattern.fullmatch(file)
        return (match[1], int(match[2])) if match else None


TABLE_PIECES, CHANGE_PIECES = PieceFiles("tables"), PieceFiles("changes")
MEMORY_PIECES = PieceFiles("memory")
"""The memory of dynamic tables, such as counts of keys."""


def row_file_directory(table: str) -> str:
    """Return the directory of the row file of `table`."""
    return f"rows/{table}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry(checks.Checked):
    """File of a checkpoint: its path inside (forward slashes), its size and its SHA-256 in hexadecimal."""

    file: checks.InnerPath
    bytes: checks.NonNegativeInt
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFileEntry(checks.Checked):
    """A row file with the rows of a table.

    Attributes:
        table: Name of the table.
        directory: Path inside the checkpoint.
        bytes: Bytes of its segments, each of which has checksums of its own.
        rows: Rows that it holds.
        of_rows: Rows of a static table; None for a dynamic one.
        seed: Seed of the initial weights of a static table's other rows; None for a dynamic one.
    """

    table: str
    directory: checks.InnerPath
    bytes: checks.NonNegativeInt
    rows: checks.NonNegativeInt
    of_rows: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a checkpoint.

    Attributes:
        step: Training steps done.
        files: Every other file of the checkpoint but the segments of row files.
        row_files: The row files.
        delta: Place in a chain of deltas; None for a complete checkpoint.
    """

    step: int
    files: tuple[FileEntry, ...]
    row_files: tuple[RowFileEntry, ...] = ()
    delta: DeltaLink | None = None

    def entry(self, file: str) -> FileEntry:
        """Return the entry of `file`; raise `FormatError` if there is none."""
        for entry in self.files:
            if entry.file == file:
                return entry
        raise FormatError(MANIFEST, f"names no file {file!r}, which every checkpoint has")


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest of `checkpoint`, whose other files are all complete by now."""
    write_versioned_json(checkpoint / MANIFEST, FORMAT, VERSION, to_data(manifest), flushes=False)


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of `checkpoint` and compare it with the directory, names and sizes.

    Raises:
        DataNotFoundError: There is none, so the checkpoint is missing or incomplete.
        FormatError: It is damaged, of another version, or a file is missing or has another size.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise DataNotFoundError(checkpoint, f"holds no {MANIFEST}, expected a complete checkpoint")
    try:
        manifest = from_data(Manifest, read_versioned_json(path, FORMAT, VERSION), f"{path}: $")
    except ConfigError as error:
        raise FormatError(error.where, error.problem) from None
    # A checkpoint of another party must not make its reader open files elsewhere by links.
    inside = checkpoint.resolve()
    # Resolving each file looks at every directory above it again, which was a third of the time to open a small model.
    is_inside = cache(lambda folder: folder.resolve().is_relative_to(inside))
    for entry in manifest.files:
        file = checkpoint / entry.file
        if not file.is_file():
            raise FormatError(file, f"missing, expected a file of {entry.bytes} bytes")
        if (file.is_symlink() or not is_inside(file.parent)) and not file.resolve().is_relative_to(inside):
            raise FormatError(file, f"a link to {file.resolve()}, expected a file inside {checkpoint}")
        # Sizes alone, so that opening takes no read of all tables; a file's checksum is compared when it is read.
        if file.stat().st_size != entry.bytes:
            raise FormatError(file, f"{file.stat().st_size} bytes, expected {entry.bytes}")
    for row_file in manifest.row_files:
        for file in (checkpoint / row_file.directory).iterdir():
            if not file.resolve().is_relative_to(inside):
                raise FormatError(file, f"a link to {file.resolve()}, expected a file inside {checkpoint}")
    return manifest


def state_id(checkpoint: Path, step: int) -> StateId:
    """Return the identity of a checkpoint's state: its step and the SHA-256 of its manifest."""
    # The manifest has the checksums of all files, so its own stands for the whole state.
    return StateId(step=step, id=hashlib.sha256(read_bytes(checkpoint / MANIFEST)).hexdigest())


def read_chain(checkpoint: Path) -> list[tuple[Path, Manifest]]:
    """Read the manifests of `checkpoint` and of the checkpoints that it builds on, the complete one first.

    Raises:
        DataNotFoundError: `checkpoint` is missing or incomplete.
        FormatError: One is damaged, of another version, missing or not the one that the next one follows.
    """
    manifest = read_manifest(checkpoint)
    chain = [(checkpoint, manifest)]
    while (link := manifest.delta) is not None:
        previous = step_path(checkpoint.parent, link.previous.step)
        step = manifest.step
        try:
            manifest = read_manifest(previous)
        except DataNotFoundError:
            raise FormatError(
                checkpoint, f"delta {link.sequence} of step {step} needs {previous.name}, which is not there"
            ) from None
        try:
            link.check_follows(step, state_id(previous, manifest.step), manifest.delta)
        except FormatError as error:
            raise FormatError(checkpoint, error.where, error.problem) from None
        chain.append((previous, manifest))
    return chain[::-1]


def step_path(directory: Path, step: int) -> Path:
    """Return the checkpoint of `step` below `directory`."""
    return directory / f"step-{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints below `directory`, oldest first; skip partial ones and unexpected entries."""
    listed: list[tuple[int, Path]] = []
    while directory.is_dir():
        checkpoints = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
        # By number, since names of more than eight digits do not sort.
        checkpoints.sort()
        complete = [path for _, path in checkpoints if (path / MANIFEST).is_file()]
        # A run in training may remove the only complete one after it was listed here. The one that replaced it is then
        # found in the next list; a list that does not change has none.
        if complete or checkpoints == listed:
            return complete
        listed = checkpoints
    return []


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's name has."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the complete checkpoint of the highest step below `directory`; None if there is none."""
    return next(reversed(complete_checkpoints(directory)), None)


def latest(directory: Path) -> Path:
    """Return the complete checkpoint of the highest step below `directory`.

    Raises:
        DataNotFoundError: There is none.
    """
    newest = newest_checkpoint(directory)
    if newest is None:
        raise DataNotFoundError(directory, f"holds no complete checkpoint, expected step-*/{MANIFEST}")
    for path in directory.iterdir():
        if _STEP.fullmatch(path.name) and step_of(path) > step_of(newest) and not (path / MANIFEST).exists():
            _logger.warning("%s has no %s and is not complete: %s is taken", path, MANIFEST, newest.name)
    return newest


def find(directory: Path, which: int | str = "last") -> Path:
    """Return the complete checkpoint below `directory` that `which` names.

    Args:
        directory: Directory of the checkpoints, for example ``RUN/checkpoints``.
        which: "last" for the highest step, "best" for the one that `mark_best` named, or a step.

    Raises:
        DataNotFoundError: There is no complete checkpoint.
        ConfigError: `which` is none of these, or there is no such checkpoint.
    """
    newest = latest(directory)
    if which == "last":
        return newest
    if which == "best":
        step = best_step(directory)
        if step is None:
            raise ConfigError(
                directory,
                "no checkpoint is marked as the best one (no evaluation gave the monitored metric a value, or "
                "training.keep_best was false), expected 'last' or a step",
            )
    elif checks.is_count(str(which)):
        step = int(which)
    else:
        hint = did_you_mean(str(which), ("best", "last"))
        raise FieldError("", "checkpoint", f"got {which!r}{hint}, expected 'best', 'last' or a step")
    path = step_path(directory, step)
    if not (path / MANIFEST).is_file():
        steps = ", ".join(str(step_of(other)) for other in complete_checkpoints(directory))
        raise ConfigError(directory, f"holds no checkpoint of step {step}, expected one of {steps}")
    return path


def mark_best(directory: Path, step: int) -> None:
    """Mark the checkpoint of `step` as the best one below `directory`, atomically: `keep_newest` keeps it."""
    write_versioned_json(directory / BEST, _BEST_FORMAT, _BEST_VERSION, {"step": step})


def best_step(directory: Path) -> int | None:
    """Return the step that `mark_best` named last, or None."""
    path = directory / BEST
    if not path.is_file():
        return None
    step = read_versioned_json(path, _BEST_FORMAT, _BEST_VERSION).get("step")
    if not isinstance(step, int):
        raise FormatError(path, "$.step", f"got {step!r}, expected an integer")
    return step


@contextlib.contextmanager
def staged(directory: Path, step: int) -> Iterator[Path]:
    """Yield a fresh directory for the checkpoint of `step`, renamed into place when the block succeeds.

    If the block fails nothing stays of it; if the process dies, a ``.partial-<process>`` directory stays, until the
    next call removes it.

    Raises:
        StorageError: A complete checkpoint of `step` exists already, or a write fails.
    """
    target = step_path(directory, step)
    if (target / MANIFEST).is_file():
        raise StorageError(target, "a checkpoint of this step exists already, expected a new step")
    try:
        _remove_leftovers(directory)
        directory.mkdir(parents=True, exist_ok=True)  # stays when this checkpoint fails
        with atomic_dir(target) as partial:
            yield partial
    except (OSError, StorageError) as error:
        # The writer of a file reports that nothing was left behind; here the earlier checkpoints count.
        reason: BaseException | None = error
        while isinstance(reason, StorageError):
            reason = reason.__cause__
        if isinstance(error, DamagedFileError):
            raise
        problem = _words(reason) if isinstance(reason, OSError) else str(error)  # of a row file, which names its file
        kind = NoSpaceError if isinstance(error, NoSpaceError) else StorageError
        raise kind(target, f"the checkpoint could not be written: {problem}; {_left(directory)}") from error


def copy_chain(checkpoint: Path, directory: Path) -> None:
    """Put a checkpoint and those that it builds on below another directory, by links where the file system allows.

    Raises:
        DataNotFoundError: `checkpoint` is missing or incomplete.
        FormatError: One of them is damaged, or missing.
        StorageError: Another checkpoint of a step is there, or a write fails.
    """
    for path, manifest in read_chain(checkpoint):
        target = step_path(directory, manifest.step)
        if (target / MANIFEST).is_file() and state_id(target, manifest.step) == state_id(path, manifest.step):
            continue
        segments = (file for entry in manifest.row_files for file in (path / entry.directory).iterdir())
        files = {path / MANIFEST, *(path / entry.file for entry in manifest.files), *segments}
        with staged(directory, manifest.step) as copy:
            for file in sorted(files):
                place = copy / file.relative_to(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, place)


def keep_newest(directory: Path, count: int) -> None:
    """Remove complete checkpoints below `directory`, except the `count` newest, the best one and those they need."""
    complete = complete_checkpoints(directory)
    best = best_step(directory)
    # A delta that stays needs all checkpoints before it, down to its base.
    stays = set(complete[-count:]) | ({step_path(directory, best)} if best is not None else set())
    for path in sorted(stays):
        while (previous := _previous(path)) is not None and previous not in stays:
            stays.add(previous)
            path = previous
    for path in reversed(complete):  # so that none that is left lacks what it needs
        if path not in stays:
            try:
                remove_checkpoint(path)
            except ConfigError as error:
                _logger.warning("%s", error)


def _previous(checkpoint: Path) -> Path | None:
    """Return the checkpoint that a delta follows; None for a complete one."""
    path = checkpoint / MANIFEST
    # Of the manifest only the link counts: a checkpoint with damaged files can be removed, too.
    link = (read_versioned_json(path, FORMAT, VERSION) if path.is_file() else {}).get("delta")
    return None if link is None else step_path(checkpoint.parent, int(link["previous"]["step"]))


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno is not None else str(error)


def _left(directory: Path) -> str:
    """Describe the files that a failed save leaves."""
    newest = newest_checkpoint(directory)
    if newest is None:
        return "there is no earlier one"
    return f"earlier checkpoints are complete; continue from {newest.name} with resume=True"


def _remove_leftovers(directory: Path) -> None:
    """Remove incomplete checkpoints, which interrupted writes and removals leave."""
    for path in directory.glob("step-*"):
        if _UNFINISHED.fullmatch(path.name):
            remove_abandoned(path)
        elif _STEP.fullmatch(path.name) and not (path / MANIFEST).is_file():
            remove_tree(path, names=_ENTRIES, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a complete checkpoint."""
    remove_tree(path, names=_ENTRIES, first=MANIFEST)
