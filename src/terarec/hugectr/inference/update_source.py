# SPDX-License-Identifier: Apache-2.0
"""`UpdateSource`: rows of a queue of Kafka, which HugeCTR's trainer fills, for the tables of a parameter server."""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from terarec.errors import FormatError, TerarecError
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.objects import UpdateSourceParams
from terarec.hugectr.update_messages import UpdatedRows, broker_list, decode_message, topic_of
from terarec.ps import ParameterServer
from terarec.ps.table import last_places
from terarec.repeating import Backoff, Repeating
from terarec.serve.update_streams import kafka_library
from terarec.spec import ServedModelSpec

_LOGGER = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 10.0
_MOST_MESSAGES = 1000
_NO_KEYS = torch.empty(0, dtype=torch.int64)
_Place = tuple[str, int]  # a topic and a partition


class _Table(NamedTuple):
    model: str
    name: str
    width: int


class UpdateSource(Repeating):
    """Rows of a queue, which a thread sets in the tiers and caches of a parameter server as they come.

    All messages that the broker still has are read from the first on, so that a server that was started again or whose
    rows are in memory has what was sent before. HugeCTR continues where a server of the same host had stopped. The
    messages that are there are applied before this returns, if the broker answers. A table that takes no rows is tried
    again, and its topic is read no further until then; the others go on. The thread ends with the server.

    Attributes:
        num_rows: Rows that were applied.
        num_skipped: Messages of another layout or width, which are skipped.

    `filters` are patterns of topics ``hps_et.MODEL.TABLE`` or names of models; tables that match none get no rows.

    Raises:
        MissingDependencyError: The client is not installed.
        WrongInputError: A pattern that is none.
    """

    def __init__(
        self,
        server: ParameterServer,
        params: UpdateSourceParams,
        models: Sequence[ServedModelSpec],
        filters: Sequence[str],
    ) -> None:
        # The thread must not keep a server alive that nobody uses any more.
        self._server = weakref.ref(server)
        self._params = params
        self._tables = {
            topic_of(model.name, table.name): _Table(model.name, table.name, table.width)
            for model in models
            for table in model.tables
            if _passes(filters, model.name, topic_of(model.name, table.name))
        }
        self.num_rows = self.num_skipped = 0
        self._library = kafka_library()
        self._consumer = self._library.Consumer(
            {
                "bootstrap.servers": broker_list(params.brokers),
                "group.id": "terarec",  # which the client requires; no offsets are kept there
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        self._waiting: dict[str, list[UpdatedRows]] = {}  # rows that were read and not applied yet, of each topic
        self._failed: dict[str, Backoff] = {}  # topics of `_waiting` whose table took no rows; they are paused
        self._ends: dict[_Place, bool] = {}  # partitions that are read, and whether their end was seen
        self._refreshed = -np.inf
        self._logged: set[tuple[str, str]] = set()  # topics and problems
        self._catch_up()
        super().__init__("terarec-update-source", 0.0)

    def poll(self) -> int:
        """Apply the next rows; return their number. What cannot be applied is tried again by the next call."""
        server = self._server()
        if server is None or not server.versions:  # nobody uses it, or it is closed
            self._is_closed.set()
            self._consumer.close()
            return 0
        try:
            self._find_topics()
            if not self._ends:
                self._is_closed.wait(0.001 * self._params.poll_timeout_ms)  # no topic is there
            else:
                self._read(0.001 * self._params.poll_timeout_ms)
            return self._apply(server)
        except Exception as error:  # the thread calls again at once
            is_kafka = isinstance(error, self._library.KafkaException)
            self._log_once("", f"{error.args[0].str() if is_kafka else _problem(error)}; it is tried again")
            self._is_closed.wait(0.001 * self._params.failure_backoff_ms)
            return 0

    def _catch_up(self) -> None:
        """Apply the messages that are there; leave the rest to the thread where the broker does not answer in time."""
        server = self._server()
        assert server is not None
        try:
            self._find_topics()
            last = time.monotonic()
            while time.monotonic() < last + _TIMEOUT_SECONDS and not all(
                is_read or topic in self._failed for (topic, _), is_read in self._ends.items()
            ):
                if self._read(0.001 * self._params.poll_timeout_ms):
                    last = time.monotonic()
                self._apply(server)
        except self._library.KafkaException as error:
            self._log_once("", f"{error.args[0].str()}; it is tried again")

    def _find_topics(self) -> None:
        """Read the topics of the tables that are there, also those that came since the last call, from their start."""
        now = time.monotonic()
        if now < self._refreshed + 0.001 * self._params.metadata_refresh_interval_ms:
            return
        topics = self._consumer.list_topics(timeout=_TIMEOUT_SECONDS).topics
        places = [(name, number) for name in self._tables if name in topics for number in topics[name].partitions]
        new = [place for place in places if place not in self._ends]
        if new:
            start = self._library.OFFSET_BEGINNING
            self._consumer.incremental_assign([self._library.TopicPartition(*place, start) for place in new])
            self._ends.update(dict.fromkeys(new, False))
        self._refreshed = now

    def _read(self, timeout: float) -> int:
        """Read messages; return how many there were, ends of partitions among them."""
        messages = self._consumer.consume(_MOST_MESSAGES, timeout)
        for message in messages:
            error, topic = message.error(), message.topic()
            if error is None:
                self._take(topic, message)
            elif error.code() == self._library.KafkaError._PARTITION_EOF:
                self._ends[topic, message.partition()] = True
            else:
                self._log_once(topic or "", f"{error.str()}; it is tried again")
        return len(messages)

    def _take(self, topic: str, message: Any) -> None:
        if message.value() is None:  # a removed message
            return
        try:
            if message.key():
                raise FormatError("message", f"has a key of {len(message.key())} bytes, expected none")
            rows = decode_message(message.value(), self._tables[topic].width)
        except FormatError as error:
            self.num_skipped += 1
            self._log_once(topic, f"offset {message.offset()}: {error}; such messages are skipped")
            return
        if len(rows.keys):
            self._waiting.setdefault(topic, []).append(rows)

    def _apply(self, server: ParameterServer) -> int:
        """Set the rows that were read, except those of topics that rest after a failure; return their number."""
        num_rows = 0
        for topic in [topic for topic in self._waiting if topic not in self._failed or self._failed[topic].is_due]:
            places = [self._library.TopicPartition(*place) for place in self._ends if place[0] == topic]
            try:
                num_rows += self._set(server, topic)
            except Exception as error:  # also of a model that is no longer there; other tables take their rows
                first = 0.001 * self._params.failure_backoff_ms
                backoff = self._failed.setdefault(topic, Backoff(first, max(first, _LONGEST_PAUSE_SECONDS)))
                self._consumer.pause(places)  # what waits would grow without a limit
                backoff.fail()
                self._log_once(topic, f"{_problem(error)}; it is tried again")
                continue
            del self._waiting[topic]
            if self._failed.pop(topic, None):
                self._consumer.resume(places)
        return num_rows

    def _set(self, server: ParameterServer, topic: str) -> int:
        """Set the rows that wait of a topic; return their number."""
        keys, vectors = (torch.from_numpy(np.concatenate(part)) for part in zip(*self._waiting[topic], strict=True))
        last = last_places(keys)  # of a key's rows the last is the newest
        if last is not None:
            keys, vectors = keys[last], vectors[last]
        table, most = self._tables[topic], self._params.max_batch_size
        for some, rows in zip(torch.split(keys, most), torch.split(vectors, most), strict=True):
            server.update(table.model, table.name, _NO_KEYS, some, rows)
        self.num_rows += len(keys)
        return len(keys)

    def _log_once(self, topic: str, problem: str) -> None:
        kind = topic, re.sub(r"\d+", "", problem)
        if kind not in self._logged:
            self._logged.add(kind)
            place = f"topic {topic!r}: " if topic else ""
            _LOGGER.warning("update source %s: %s%s", self._params.brokers, place, problem)


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, TerarecError) else repr(error)


def _passes(filters: Sequence[str], model: str, topic: str) -> bool:
    for pattern in filters:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            problem = f"got {pattern!r}, expected a regular expression ({error})"
            raise WrongInputError("update_filters", problem, field="update_filters") from None
        if expression.fullmatch(model) or expression.search(topic):
            return True
    return False
