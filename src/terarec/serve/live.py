"""`LiveUpdates`: a session that follows the checkpoints of its run while a trainer writes them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from terarec.checkpoint import Checkpoint, load
from terarec.checkpoint.directory import newest_checkpoint, step_of
from terarec.config import CHECKPOINT_DIRECTORY
from terarec.errors import ConfigError, TerarecError
from terarec.serve.repeating import Repeating
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
        rejected: Times that an update was rejected: a file was damaged, or a tier could not be written.
        last_error: Why the last one was rejected; "" after one that succeeded.
    """

    step: int = 0
    deltas: int = 0
    snapshots: int = 0
    rows: int = 0
    removed: int = 0
    rejected: int = 0
    last_error: str = ""


class LiveUpdates(Repeating):
    """Keeps a session at the newest checkpoint of its run.

    Deltas are checked as a whole before the first is applied; then rows change table by table, and the dense weights
    last. Where no deltas lead from the session's state to the newest one (a gap, another base, a former state that was
    repeated), all rows of the newest checkpoint are loaded as a new version, which replaces the old one when it is
    complete. A damaged checkpoint is rejected: the session stays as it is, and the next poll tries again.

    Tiers that are open for reading only get their rows from the process that writes them: each poll refreshes them.

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
        self._count = dict.fromkeys(("deltas", "snapshots", "rows", "removed", "rejected"), 0)
        self._last_error = ""
        super().__init__("terarec-live-updates", every_seconds)

    def poll(self) -> bool:
        """Move on to the newest checkpoint; return whether there was a newer one.

        Raises:
            FormatError: It is damaged; the session is as before.
            StorageError: A tier cannot be written; rows of some tables may have changed, and the next call continues.
        """
        # `poll` may be called while the thread polls; two of them must not apply one delta twice.
        with self._lock:
            self._served.server.refresh()  # rows that another process has written to files that are read here
            newest = newest_checkpoint(self._directory)
            if newest is None or step_of(newest) == self._session.step:
                return False
            try:
                moved = self._move_to(load(newest))
            except TerarecError as error:
                self._count["rejected"] += 1
                self._last_error = str(error)
                raise
            self._last_error = ""
            return moved

    def statistics(self) -> UpdateStatistics:
        """Return the counters of updates."""
        return UpdateStatistics(step=self._session.step, last_error=self._last_error, **self._count)

    def _move_to(self, checkpoint: Checkpoint) -> bool:
        state = self._session.state
        assert state is not None  # which __init__ has checked
        num_deltas = checkpoint.num_deltas_after(state)
        if num_deltas == 0:
            return False
        if num_deltas is None:
            # Unloaded below, once new batches read the other version.
            former = self._served.version
            self._session.move_on(checkpoint, self._served.load(checkpoint))
            self._count["snapshots"] += 1
            if former != self._served.version:
                self._served.server.unload(self._served.name, former)
            return True
        self._apply(checkpoint, num_deltas)
        self._session.move_on(checkpoint)
        self._count["deltas"] += num_deltas
        return True

    def _apply(self, checkpoint: Checkpoint, num_deltas: int) -> None:
        served, files = self._served, checkpoint.table_files()
        checkpoint.dense()  # reads and checks it, before any row changes
        for name in served.tables:  # reads and checks every file, so that none is found damaged halfway
            for _ in files.changes(name, num_deltas):
                pass
        for name in served.tables:
            width = served.tables[name].width
            for removed, changed in files.changes(name, num_deltas):
                # A piece may only remove keys; the update takes empty tensors of the right types for that.
                keys = removed[:0] if changed is None else changed.keys
                rows = torch.empty(0, width) if changed is None else changed.weights.float()
                served.server.update(served.name, name, removed, keys, rows, served.version)
                self._count["rows"] += keys.numel()
                self._count["removed"] += removed.numel()
        # Flushed before the session moves on: its state says that all of these rows are there.
        served.server.flush(served.name, served.version)
        served.server.refresh()
