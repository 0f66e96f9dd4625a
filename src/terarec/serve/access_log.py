# SPDX-License-Identifier: Apache-2.0
"""`AccessLog`: a line of JSON for each call that a server answers. No feature values and no tokens are in it."""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from terarec.errors import StorageError, TerarecError
from terarec.serve.calls import Call
from terarec.serve.sinks import QueuedSink
from terarec.spec.checks import FieldError, shortened
from terarec.spec.serving_options import WatchingSpec

STANDARD_OUTPUT = "-"

_MOST_WAITING = 16384  # lines, of a few hundred bytes each
_EVERY_SECONDS = 0.1
_PIPE_MILLISECONDS = 1000  # that a pipe may be full before lines are given up
_MOST_PATH, _MOST_ID = 500, 200  # characters


class AccessLog(QueuedSink[Call]):
    """Appends lines to a file, which several processes may do at once.

    A file that was renamed or removed is made anew, so that logs can be rotated without a signal; one that was cut to
    nothing goes on at its beginning. Lines are written whole, at most `select.PIPE_BUF` bytes at once.

    Args:
        spec: File and share; its `access_log` is not None.
    """

    def __init__(self, spec: WatchingSpec) -> None:
        self._path = spec.access_log or STANDARD_OUTPUT
        self._share = spec.access_log_share
        self._file = _opened(self._path)
        self._is_torn = False  # whether the last line was cut by a full disk
        super().__init__("access_log", _MOST_WAITING, _EVERY_SECONDS)

    def finish(self, call: Call) -> None:
        """Log a call that has ended, if it is in the share. It does not wait."""
        if self._share >= 1.0 or random.random() < self._share:
            self._put(call)

    @override
    def close(self) -> None:
        super().close()
        if self._path != STANDARD_OUTPUT:
            os.close(self._file)

    @override
    def _write(self, items: Sequence[Call]) -> None:
        if not items:
            return
        lines, begin = [_line(call) for call in items], 0
        try:
            self._follow_renames()
            for piece in _pieces(lines):
                self._append(b"".join(piece))
                self._count(len(piece))
                begin += len(piece)
        except (TerarecError, OSError) as error:
            self._fail(error, len(lines) - begin)

    def _append(self, text: bytes) -> None:
        if self._is_torn:
            text = b"\n" + text
        # A pipe has room for this then; files always have.
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        if not poll.poll(_PIPE_MILLISECONDS):
            raise StorageError(self._path, "nobody has read from it for a second")
        written = os.write(self._file, text)
        self._is_torn = 0 < written < len(text)
        if written < len(text):
            os.write(self._file, text[written:])  # raises what kept the rest from being written
            self._is_torn = False

    def _follow_renames(self) -> None:
        if self._path == STANDARD_OUTPUT:
            return
        here = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            file = _opened(self._path)
            os.close(self._file)
            self._file = file


def check_access_log(spec: WatchingSpec) -> None:
    """Raise `ConfigError` if the access log cannot be written: before a model is loaded, which may take minutes."""
    if spec.access_log not in (None, STANDARD_OUTPUT):
        os.close(_opened(str(spec.access_log)))


def _opened(path: str) -> int:
    if path == STANDARD_OUTPUT:
        return sys.stdout.fileno()
    try:
        # Without waiting for the reader of a pipe. Each write goes to the end, also where others write or cut.
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o640)
    except OSError as error:
        problem = (
            f"got {path!r}, which cannot be opened ({os.strerror(error.errno or 0)}), expected a file to append to"
        )
        raise FieldError("WatchingSpec", "access_log", problem) from None


def _pieces(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield lines that are written at once."""
    begin, size = 0, 0
    for place, line in enumerate(lines):
        if size + len(line) > select.PIPE_BUF and place > begin:
            yield lines[begin:place]
            begin, size = place, 0
        size += len(line)
    if lines:
        yield lines[begin:]


def _line(call: Call) -> bytes:
    # The clock of durations has no date.
    begun = time.time_ns() - (time.monotonic_ns() - call.begun_ns)
    times = call.times
    entry: dict[str, Any] = {
        "time": datetime.fromtimestamp(begun / 1e9, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "client": call.client or None,
        "method": call.method or None,
        "path": shortened(call.path, _MOST_PATH) or None,
        "status": call.status,
        "reason": call.reason or None,
        "received_bytes": call.received_bytes,
        "sent_bytes": call.sent_bytes,
        "duration_us": _microseconds(call.ended_ns - call.begun_ns),
    }
    if call.model:
        entry |= {
            "model": shortened(call.model, _MOST_ID),
            "version": shortened(call.version, _MOST_ID) or None,
            "step": call.step,
            "id": shortened(call.request_id, _MOST_ID) or None,
            "records": call.num_records,
            "queue_us": None if times is None else _microseconds(times.queue),
            "workflow_us": None if times is None else _microseconds(times.compute_input),
            "infer_us": None if times is None else _microseconds(times.compute_infer),
        }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _microseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e3, 1)
