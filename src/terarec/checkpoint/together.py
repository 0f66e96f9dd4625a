"""One checkpoint that several processes write together, each the rows that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from terarec.checkpoint.directory import FileEntry, Manifest, staged, write_manifest
from terarec.checkpoint.state import TrainState
from terarec.checkpoint.table_files import TableShare
from terarec.errors import StorageError
from terarec.formats.delta import DeltaLink
from terarec.spec import from_data, to_data
from terarec.spec.quoting import one_line

_FILES_EACH = 10_000_000  # numbers of files of a table that a writer has: they only have to rise


class Writers(Protocol):
    """Processes that write a checkpoint together, such as `terarec.dist.Ranks`.

    Attributes:
        rank: Number of this one.
        size: Number of all.
    """

    rank: int
    size: int

    def gather(self, what: str, data: Any) -> list[Any]:
        """Return the JSON data of all, in the order of their numbers, to each of them."""


def save_together(
    directory: Path,
    state: TrainState,
    writers: Writers,
    write_files: Callable[[Path, Mapping[str, TableShare]], Sequence[FileEntry]],
    link: DeltaLink | None = None,
) -> None:
    """Write a checkpoint; all writers call it with states of the same step.

    Args:
        directory: Directory of the checkpoints, which all writers see.
        state: State to write, with the tables of this process.
        writers: The processes.
        write_files: Writes the files of this process with its shares of the tables; returns them.
        link: Place of a delta; None for all rows.

    Raises:
        StorageError: One of them failed, and nothing was written.
    """
    shares = _shares(state, writers)
    with ExitStack() as stack:
        checkpoint = _place(directory, state, writers, stack)
        error: Exception | None = None
        files: Sequence[FileEntry] = ()
        try:
            files = write_files(checkpoint, shares)
        except Exception as raised:  # which all have to know before any of them goes on
            error = raised
        found = writers.gather(
            "files of a checkpoint", {"error": None if error is None else one_line(str(error)), "files": to_data(files)}
        )
        if error is not None:
            raise error
        _check_all(found)
        if writers.rank == 0:
            entries = tuple(from_data(FileEntry, entry) for written in found for entry in written["files"])
            try:
                write_manifest(checkpoint, Manifest(step=state.step, files=entries, delta=link))
                stack.close()  # gives the checkpoint its name
            except Exception as raised:  # which the others wait to know
                error = raised
        ended = writers.gather("end of a checkpoint", {"error": None if error is None else one_line(str(error))})
        if error is not None:
            raise error
        _check_all(ended)


def _shares(state: TrainState, writers: Writers) -> dict[str, TableShare]:
    rows = writers.gather("rows of a checkpoint", {name: table.num_changed for name, table in state.tables.items()})
    return {
        name: TableShare(
            first_row=sum(counts[name] for counts in rows[: writers.rank]),
            num_rows=sum(counts[name] for counts in rows),
            first_file=writers.rank * _FILES_EACH,
        )
        for name in state.tables
    }


def _place(directory: Path, state: TrainState, writers: Writers, stack: ExitStack) -> Path:
    """Return the directory to write to, which the first writer has made."""
    error: Exception | None = None
    checkpoint: Path | None = None
    if writers.rank == 0:
        try:
            checkpoint = stack.enter_context(staged(directory, state.step))
        except Exception as raised:
            error = raised
    told = {"error": None if error is None else one_line(str(error)), "path": str(checkpoint)}
    found = writers.gather("place of a checkpoint", told)
    if error is not None:
        raise error
    _check_all(found[:1])
    return Path(found[0]["path"])


def _check_all(found: list[dict[str, Any]]) -> None:
    failed = [f"rank {rank}: {told['error']}" for rank, told in enumerate(found) if told["error"] is not None]
    if failed:
        raise StorageError("checkpoint", failed[0])
