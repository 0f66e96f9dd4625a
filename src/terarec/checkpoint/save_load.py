# SPDX-License-Identifier: Apache-2.0
"""Save and load checkpoints, by one process or by several together. The files are described in docs/formats.md."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from terarec.checkpoint.directory import (
    DENSE,
    MANIFEST,
    OPTIMIZER,
    STATE,
    FileEntry,
    Manifest,
    RowFileEntry,
    keep_newest,
    latest,
    newest_checkpoint,
    read_chain,
    read_manifest,
    staged,
    state_id,
    step_path,
    write_manifest,
)
from terarec.checkpoint.state import TrainState, as_tensor, flatten, unflatten
from terarec.checkpoint.table_chain import TableChain, write_table_changes
from terarec.checkpoint.table_files import TableShare, write_container, write_table
from terarec.errors import ConfigError, FormatError, StorageError
from terarec.formats.container import read_tensors
from terarec.formats.delta import DeltaLink, StateId
from terarec.io.files import flush, write_bytes
from terarec.io.opening import read_bytes
from terarec.spec import from_data, to_data
from terarec.spec.checks import one_line, shortened
from terarec.spec.codec import parse_json
from terarec.storage import Store
from terarec.storage.store import ChangedSince

_MOST_DELTAS = 4  # bytes of the deltas in a chain, as a multiple of those of its base
_FILES_EACH = 10_000_000  # numbers of files of a table that a writer has: they only have to rise


def save(
    directory: Path,
    state: TrainState,
    *,
    keep: int | None = None,
    kind: Literal["full", "base", "delta", "shorter"] = "full",
    writers: Writers | None = None,
) -> Path:
    """Write `state` atomically as a new checkpoint below `directory`.

    Static tables are streamed from their memory. Rows of dynamic tables are copied, 64 MiB at a time. Of tables with a
    tier in files the changed rows are written there, and the checkpoint shares these files by links where the file
    system allows.

    Args:
        directory: Directory of the checkpoints, for example ``RUN/checkpoints``.
        state: State to write.
        keep: Number of the newest checkpoints to keep, this one included, besides the one marked best and those that
            kept deltas need; None for all.
        kind: "full" for all rows; "base" for all rows, after which the tables note which rows change; "delta" for the
            rows that changed since the newest checkpoint, a base or a delta, and "base" where these are not known;
            "shorter" for "delta" where fewer than half of the rows changed, and the chain with it takes less than
            five bases, else "base".
        writers: Processes that write it together into a directory that all of them see, each the rows that it has; the
            first one writes the rest. None for this one alone.

    Returns:
        The checkpoint's path.

    Raises:
        StorageError: A write fails, or the step has a checkpoint already. Earlier checkpoints stay complete.
        TrainingError: A row of a table has weights that are not finite. Nothing is written.
        ConfigError: A tensor of a type that a container lacks, such as float8, or progress that is not JSON data.
    """
    if kind not in ("full", "base", "delta", "shorter"):
        raise ConfigError("kind", f"got {kind!r}, expected 'full', 'base', 'delta' or 'shorter'")
    is_delta, is_together = kind in ("delta", "shorter"), writers is not None and writers.size > 1
    link = _link(directory, state) if is_delta else None
    # All write the same kind: a chain of deltas with rows of some ranks only could not be loaded.
    if (
        writers is not None
        and is_together
        and is_delta
        and not all(writers.gather("changes since a checkpoint", link is not None))
    ):
        link = None  # a rank does not know which rows changed
    if kind == "shorter" and link is not None and not _is_short(directory, state, writers):
        link = None
    if writers is not None and is_together:

        def write_share(checkpoint: Path, shares: Mapping[str, TableShare]) -> Sequence[FileEntry]:
            files = _write_files(checkpoint, state, link, shares, with_rest=writers.rank == 0).files
            if writers.rank:
                # The first rank flushes the directory, but on a shared file system not what other machines hold of it.
                paths = [checkpoint / entry.file for entry in files]
                for path in (*paths, *{path.parent for path in paths}):
                    flush(path)
            return files

        save_together(directory, state, writers, write_share, link)
    else:
        with staged(directory, state.step) as checkpoint:
            # The manifest is written last: a directory without one is not a checkpoint.
            write_manifest(checkpoint, _write_files(checkpoint, state, link))
    path = step_path(directory, state.step)
    # After the rename: what changes from here on belongs to the next delta.
    if kind != "full":
        follow_changes(state.tables, path)
    if keep is not None and (writers is None or writers.rank == 0):
        # Former checkpoints go only once the new one is complete.
        keep_newest(directory, keep)
    return path


def follow_changes(tables: Mapping[str, ChangedSince], checkpoint: Path) -> None:
    """Record row changes of tables that equal a checkpoint from now on, so that a delta can follow it.

    Raises:
        DataNotFoundError: `checkpoint` is not a complete checkpoint.
        StorageError: Not enough memory: a bit for each row.
    """
    since = state_id(checkpoint, read_manifest(checkpoint).step)
    for table in tables.values():
        table.follow_changes(since.id)


def _link(directory: Path, state: TrainState) -> DeltaLink | None:
    """Return the place of a delta of `state`; None if the changes since the newest checkpoint are not known."""
    newest = newest_checkpoint(directory)
    if newest is None or not state.tables:
        return None
    manifest = read_manifest(newest)
    previous = state_id(newest, manifest.step)
    # The bits of changed rows count from one checkpoint, which has to be the newest: a delta follows it alone.
    if manifest.step >= state.step or any(table.changes_since != previous.id for table in state.tables.values()):
        return None
    return DeltaLink.after(previous, manifest.delta)


def _is_short(directory: Path, state: TrainState, writers: Writers | None) -> bool:
    """Return whether few rows changed since the newest checkpoint, and the chain stays short with them."""
    changed = [(table.num_since, table.num_changed, table.row_bytes) for table in state.tables.values()]
    counts = [
        sum(count for count, _, _ in changed),
        sum(rows for _, rows, _ in changed),
        sum(count * num_bytes for count, _, num_bytes in changed if count),
    ]
    if writers is not None and writers.size > 1:
        counts = list(map(sum, zip(*writers.gather("number of changed rows", counts), strict=True)))
    num_changed, num_rows, num_bytes = counts
    if 2 * num_changed >= num_rows:
        return False
    base, *deltas = [manifest for _, manifest in read_chain(latest(directory))]
    of_base = sum(entry.bytes for entry in base.files) + sum(entry.bytes for entry in base.row_files)
    # Whoever joins reads the whole chain. Each delta has all layers, so that one with few rows each ends, too.
    return sum(entry.bytes for manifest in deltas for entry in manifest.files) + num_bytes < _MOST_DELTAS * of_base


def _write_files(
    checkpoint: Path,
    state: TrainState,
    link: DeltaLink | None,
    shares: Mapping[str, TableShare] | None = None,
    *,
    with_rest: bool = True,
) -> Manifest:
    files: list[FileEntry] = []
    row_files: list[RowFileEntry] = []
    for table in state.tables.values():
        if link is not None:
            files += write_table_changes(checkpoint, table, None if shares is None else shares[table.name])
            continue
        written, row_file = write_table(checkpoint, table, None if shares is None else shares[table.name])
        files += written
        row_files += [] if row_file is None else [row_file]
    if with_rest:
        files.append(write_container(checkpoint, DENSE, state.dense, {}))
        tensors, text = flatten(state.optimizer)
        files.append(write_container(checkpoint, OPTIMIZER, tensors, {"optimizer": text}))
        files.append(_write_state(checkpoint, state))
    return Manifest(step=state.step, files=tuple(files), row_files=tuple(row_files), delta=link)


def _write_state(checkpoint: Path, state: TrainState) -> FileEntry:
    rng = base64.b64encode(state.rng.numpy().tobytes()).decode()
    try:
        content = json.dumps({"step": state.step, "progress": state.progress, "rng": rng}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "progress",
            f"{error}, expected JSON data; of a row optimizer that is step_state(): the tables hold the "
            "state of its rows",
        ) from None
    write_bytes(checkpoint / STATE, content, flushes=False)
    return FileEntry(file=STATE, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


class Checkpoint:
    """Complete checkpoint; each part is read when requested and compared with its checksum.

    Attributes:
        path: Directory of the checkpoint.
        step: Training steps done.
        rng: ``torch.get_rng_state()`` of then.
        progress: The JSON data of `TrainState.progress`.
    """

    def __init__(self, path: Path, chain: Sequence[tuple[Path, Manifest]], state: Mapping[str, Any]) -> None:
        self.path = path
        self._chain = chain
        self._manifest = chain[-1][1]
        self.step = self._manifest.step
        self.rng = torch.frombuffer(state["rng"], dtype=torch.uint8)
        self.progress: dict[str, Any] = state["progress"]

    @property
    def state(self) -> StateId:
        """Identity of the state: its step, and the checksum of its manifest."""
        return state_id(self.path, self.step)

    @property
    def earlier(self) -> tuple[StateId, ...]:
        """The states from which its deltas lead, that of the base first; none for a base."""
        return tuple(manifest.delta.previous for _, manifest in self._chain if manifest.delta is not None)

    def num_deltas_after(self, state: StateId) -> int | None:
        """Return how many deltas lead from an earlier state to this one; None if it does not build on that state."""
        states = (*self.earlier, self.state)[::-1]
        return states.index(state) if state in states else None

    def dense(self) -> dict[str, Tensor]:
        """Return the model's dense parameters and buffers."""
        return self._read(DENSE)[0]

    def optimizer(self) -> dict[str, Any]:
        """Return the argument of the dense optimizer's ``load_state_dict``."""
        tensors, metadata = self._read(OPTIMIZER)
        return unflatten(tensors, metadata.get("optimizer", ""))

    def table_files(self) -> TableChain:
        """Return the tables, to read them without a model."""
        return TableChain(self._chain)

    def load_tables(self, tables: Mapping[str, Store], *, with_state: bool, may_grow: bool = False) -> None:
        """Overwrite the rows of `tables`, one piece at a time. Dynamic tables hold no other rows afterwards.

        Args:
            tables: Tables by name, exactly those of the checkpoint.
            with_state: Whether to load the row optimizer's state, which `tables` must have memory for, and the key
                counts of dynamic tables; serving needs neither.
            may_grow: Whether static tables may have further rows than the checkpoint, which keep what they have.

        Raises:
            ConfigError: Other tables, or a table of another number of rows or another type.
            StorageError: Another width, or another optimizer's state.
            FormatError: A damaged file.
        """
        files = self.table_files()
        # Checked for all tables before the first of them is overwritten.
        if set(files.names) != set(tables):
            raise ConfigError(self.path, f"holds the tables {sorted(files.names)}, expected {sorted(tables)}")
        for name in files.names:
            _check_rows(self.path, files, tables[name], may_grow=may_grow)
        for name in files.names:
            files.load(tables[name], with_state=with_state)

    def _read(self, file: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        arrays, metadata = read_tensors(self.path / file, sha256=self._manifest.entry(file).sha256)
        return {name: as_tensor(array) for name, array in arrays.items()}, metadata


def _check_rows(path: Path, files: TableChain, table: Store, *, may_grow: bool) -> None:
    """Raise `ConfigError` unless a static table has the rows of a checkpoint; or more, if it may have grown."""
    if table.is_dynamic or files.is_dynamic(table.name):  # of another kind, which loading reports
        return
    rows = files.num_rows(table.name)
    if rows > len(table) or (rows < len(table) and not may_grow):
        expected = f"at most {len(table)}" if may_grow else str(len(table))
        raise ConfigError(path, f"table {table.name!r} has {rows} rows, expected {expected}")


def load(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`; read and check its manifest and ``state.json``, the rest when requested.

    A delta needs the checkpoints that it builds on in the same directory.

    Raises:
        DataNotFoundError: `path` is not a complete checkpoint.
        FormatError: A file is missing, damaged or of another version, or a delta does not follow the checkpoint before;
            the message names it.
    """
    chain = read_chain(path)
    manifest = chain[-1][1]
    state = _read_state(path / STATE, manifest.entry(STATE))
    if state["step"] != manifest.step:
        raise FormatError(path / MANIFEST, f"$.step is {manifest.step}, but {STATE} is of step {state['step']}")
    return Checkpoint(path, chain, state)


def _read_state(path: Path, entry: FileEntry) -> dict[str, Any]:
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise FormatError(path, f"damaged: its SHA-256 is not the one in {MANIFEST}")
    try:
        state = parse_json(content)
        # A bytearray, since a tensor over bytes could not be written to, of which torch warns.
        rng = bytearray(base64.b64decode(str(state["rng"]), validate=True))
        return {"step": int(state["step"]), "progress": dict(state["progress"]), "rng": rng}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise FormatError(path, f"expected step, progress and rng ({shortened(repr(error))})") from None


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
    # All rows are counted before any are written: each file says how many rows the table has.
    shares = _shares(state, writers)
    # The first writer leaves the staged directory only after all have written: leaving it gives it its name.
    with ExitStack() as stack:
        checkpoint = _place(directory, state, writers, stack)
        error: Exception | None = None
        files: Sequence[FileEntry] = ()
        try:
            files = write_files(checkpoint, shares)
        except Exception as raised:  # which all have to know before any of them continues
            error = raised
        # Every rank gets here, even after an error: a rank that raised alone would leave the others waiting.
        reports = writers.gather(
            "files of a checkpoint", {"error": None if error is None else one_line(str(error)), "files": to_data(files)}
        )
        if error is not None:
            raise error
        _check_all(reports)
        if writers.rank == 0:
            entries = tuple(from_data(FileEntry, entry) for written in reports for entry in written["files"])
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
    report = {"error": None if error is None else one_line(str(error)), "path": str(checkpoint)}
    reports = writers.gather("place of a checkpoint", report)
    if error is not None:
        raise error
    # The first writer alone made the directory, so only its report counts.
    _check_all(reports[:1])
    return Path(reports[0]["path"])


def _check_all(reports: list[dict[str, Any]]) -> None:
    failed = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"] is not None]
    if failed:
        raise StorageError("checkpoint", failed[0])
