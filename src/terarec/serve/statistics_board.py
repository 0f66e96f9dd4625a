# SPDX-License-Identifier: Apache-2.0
"""`StatisticsBoard`: the counters of models in several processes, in memory that they share."""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
import threading
import time
from collections.abc import Mapping

from typing_extensions import override

from terarec.serve.repeating import Repeating
from terarec.serve.statistics import ModelCounters, ModelStatistics

_SLOT_BYTES = 2**20
"""Memory of a process's counters; pages that nobody writes take none. A size of batches takes about 70 bytes."""

_HEAD = struct.Struct("<QQ")
"""Number of changes of a slot, odd while it changes, and the length of its text."""

_EVERY_SECONDS = 0.5
_TRIES = 1000


class StatisticsBoard:
    """Counters of the workers of a server by model, which each of them can add up.

    Made before the workers are forked. Each slot has one writer: its worker, or the process that started the workers
    while there is none. Readers take no lock: they read a slot again that changed meanwhile.

    Args:
        count: Number of workers.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # The last slot is of workers that have ended.
        self._memory = mmap.mmap(-1, _SLOT_BYTES * (count + 1))

    def write(self, index: int, models: Mapping[str, ModelStatistics]) -> None:
        """Replace the counters of worker `index`; where there is no room for all, those of the first models go."""
        text = _text(models)
        if len(text) > _SLOT_BYTES - _HEAD.size:  # of thousands of sizes of batches
            models = {name: statistics.without_batches() for name, statistics in models.items()}
            text = _text(models)
        while len(text) > _SLOT_BYTES - _HEAD.size:  # of hundreds of versions
            models = dict(list(models.items())[1 + len(models) // 8 :])
            text = _text(models)
        begin = index * _SLOT_BYTES
        changes, _ = _HEAD.unpack_from(self._memory, begin)
        # A worker that was killed while it wrote may have left an odd number.
        changes += 1 + changes % 2
        _HEAD.pack_into(self._memory, begin, changes, len(text))
        self._memory[begin + _HEAD.size : begin + _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, begin, changes + 1, len(text))

    def read(self, index: int) -> dict[str, ModelStatistics]:
        """Return the counters of worker `index`; none while it writes, and before it has written any."""
        begin = index * _SLOT_BYTES
        for _ in range(_TRIES):
            changes, length = _HEAD.unpack_from(self._memory, begin)
            text = self._memory[begin + _HEAD.size : begin + _HEAD.size + min(length, _SLOT_BYTES - _HEAD.size)]
            if changes % 2 == 0 and _HEAD.unpack_from(self._memory, begin) == (changes, length):
                # Processors may show a head before the text that was written before it.
                with contextlib.suppress(ValueError):
                    return _models(text)
            time.sleep(0)
        return {}

    def others(self, index: int, model: str) -> ModelStatistics:
        """Return the sums of a model's counters in all workers but `index`, with those that have ended."""
        total = ModelStatistics()
        for other in range(self._count + 1):
            if other != index:
                total = total.plus(self.read(other).get(model, ModelStatistics()))
        return total

    def bury(self, index: int) -> None:
        """Keep the counters of a worker that has ended among those of former ones."""
        former = self.read(self._count)
        for model, statistics in self.read(index).items():
            # Last, so that models that have been gone for longest are dropped first.
            former[model] = former.pop(model, ModelStatistics()).plus(statistics)
        self.write(self._count, former)
        self.write(index, {})


def _text(models: Mapping[str, ModelStatistics]) -> bytes:
    return json.dumps({name: statistics.to_json().decode() for name, statistics in models.items()}).encode()


def _models(text: bytes) -> dict[str, ModelStatistics]:
    return {name: ModelStatistics.of_json(of_model) for name, of_model in json.loads(text or b"{}").items()}


class WorkerStatistics(ModelCounters, Repeating):
    """Counters of a worker, which it writes to a board twice a second, and when it is closed.

    Attributes:
        index: Number of the worker.

    Args:
        board: The board.
        index: Number of the worker.
    """

    def __init__(self, board: StatisticsBoard, index: int) -> None:
        ModelCounters.__init__(self)
        self.index = index
        self._board = board
        self._writing = threading.Lock()  # the thread and `close` may write at once
        Repeating.__init__(self, "terarec-statistics", _EVERY_SECONDS)

    @override
    def others(self, model: str) -> ModelStatistics:
        # Also of workers that have ended.
        return self._board.others(self.index, model)

    @override
    def poll(self) -> int:
        with self._writing:
            self._board.write(self.index, self.read())
        return 1

    @override
    def close(self) -> None:
        super().close()
        self.poll()
