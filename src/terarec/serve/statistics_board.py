# SPDX-License-Identifier: Apache-2.0
"""`StatisticsBoard`: the counters of models in several processes, in memory that they share."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from typing_extensions import override

from terarec.repeating import Repeating
from terarec.serve import drift_counts
from terarec.serve.drift_counts import DriftCounts
from terarec.serve.metric_samples import MetricSamples
from terarec.serve.statistics import ModelCounters, ModelStatistics

_LOGGER = logging.getLogger(__name__)

Content = TypeVar("Content")
Item = TypeVar("Item")

_SLOT_BYTES = 2**20
"""Memory of a process's counters; pages that nobody writes take none. A size of batches takes about 70 bytes."""

_SAMPLE_BYTES = 2**22
"""Memory of its other metrics, of about 100 bytes each."""

_DRIFT_BYTES = 2**22
"""Memory of what it has counted of its records: about 300 bytes for each column of a version."""

_HEAD, _CHANGES = struct.Struct("<QQQ"), struct.Struct("<Q")
"""Number of changes of a slot, whose last bit says which half has its text, and the lengths of the texts in both."""

_EVERY_SECONDS = 0.5
_TRIES = 1000


class _Slots(Generic[Content]):
    """Contents of processes, in memory that they share.

    Made before the processes are forked. Each slot has one writer, which writes to the half that nobody reads: one that
    is killed meanwhile leaves the text before. Readers take no lock: they read a slot again that changed meanwhile.

    Args:
        count: Number of slots.
        num_bytes: Memory of a text; of each slot twice that.
        parse: Function that returns the content of a text; it raises ValueError for a text that is not whole.
    """

    def __init__(self, count: int, num_bytes: int, parse: Callable[[bytes], Content]) -> None:
        self.room = num_bytes
        self._num_bytes = _HEAD.size + 2 * num_bytes
        self._parse = parse
        self._memory = mmap.mmap(-1, self._num_bytes * count)

    def write(self, index: int, text: bytes) -> None:
        """Replace the text of a slot, of at most `room` bytes."""
        begin = index * self._num_bytes
        changes = _CHANGES.unpack_from(self._memory, begin)[0] + 1
        half = changes % 2
        at = begin + _HEAD.size + half * self.room
        self._memory[at : at + len(text)] = text
        _CHANGES.pack_into(self._memory, begin + (1 + half) * _CHANGES.size, len(text))
        _CHANGES.pack_into(self._memory, begin, changes)

    def write_last(self, index: int, items: Sequence[Item], encode: Callable[[Sequence[Item]], bytes]) -> None:
        """Replace the text of a slot by that of items; where there is no room for all, the first ones go."""
        text = encode(items)
        while len(text) > self.room:
            items = items[1 + len(items) // 8 :]
            text = encode(items)
        self.write(index, text)

    def read(self, index: int) -> Content:
        """Return the content of a slot; that of no text before it is written."""
        begin = index * self._num_bytes
        for _ in range(_TRIES):
            changes, *lengths = _HEAD.unpack_from(self._memory, begin)
            half = changes % 2
            at = begin + _HEAD.size + half * self.room
            text = self._memory[at : at + min(lengths[half], self.room)]
            if _CHANGES.unpack_from(self._memory, begin)[0] == changes:
                # Processors may show a head before the text that was written before it.
                with contextlib.suppress(ValueError):
                    return self._parse(text)
            time.sleep(0)
        return self._parse(b"")


class StatisticsBoard:
    """Counters of the workers of a server by model, their other metrics, and counts of their records.

    Made before the workers are forked. The writer of a slot is its worker, or the process that started the workers
    while there is none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # The last slots are of workers that have ended.
        self._slots = _Slots(count + 1, _SLOT_BYTES, _models)
        self._samples = _Slots(count + 1, _SAMPLE_BYTES, MetricSamples.of_json)
        self._drift = _Slots(count, _DRIFT_BYTES, drift_counts.of_json)

    def write(self, index: int, models: Mapping[str, ModelStatistics]) -> None:
        """Replace the counters of worker `index`; where there is no room for all, those of the first models go."""
        text = _text(models)
        if len(text) <= self._slots.room:
            self._slots.write(index, text)
            return
        # It has thousands of sizes of batches, or hundreds of versions.
        shorter = [(name, statistics.without_batches()) for name, statistics in models.items()]
        self._slots.write_last(index, shorter, lambda some: _text(dict(some)))

    def read(self, index: int) -> dict[str, ModelStatistics]:
        """Return the counters of worker `index`; none before it has written any."""
        return self._slots.read(index)

    def write_samples(self, index: int, samples: MetricSamples) -> None:
        """Replace the other metrics of worker `index`; where there is no room for all, by none."""
        text = samples.to_json()
        if len(text) > self._samples.room:
            _LOGGER.warning("worker %d has %d bytes of metrics, which are not those of the others", index, len(text))
            text = b""
        self._samples.write(index, text)

    def other_samples(self, index: int) -> MetricSamples:
        """Return the other metrics of all workers but `index`, and the counters of those that have ended."""
        total = MetricSamples()
        for other in range(self._count + 1):
            if other != index:
                total.merge(self._samples.read(other))
        return total

    def write_drift(self, index: int, counts: Sequence[DriftCounts]) -> None:
        """Replace what worker `index` has counted of its records; where there is no room for all, the first go."""
        self._drift.write_last(index, counts, drift_counts.to_json)

    def other_drift(self, index: int) -> list[DriftCounts]:
        """Return what all workers but `index` have counted of their last records."""
        return [each for other in range(self._count) if other != index for each in self._drift.read(other)]

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
        samples = self._samples.read(self._count)
        samples.merge(self._samples.read(index), only_counters=True)
        self.write_samples(self._count, samples)
        self._samples.write(index, b"")
        self._drift.write(index, b"")


def _text(models: Mapping[str, ModelStatistics]) -> bytes:
    return json.dumps({name: statistics.to_json().decode() for name, statistics in models.items()}).encode()


def _models(text: bytes) -> dict[str, ModelStatistics]:
    return {name: ModelStatistics.of_json(of_model) for name, of_model in json.loads(text or b"{}").items()}


class WorkerStatistics(ModelCounters, Repeating):
    """Counters of a worker, which it writes to a board twice a second, and when it is closed.

    Attributes:
        index: Number of the worker.
        samples: Function that returns its other metrics, which go there as well; None while there are none.
        drift: Function that returns what it has counted of its last records, likewise.
    """

    def __init__(self, board: StatisticsBoard, index: int) -> None:
        ModelCounters.__init__(self)
        self.index = index
        self.samples: Callable[[], MetricSamples] | None = None
        self.drift: Callable[[], Sequence[DriftCounts]] | None = None
        self._written: Sequence[DriftCounts] = ()
        self._board = board
        self._writing = threading.Lock()  # the thread and `close` may write at once
        Repeating.__init__(self, "terarec-statistics", _EVERY_SECONDS)

    @override
    def others(self, model: str) -> ModelStatistics:
        # Also of workers that have ended.
        return self._board.others(self.index, model)

    def other_samples(self) -> MetricSamples:
        """Return the other metrics of the other workers."""
        return self._board.other_samples(self.index)

    def other_drift(self) -> list[DriftCounts]:
        """Return what the other workers have counted of their last records."""
        return self._board.other_drift(self.index)

    @override
    def poll(self) -> int:
        with self._writing:
            self._board.write(self.index, self.read())
            samples = self.samples
            if samples is not None:
                self._board.write_samples(self.index, samples())
            drift = self.drift
            if drift is not None and (counts := drift()) != self._written:  # which changes every ten seconds
                self._board.write_drift(self.index, counts)
                self._written = counts
        return 1

    @override
    def close(self) -> None:
        super().close()
        self.poll()
