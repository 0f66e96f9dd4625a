"""Where checkpoints lie and how one comes to be: written beside, renamed when whole, the newest kept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from terarec.checkpoint.manifest import MANIFEST
from terarec.errors import DataNotFoundError, StorageError
from terarec.formats.atomic import PARTIAL_SUFFIX
from terarec.formats.flush import flush, flush_tree

_STEP = re.compile(r"step-(\d{8,})")


def step_path(directory: Path, step: int) -> Path:
    """The checkpoint of `step` below `directory`."""
    return directory / f"step-{step:08d}"


def whole(directory: Path) -> list[Path]:
    """The whole checkpoints below `directory`, oldest first; partial ones and strangers are passed over."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def latest(directory: Path) -> Path:
    """The whole checkpoint of the highest step below `directory`.

    Raises:
        DataNotFoundError: there is none.
    """
    checkpoints = whole(directory)
    if not checkpoints:
        raise DataNotFoundError(f"{directory}: holds no whole checkpoint, expected step-*/{MANIFEST}")
    return checkpoints[-1]


@contextlib.contextmanager
def staged(directory: Path, step: int) -> Iterator[Path]:
    """A fresh directory to write the checkpoint of `step` into, renamed into place if the block succeeds.

    If the block fails nothing stays of it; if the process dies, a ``.partial`` directory stays, until the next call
    removes it.

    Raises:
        StorageError: a whole checkpoint of `step` is there already, or the disk refuses to take this one.
    """
    target = step_path(directory, step)
    if (target / MANIFEST).is_file():
        raise StorageError(f"{target}: a checkpoint of this step exists already, expected a new step")
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        _remove_leftovers(directory)
        partial.mkdir(parents=True)
        yield partial
        flush_tree(partial)
        partial.rename(target)
        flush(directory)
    except (OSError, StorageError) as error:
        # What writes a file says of it that nothing was left behind; here it is the checkpoint that counts.
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        raise StorageError(
            f"{target}: the checkpoint could not be written: {_words(reason)}; {_left(directory)}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def keep_newest(directory: Path, count: int) -> None:
    """Remove all whole checkpoints below `directory` but the `count` newest."""
    for path in whole(directory)[:-count]:
        _remove(path)


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno is not None else str(error)


def _left(directory: Path) -> str:
    """What a failed save leaves."""
    checkpoints = whole(directory)
    if not checkpoints:
        return "there is no earlier one"
    return f"earlier checkpoints are whole; go on from {checkpoints[-1].name} with --resume"


def _remove_leftovers(directory: Path) -> None:
    """Remove what writes and removals that were cut short have left: what is named as a checkpoint and is not whole."""
    for path in directory.glob("step-*"):
        is_ours = _STEP.fullmatch(path.name.removesuffix(PARTIAL_SUFFIX)) is not None
        if is_ours and not (_STEP.fullmatch(path.name) and (path / MANIFEST).is_file()):
            shutil.rmtree(path)


def _remove(path: Path) -> None:
    # The manifest goes first, so that a removal cut short never leaves what looks like a whole checkpoint.
    (path / MANIFEST).unlink()
    shutil.rmtree(path)
