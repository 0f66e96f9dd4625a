# SPDX-License-Identifier: Apache-2.0
"""`LiveUpdates`: a session that follows the checkpoints of its run while a trainer writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from terarec.checkpoint import Checkpoint, load
from terarec.checkpoint.directory import newest_checkpoint, state_id, step_of
from terarec.config.files import CHECKPOINT_DIRECTORY
from terarec.errors import ConfigError, TerarecError
from terarec.formats.delta import StateId
from terarec.ps.server import TableChange
from terarec.repeating import Repeating
from terarec.serve.session import InferenceSession


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStatistics:
    """Counters of live updates.

    Attributes:
        step: Training steps of the session's weights.
        deltas: Deltas that were applied.
        snapshots: Times that all rows were loaded, since no deltas led from the session's state to the newest.
        rows: Rows that deltas have set.
        removed: Keys that they have removed.
        unwritten: Rows of deltas that lookups find in memory, since tiers do not have them yet.
        rejected: Times that an update was rejected, since a file was damaged, or could not be written to any tier.
        last_error: Why the last poll was rejected; "" after one that succeeded.
    """

    step: int = 0
    deltas: int = 0
    snapshots: int = 0
    rows: int = 0
    removed: int = 0
    unwritten: int = 0
    rejected: int = 0
    last_error: str = ""


class _Unwritten(NamedTuple):
    """Changed rows in memory that the tiers do not have yet.

    Attributes:
        changes: Table -> its changes.
        through: The states from which they lead to that of the session.
    """

    changes: Mapping[str, Sequence[TableChange]]
    through: Sequence[StateId]

    @property
    def num_rows(self) -> int:
        return sum(change.rows.shape[0] for changes in self.changes.values() for change in changes)


class LiveUpdates(Repeating):
    """Keeps a session at the newest checkpoint of its run.

    Each answer is of one state. The changed rows of deltas are read and checked as a whole. New batches find them in
    memory, over the rows of the tiers, together with the dense weights of the same state. When no batch uses the former
    state any more, the rows are written to the tiers and caches, and given up in memory.

    Where no deltas lead from the session's state to the newest one (a gap, another base, a former state that was
    repeated), all rows of the newest checkpoint are loaded as a new version, which replaces the old one when it is
    complete. A damaged checkpoint is rejected: the session stays as it is, and the next poll tries again.

    A tier that fails does not stop updates, and each poll brings such tiers up to date. While no tier of a table can be
    written, the changed rows stay in memory. So they do while files that are open for reading only do not have them:
    these get their rows from the process that writes them.

    Args:
        session: A session whose tables are in a parameter server.
        run_dir: The run.
        every_seconds: Seconds between two polls for a newer checkpoint; None for none but those of `poll`.

    Raises:
        ConfigError: A session that holds its tables itself.
    """

    def __init__(self, session: InferenceSession, run_dir: Path, *, every_seconds: float | None = 1.0) -> None:
        if session.served is None or session.state is None:
            raise ConfigError("session", "holds its tables itself, expected one opened with tables=ServedTables(...)")
        self._session = session
        self._served = session.served
        self._directory = run_dir / CHECKPOINT_DIRECTORY
        self._lock = threading.Lock()
        self._unwritten: _Unwritten | None = None
        self._count = dict.fromkeys(("deltas", "snapshots", "rows", "removed", "rejected"), 0)
        self._last_error = ""
        try:
            # What another process writes is looked up with the layers of its state, and not before.
            self._served.follow(session.state)
        except TerarecError as error:  # as in `poll`, which tries again
            self._last_error = str(error)
        super().__init__("terarec-live-updates", every_seconds)

    def poll(self) -> bool:
        """Move on to the newest checkpoint; return whether there was a newer one.

        Raises:
            ConfigError: An executor cannot compute the new weights; eager torch does, and the next call tries again.
            FormatError: It is damaged; the session is as before.
            StorageError: No tier of a table can be written; the next call continues with what is in memory.
        """
        # `poll` may be called while the thread polls; two of them must not apply one delta twice.
        with self._lock:
            newest = newest_checkpoint(self._directory)
            try:
                # By its content: a training that began anew has the steps of the former one.
                is_newer = newest is not None and state_id(newest, step_of(newest)) != self._session.state
                has_moved = newest is not None and is_newer and self._move_to(load(newest))
                try:
                    if newest is not None:
                        self._write(newest)
                finally:
                    self._session.build_programs(self._is_closed)
            except TerarecError as error:
                self._count["rejected"] += 1
                self._last_error = str(error)
                raise
            self._last_error = ""
            return has_moved

    def statistics(self) -> UpdateStatistics:
        """Return the counters of updates."""
        unwritten = self._unwritten
        return UpdateStatistics(
            step=self._session.step,
            last_error=self._last_error,
            unwritten=0 if unwritten is None else unwritten.num_rows,
            **self._count,
        )

    def behind_seconds(self) -> float:
        """Return the age of the newest checkpoint if the session has not moved on to it; 0 if it has."""
        newest = newest_checkpoint(self._directory)
        if newest is None:
            return 0.0
        try:
            if state_id(newest, step_of(newest)) == self._session.state:
                return 0.0
        except TerarecError:  # a damaged one, which the session cannot move on to
            pass
        try:
            return max(time.time() - newest.stat().st_mtime, 0.0)
        except FileNotFoundError:  # removed by the trainer, which has written newer ones
            return 0.0

    def _move_to(self, checkpoint: Checkpoint) -> bool:
        state = self._session.state
        assert state is not None  # which __init__ has checked
        num_deltas = checkpoint.num_deltas_after(state)
        if num_deltas == 0:
            return False
        if num_deltas is None:
            checkpoint.dense()  # first: where it is damaged, each poll would load all rows for nothing
            with self._served.loaded(checkpoint) as lookups:
                self._session.move_on(checkpoint, lookups)
                self._unwritten = None
                self._count["snapshots"] += 1
            return True
        changes = self._read(checkpoint, num_deltas)
        rows = sum(change.keys.numel() for parts in changes.values() for change in parts)
        removed = sum(change.removed.numel() for parts in changes.values() for change in parts)
        through = checkpoint.earlier[-num_deltas:]
        if self._unwritten is not None:
            through = (*self._unwritten.through, *through)
            changes = {name: [*self._unwritten.changes[name], *parts] for name, parts in changes.items()}
        tables = self._served.overlaid(changes)
        self._session.move_on(checkpoint, tables.lookups)
        self._unwritten = _Unwritten(tables.changes, through)
        self._count["rows"] += rows
        self._count["removed"] += removed
        self._count["deltas"] += num_deltas
        return True

    def _read(self, checkpoint: Checkpoint, num_deltas: int) -> dict[str, list[TableChange]]:
        """Return the changes of each table, each of which is checked."""
        files, changes = checkpoint.table_files(), {}
        for name, table in self._served.tables.items():
            changes[name] = [
                # A piece may only remove keys; the update takes empty tensors of the right types for that.
                TableChange(removed, removed[:0], torch.empty(0, table.width))
                if changed is None
                else TableChange(removed, changed.keys, changed.weights.float())
                for removed, changed in files.changes(name, num_deltas)
            ]
        return changes

    def _write(self, checkpoint: Path) -> None:
        """Write what the tiers do not have yet, and bring stale ones up to date."""
        state, unwritten = self._session.state, self._unwritten
        assert state is not None  # which __init__ has checked
        changes, through = ({}, ()) if unwritten is None else unwritten
        is_written = self._served.write(changes, state, checkpoint, through)
        if is_written and unwritten is not None:
            self._session.connect(self._served.lookups())
            self._unwritten = None
