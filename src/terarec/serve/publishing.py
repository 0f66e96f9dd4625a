# SPDX-License-Identifier: Apache-2.0
"""`UpdatePublisher` and `UpdateReceiver`: checkpoints of a run through a stream, to the files of a replica.

The records of a checkpoint are its files in pieces, then a commit that names them all with their checksums. Each base,
and the first checkpoint of a run that extends the chain of another, brings along the files that describe the run.
docs/formats.md describes the records.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from terarec.checkpoint import complete_checkpoints
from terarec.checkpoint.directory import (
    Manifest,
    keep_newest,
    newest_checkpoint,
    read_chain,
    read_manifest,
    remove_checkpoint,
    state_id,
    step_of,
    step_path,
)
from terarec.closer import Closer
from terarec.config import load_run
from terarec.config.files import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.errors import DataNotFoundError, FormatError, StorageError, TerarecError
from terarec.io.directories import replace_directory
from terarec.io.files import flush, flush_tree, read_versioned_json, write_versioned_json
from terarec.io.locks import file_lock
from terarec.io.opening import open_file
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.io.removal import remove_tree, work_directory
from terarec.models.artifact import extended_step
from terarec.repeating import Repeating
from terarec.serve.update_streams import UpdateStream
from terarec.spec.checks import shortened

_LOGGER = logging.getLogger(__name__)
_FORMAT, _VERSION = "terarec.update", 1
_LOCK_FILE = "receiving.lock"
_POSITION_FILE, _POSITION_NAME = "stream.json", "terarec.stream_position"
_DATASET_NAMES = r"dataset\.json|workflow"
# Errors of a file system that follow from a name alone, or from a name for both a file and a directory.
_NAME_ERRORS = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ}
_KEPT = 2  # checkpoints of a replica: one may be read while the next comes
_APPENDED_AT_ONCE = 16  # records: a bound of the memory that they take until they are sent


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishStatistics:
    """Counters of a publisher.

    Attributes:
        step: Training steps of the newest checkpoint that was published; 0 before the first.
        checkpoints: Checkpoints that were published.
        bytes: Bytes of their files.
        foreign: Records of others that were passed over at the end of the stream.
        failed: Times that publishing failed.
        last_error: Why it did the last time; "" after one that succeeded.
    """

    step: int = 0
    checkpoints: int = 0
    bytes: int = 0
    foreign: int = 0
    failed: int = 0
    last_error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveStatistics:
    """Counters of a receiver.

    Attributes:
        step: Training steps of the newest checkpoint that was received; 0 before the first.
        checkpoints: Checkpoints that were received whole.
        repeated: Checkpoints that were there already.
        foreign: Records of others that were passed over.
        rejected: Checkpoints that were rejected: damaged, incomplete, or the one that they follow is missing.
        last_error: Why the last one was rejected; "" after one that was taken.
    """

    step: int = 0
    checkpoints: int = 0
    repeated: int = 0
    foreign: int = 0
    rejected: int = 0
    last_error: str = ""


class UpdatePublisher(Repeating):
    """Publishes the checkpoints of a run, complete ones and deltas, as a trainer writes them.

    The stream's last record says what was published last, so that a publisher that was killed continues where it ended.
    Where no deltas lead from there to the newest checkpoint, the base of that comes first.

    Args:
        run_dir: The run.
        stream: Stream to write to.
        every_seconds: Seconds between two polls for a newer checkpoint; None for none but those of `poll`.
    """

    def __init__(self, run_dir: Path, stream: UpdateStream, *, every_seconds: float | None = 1.0) -> None:
        self._run = run_dir
        self._directory = run_dir / CHECKPOINT_DIRECTORY
        self._stream = stream
        self._lock = threading.Lock()
        self._counted = PublishStatistics()
        super().__init__("terarec-publish", every_seconds)

    def poll(self) -> int:
        """Publish newer checkpoints; return their number.

        Raises:
            FormatError: A checkpoint, or the stream's last record, is damaged.
            StorageError: The server cannot be reached; what was begun is published again by the next call.
        """
        with self._lock:
            try:
                return self._publish()
            except (TerarecError, OSError) as error:
                counted = self._counted
                self._counted = replace(counted, failed=counted.failed + 1, last_error=str(error))
                raise

    def statistics(self) -> PublishStatistics:
        """Return the counters so far."""
        return self._counted

    def _publish(self) -> int:
        newest = newest_checkpoint(self._directory)
        if newest is None:
            return 0
        try:
            return self._publish_chain(newest)
        except StorageError:  # of the stream, even where it is an OSError
            raise
        except (FormatError, OSError):
            # The trainer removes checkpoints once there are newer ones, also while they are read.
            if newest_checkpoint(self._directory) in (newest, None):
                raise
        return self._publish()

    def _publish_chain(self, newest: Path) -> int:
        chain = read_chain(newest)
        ids = [state_id(path, manifest.step).id for path, manifest in chain]
        published = self._published_state()
        begin = ids.index(published) + 1 if published in ids else 0  # 0: the chain has a new base, or none was sent
        extended = extended_step(load_run(self._run / RUN_FILE)) if begin < len(chain) else None
        for (path, manifest), state in zip(chain[begin:], ids[begin:], strict=True):
            # The ids of a run that extends another one are more; a reader of its deltas has to know them.
            is_described = manifest.delta is None or manifest.delta.previous.step == extended
            before = self._send(path, manifest, state, published, is_described=is_described)
            if manifest.delta is None:  # no reader needs records from before a base
                self._stream.trim(before)
            published = state
        if begin < len(chain):
            self._counted = replace(self._counted, last_error="")
        return len(chain) - begin

    def _published_state(self) -> str | None:
        """Return the id of the state that was published last; None before the first."""
        foreign, record = 0, None
        # Each of our records names the state that was committed before it, so the last one of any kind is enough.
        for content in self._stream.newest_first():
            record = _Record.read(content)
            if record is not None:
                break
            foreign += 1
        if foreign > self._counted.foreign:
            _warn_of_foreign(self._counted.foreign)
            self._counted = replace(self._counted, foreign=foreign)
        return None if record is None else record.published

    def _send(self, path: Path, manifest: Manifest, state: str, published: str | None, *, is_described: bool) -> str:
        """Append the records of a checkpoint; return the position of the first."""
        files = _files_below(path)
        if is_described:
            files = [self._run / RUN_FILE, *_files_below(self._run / DATASET_DIRECTORY), *files]
        # The attempt tells these records from those that a publisher which was killed left of the same checkpoint.
        attempt, entries, first, size = secrets.token_hex(8), list[dict[str, Any]](), "", 0
        waiting: list[bytes] = []
        number = 0

        def add(record: _Record) -> None:
            nonlocal first, number
            waiting.append(record.as_bytes(step=manifest.step, attempt=attempt, number=number))
            number += 1
            if len(waiting) >= _APPENDED_AT_ONCE or record.commit is not None:
                positions = self._stream.append(waiting)
                first = first or positions[0]
                waiting.clear()

        for file in files:
            name, digest, length = file.relative_to(self._run).as_posix(), hashlib.sha256(), 0
            # Hashed as it is sent, in one pass over a file that may be larger than memory.
            for piece in _pieces(file, self._stream.record_bytes):
                digest.update(piece)
                length += len(piece)
                add(_Record(published=published, file=name, content=piece))
            entries.append({"file": name, "bytes": length, "sha256": digest.hexdigest()})
            size += length
        add(_Record(published=state, commit=entries))
        counted = self._counted
        self._counted = replace(
            counted, step=manifest.step, checkpoints=counted.checkpoints + 1, bytes=counted.bytes + size
        )
        return first


class UpdateReceiver(Repeating):
    """Receives checkpoints from a stream into the directory of a replica, which looks like the run then.

    A checkpoint appears when all of it has come and its checksums are right. A delta whose predecessor is missing is
    rejected, and so are those after it up to the next base. What is there already is ignored. The place in the stream
    is kept in the directory, for the next start.

    Args:
        stream: Stream to read from.
        directory: Directory of the replica; made if it is not there.
        every_seconds: Seconds between two polls of the stream; None for none but those of `poll`.

    Raises:
        StorageError: Another receiver has the directory.
    """

    def __init__(self, stream: UpdateStream, directory: Path, *, every_seconds: float | None = 1.0) -> None:
        self._stream, self._directory = stream, directory
        self._checkpoints = directory / CHECKPOINT_DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        locks = ExitStack()
        self._release = Closer(self, locks.close)
        if not locks.enter_context(file_lock(directory / _LOCK_FILE)):
            raise StorageError(directory, "another process receives checkpoints there, expected a directory of its own")
        self._lock = threading.Lock()  # of the stream and all below, for one read at a time
        self._counted = ReceiveStatistics(step=max(map(step_of, complete_checkpoints(self._checkpoints)), default=0))
        self._after = self._read_position()
        self._partial: _Partial | None = None
        super().__init__("terarec-receive", every_seconds)

    def poll(self) -> int:
        """Receive the available records, until it is closed; return the number of new checkpoints.

        Raises:
            StorageError: The server cannot be reached, or the disk is full; the next call continues.
            OSError: The disk is full, or a file cannot be written; the next call receives the checkpoint again.
        """
        count = 0
        while True:
            with self._lock:
                num_records, num_new = self._receive()
            count += num_new
            if not num_records:
                return count

    def wait(self, seconds: float) -> bool:
        """Receive until a complete checkpoint is there; return whether it came in time, and before it was closed.

        Raises:
            StorageError: As of `poll`.
        """
        ends = time.monotonic() + seconds
        while not complete_checkpoints(self._checkpoints):
            if self._is_closed.is_set() or time.monotonic() > ends:
                return False
            # One read at a time, and no long wait for another thread's: the rest of a backlog may take hours.
            if self._lock.acquire(timeout=0.05):
                try:
                    num_records, _ = self._receive()
                finally:
                    self._lock.release()
                if not num_records:
                    self._is_closed.wait(0.05)
        return True

    def statistics(self) -> ReceiveStatistics:
        """Return the counters so far."""
        return self._counted

    def close(self) -> None:
        """Stop after the present record; a checkpoint that was received in part is received again."""
        super().close()
        with self._lock:  # another thread may be in `poll` or `wait`
            self._drop()
        self._release()

    def _receive(self) -> tuple[int, int]:
        """Receive the records of one read; return their number, 0 once it is closed, and that of new checkpoints."""
        records = [] if self._is_closed.is_set() else self._stream.read(self._after)
        count = 0
        for position, content in records:
            if self._is_closed.is_set():
                return 0, count
            try:
                count += self._take(content)
            except (TerarecError, OSError):
                # Such as a full disk. All records of the checkpoint are needed again, so read from before it.
                self._drop()
                self._after = self._read_position()
                raise
            self._after = position
            # Not within a checkpoint: a receiver that starts again needs all of its records again.
            if self._partial is None:
                self._write_position(position)
        return len(records), count

    def _take(self, content: bytes) -> int:
        """Process a record, which may be rejected; return 1 if it completes a checkpoint that is new."""
        try:
            record = _Record.read(content)
            if record is None:  # a checkpoint that comes in around it is whole without it
                _warn_of_foreign(self._counted.foreign)
                self._counted = replace(self._counted, foreign=self._counted.foreign + 1)
                return 0
            # Record 0 begins an attempt; an earlier attempt will not be completed.
            if record.number == 0:
                self._drop()
                self._partial = _Partial(self._directory, record)
            partial = self._partial
            if partial is not None and not partial.expects(record):
                problem = f"record {record.number} of step {record.step} follows {partial.count} others"
                self._drop()
                raise FormatError("stream", f"{problem}, expected all of a checkpoint in their order")
            if partial is None:
                if record.commit is not None:
                    raise FormatError("stream", f"step {record.step} came without its first records")
            elif record.commit is None:
                partial.add(record)
            else:
                return self._install(partial, record)
        except FormatError as error:
            self._drop()
            self._counted = replace(self._counted, rejected=self._counted.rejected + 1, last_error=str(error))
            _LOGGER.warning("update stream: %s; it is rejected", error)
        return 0

    def _install(self, partial: _Partial, record: _Record) -> int:
        """Check a checkpoint, and let it appear."""
        path = step_path(self._checkpoints, record.step)
        if path.is_dir() and state_id(path, record.step).id == record.published:
            self._drop()
            self._counted = replace(self._counted, repeated=self._counted.repeated + 1)
            return 0
        partial.check(record)
        checkpoint = partial.path / path.relative_to(self._directory)
        manifest = read_manifest(checkpoint)
        if state_id(checkpoint, record.step).id != record.published or manifest.step != record.step:
            raise FormatError("stream", f"step {record.step} has another manifest than its commit names")
        if manifest.delta is not None:
            previous = step_path(self._checkpoints, manifest.delta.previous.step)
            try:
                manifest_before = read_manifest(previous)
            except DataNotFoundError:
                raise FormatError(f"delta of step {record.step}", f"needs {previous.name}, which is missing") from None
            manifest.delta.check_follows(record.step, state_id(previous, manifest_before.step), manifest_before.delta)
        self._install_description(partial.path)
        # Otherwise the newest checkpoint by step would be one that the trainer has discarded.
        for other in complete_checkpoints(self._checkpoints):
            if step_of(other) >= record.step:  # of a training that went on from an earlier checkpoint
                remove_checkpoint(other)
        self._checkpoints.mkdir(exist_ok=True)
        flush_tree(checkpoint)  # before the rename: a directory of that name is taken for a complete checkpoint
        checkpoint.rename(path)
        self._drop()
        keep_newest(self._checkpoints, _KEPT)
        counted = self._counted
        self._counted = replace(counted, step=record.step, checkpoints=counted.checkpoints + 1, last_error="")
        return 1

    def _install_description(self, received: Path) -> None:
        """Let the files that describe the run appear, before the checkpoint that needs them does."""
        if (received / RUN_FILE).exists():
            flush(received / RUN_FILE)
            (received / RUN_FILE).replace(self._directory / RUN_FILE)
        new, present = received / DATASET_DIRECTORY, self._directory / DATASET_DIRECTORY
        # Of a base of the same run it is the same, which a running session may be reading.
        if new.exists() and not (present.exists() and _are_equal(new, present)):
            replace_directory(new, present, _DATASET_NAMES)

    def _drop(self) -> None:
        if self._partial is not None:
            self._partial.remove()
        self._partial = None

    def _read_position(self) -> str | None:
        path = self._directory / _POSITION_FILE
        if not path.is_file():
            return None
        return str(read_versioned_json(path, _POSITION_NAME, 1)["after"])

    def _write_position(self, position: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        write_versioned_json(self._directory / _POSITION_FILE, _POSITION_NAME, 1, {"after": position})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A record: a piece of a file, or the commit that names all files.

    Attributes:
        published: Id of the state that was committed last: of a commit, its own.
        file: Path of the file inside the run; "" for a commit.
        content: The piece.
        commit: Path, size and SHA-256 of each file; None for a piece.
        step, attempt, number: Step of the checkpoint, id of this publication of it, and the record's place there.
    """

    published: str | None
    file: str = ""
    content: bytes = b""
    commit: list[dict[str, Any]] | None = None
    step: int = 0
    attempt: str = ""
    number: int = 0

    def as_bytes(self, *, step: int, attempt: str, number: int) -> bytes:
        """Return the record in the form that is appended to the stream."""
        head = {"format": _FORMAT, "version": _VERSION, "step": step, "attempt": attempt, "number": number}
        head |= {"published": self.published, "file": self.file, "commit": self.commit}
        return json.dumps(head).encode() + b"\n" + self.content

    @classmethod
    def read(cls, content: bytes) -> _Record | None:
        """Read a record; None for one that is no update of a run, such as another program's.

        Raises:
            FormatError: An update that is damaged or of a newer version.
        """
        head, _, body = content.partition(b"\n")
        try:
            data = json.loads(head)
        except (ValueError, RecursionError):
            return None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            return None
        try:
            kinds = {"step": int, "attempt": str, "number": int, "published": str | None, "file": str}
            if data["version"] > _VERSION:
                raise ValueError("a newer version")
            # Fields that a later version adds are ignored, those of this one must be right.
            if not all(isinstance(data[name], kind) for name, kind in kinds.items()):
                raise ValueError("fields of other types")
            if not 0 <= data["step"] < 2**63:
                raise ValueError(f"step {data['step']}")
            entries = data["commit"]
            for entry in entries or ():
                _ = int(entry["bytes"]), str(entry["sha256"]), str(entry["file"])
            return cls(content=body, commit=entries, **{name: data[name] for name in kinds})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError("stream", f"an update of a run cannot be read ({shortened(repr(error))})") from None


def _warn_of_foreign(count: int) -> None:
    """Warn of a record of others, once."""
    if not count:
        _LOGGER.warning("update stream: it has records that are no updates of a run; they are passed over")


class _Partial:
    """The files of an incoming checkpoint, in a temporary directory of the replica."""

    def __init__(self, directory: Path, first: _Record) -> None:
        # On the replica's file system, so that checkpoints and files are moved in by a rename.
        self.path = directory / f"received{PARTIAL_SUFFIX}"
        work_directory(self.path)
        self.count = 0
        self._attempt = first.attempt
        self._digests: dict[str, Any] = {}

    def expects(self, record: _Record) -> bool:
        return record.attempt == self._attempt and record.number == self.count

    def add(self, record: _Record) -> None:
        name, step = PurePosixPath(record.file), step_path(Path(CHECKPOINT_DIRECTORY), record.step)
        # The stream is untrusted input: it must not write outside of the replica, and no file that is none of a run.
        is_inside = DATASET_DIRECTORY in map(str, name.parents) or step.as_posix() in map(str, name.parents)
        wrong = FormatError("stream", f"got the file {shortened(record.file)!r}, expected a path inside a run")
        if ".." in name.parts or not (is_inside or record.file == RUN_FILE):
            raise wrong
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_file(path, "ab") as file:
                file.write(record.content)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _NAME_ERRORS:  # such as a full disk
                raise
            raise wrong from error
        self._digests.setdefault(record.file, hashlib.sha256()).update(record.content)
        self.count += 1

    def check(self, record: _Record) -> None:
        """Raise unless all files are there with their checksums."""
        expected = {entry["file"]: entry["sha256"] for entry in record.commit or ()}
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        wrong = [name for name in {**expected, **digests} if expected.get(name) != digests.get(name)]
        if wrong:
            raise FormatError("stream", f"step {record.step}: {sorted(wrong)[0]} is damaged or missing")

    def remove(self) -> None:
        remove_tree(self.path, ignore_errors=True)


def _are_equal(directory: Path, other: Path) -> bool:
    """Return whether two directories have the same files."""
    files = [[path.relative_to(place) for path in _files_below(place)] for place in (directory, other)]
    return files[0] == files[1] and all(filecmp.cmp(directory / file, other / file, shallow=False) for file in files[0])


def _files_below(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield the content of a file, in one piece at least."""
    with open_file(path) as file:
        # An empty file is one empty piece: without a record the receiver would miss it.
        piece = file.read(size)
        yield piece
        while piece := file.read(size):
            yield piece
