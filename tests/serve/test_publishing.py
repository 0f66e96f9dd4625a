# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through a stream: a replica that sees no file of the trainer scores as the trainer's model does."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from terarec.checkpoint import directory
from terarec.config.files import load_update_stream
from terarec.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    StorageError,
    TerarecError,
    UnreachableError,
)
from terarec.serve import (
    InferenceClient,
    InferenceSession,
    LiveUpdates,
    RunningServer,
    ServedTables,
    UpdatePublisher,
    UpdateReceiver,
    open_stream,
    publishing,
    serve,
)
from terarec.serve.update_streams import StreamRecord, UpdateStream
from terarec.spec import (
    KafkaTopicSpec,
    ParameterServerSpec,
    RedisSpec,
    RedisStreamSpec,
    ServedTablesSpec,
    ServingSpec,
    to_data,
)
from terarec.spec.serving import UpdateStreamSpec
from tests.cli.conftest import figures, rejected
from tests.cli.test_docs import unnamed
from tests.errors import at
from tests.serve.conftest import TrainedRun
from tests.serve.test_live import Live, assert_as_the_trainer, finished
from tests.serve.update_servers import KINDS, kafka_broker, stream_server
from tests.waiting import PATIENCE, wait_for

__all__ = ["finished"]
TABLES = ServedTables(server=ParameterServerSpec())
# A read of Kafka's end takes 50 ms and an assignment as long, so what polls often is among the long tests there.
POLLS_OFTEN = pytest.mark.parametrize(
    "new_stream", ["redis", pytest.param("kafka", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=KINDS)
def new_stream(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], UpdateStreamSpec]]:
    with stream_server(request.param, tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
def spec(new_stream: Callable[[], UpdateStreamSpec]) -> RedisStreamSpec:
    return new_stream()


@pytest.fixture
def stream(spec: UpdateStreamSpec) -> Iterator[UpdateStream]:
    opened = open_stream(spec)
    yield opened
    opened.close()


@pytest.fixture
def live(finished: Path, tmp_path: Path) -> Live:
    made = Live(finished, tmp_path / "run")
    made.add(2)
    return made


def all_of(stream: UpdateStream) -> list[StreamRecord]:
    found: list[StreamRecord] = []
    while records := stream.read(found[-1].position if found else None):
        found += records
    return found


def test_records_are_read_in_their_order_by_all(stream: UpdateStream, spec: UpdateStreamSpec) -> None:
    contents = [bytes([number]) * (1 + 1000 * number) for number in range(70)]
    assert next(stream.newest_first(), None) is None
    assert stream.read(None) == []
    positions = [position for part in (contents[:20], contents[20:]) for position in stream.append(part)]
    for reader in (stream, open_stream(spec)):
        records = all_of(reader)
        assert [record.content for record in records] == contents
        assert [record.position for record in records] == positions
        assert reader.read(positions[40])[0] == records[41]
        assert reader.read(positions[-1]) == []
        assert list(reader.newest_first()) == contents[::-1]
    stream.append([b"more"])
    assert [record.content for record in stream.read(positions[-1])] == [b"more"]


@pytest.mark.slow
@POLLS_OFTEN
def test_a_replica_follows_a_trainer_through_evictions_and_crashes(
    live: Live, trained: TrainedRun, spec: UpdateStreamSpec, tmp_path: Path
) -> None:
    replica = Live.__new__(Live)
    replica.path = tmp_path / "replica"

    def publish() -> int:  # by a new publisher each time, as after a crash
        opened = open_stream(spec)
        try:
            return UpdatePublisher(live.path, opened, every_seconds=None).poll()
        finally:
            opened.close()

    assert publish() == 1
    assert publish() == 0
    with UpdateReceiver(open_stream(spec), replica.path, every_seconds=None) as receiver:
        assert receiver.wait(PATIENCE)
    with (
        InferenceSession.open(replica.path, tables=TABLES) as session,
        LiveUpdates(session, replica.path, every_seconds=None) as updates,
    ):
        assert_as_the_trainer(session, live, trained, 2)
        for step, steps in ((4, (4,)), (8, (6, 8)), (10, (10,)), (12, (12,))):
            live.add(*steps)
            assert publish() == len(steps)
            # A receiver that starts anew goes on where the one before ended.
            with UpdateReceiver(open_stream(spec), replica.path, every_seconds=None) as receiver:
                assert receiver.poll() == len(steps)
                assert (receiver.statistics().step, receiver.statistics().rejected) == (step, 0)
            assert updates.poll()
            assert_as_the_trainer(session, live, trained, step)
        assert updates.statistics().removed > 0
        assert (updates.statistics().snapshots, updates.statistics().deltas) == (1, 4)


@POLLS_OFTEN
def test_an_unfinished_publication_is_published_again(
    live: Live, trained: TrainedRun, stream: UpdateStream, spec: UpdateStreamSpec, tmp_path: Path
) -> None:
    UpdatePublisher(live.path, stream, every_seconds=None).poll()
    live.add(4)

    class Dies:
        """Fails in the midst of a checkpoint."""

        record_bytes = 2_000

        def __getattr__(self, name: str) -> object:
            return getattr(stream, name)

        def append(self, contents: Sequence[bytes]) -> list[str]:
            stream.append(contents[:5])
            raise StorageError("stream", "gone")

    dying = UpdatePublisher(live.path, Dies(), every_seconds=None)  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        dying.poll()
    assert dying.statistics().failed == 1
    with UpdateReceiver(open_stream(spec), tmp_path / "replica", every_seconds=None) as receiver:
        assert receiver.poll() == 1  # the base alone
        assert UpdatePublisher(live.path, stream, every_seconds=None).poll() == 1
        assert receiver.poll() == 1
        assert receiver.statistics().step == 4
    replica = InferenceSession.open(tmp_path / "replica", tables=TABLES)
    assert_as_the_trainer(replica, live, trained, 4)
    replica.close()


@POLLS_OFTEN
def test_gaps_repeats_and_damage_are_rejected_and_a_base_catches_up(
    live: Live, trained: TrainedRun, new_stream: Callable[[], UpdateStreamSpec], tmp_path: Path
) -> None:
    source, target = open_stream(new_stream()), open_stream(new_stream())
    publisher = UpdatePublisher(live.path, source, every_seconds=None)
    parts = {}
    for step in (2, 4, 6, 10):
        if step > 2:
            live.add(step)
        assert publisher.poll() == 1
        found = [record for record in all_of(source) if json.loads(record.content.partition(b"\n")[0])["step"] == step]
        parts[step] = [record.content for record in found]
    receiver = UpdateReceiver(target, tmp_path / "replica", every_seconds=None)

    def receive(contents: list[bytes]) -> tuple[int, int, int, int]:
        target.append(contents)
        receiver.poll()
        counted = receiver.statistics()
        return counted.step, counted.checkpoints, counted.repeated, counted.rejected

    damaged = [*parts[4]]
    damaged[-2] = damaged[-2][:-1] + bytes([damaged[-2][-1] ^ 1])
    assert receive(parts[2]) == (2, 1, 0, 0)
    assert receive(parts[2]) == (2, 1, 1, 0)
    assert receive(damaged) == (2, 1, 1, 1)
    assert receive(parts[6]) == (2, 1, 1, 2)  # step 4 is missing
    assert receive(parts[4][:3] + parts[4][4:])[:3] == (2, 1, 1)
    rejected = receiver.statistics().rejected
    assert rejected > 2
    assert receive([b"no record"])[3] == rejected
    assert receiver.statistics().foreign == 1
    assert receive([parts[4][0].replace(b'"version": 1', b'"version": 2')])[3] == rejected + 1
    place = b'"file": "checkpoints/step-00000004/'
    assert place in parts[4][0]
    # Outside of the run, or names that the file system does not take: those came again for ever.
    for other in (b"../../checkpoints/", b"checkpoints/step-00000006/", b"other/", b"dataset", place[9:] + b"x" * 300):
        escaping = parts[4][0].replace(place, b'"file": "' + other)
        assert receive([escaping, *parts[4][1:]])[:3] == (2, 1, 1)
    both = [part.replace(place, place + b"a" + b"/b" * number) for number, part in enumerate(parts[4][:2])]
    assert receive(both)[:3] == (2, 1, 1)
    assert receive([parts[4][0].replace(b'"step": 4', b'"step": 4' + b"0" * 300)])[:3] == (2, 1, 1)
    assert not (tmp_path / "checkpoints").exists()
    assert receive(parts[4])[:3] == (4, 2, 1)
    assert receive(parts[10])[:3] == (10, 3, 1)
    assert receiver.statistics().last_error == ""
    receiver.close()
    assert not list((tmp_path / "replica").glob("*.partial"))
    session = InferenceSession.open(tmp_path / "replica", tables=TABLES)
    assert_as_the_trainer(session, live, trained, 10)
    session.close()


FOREIGN = (b"", b"hello", b"[1]", b'{"format": "another"}', b"\x80" * 9, b"[" * 5_000)


@POLLS_OFTEN
def test_records_of_others_are_passed_over(
    live: Live, trained: TrainedRun, new_stream: Callable[[], UpdateStreamSpec], tmp_path: Path
) -> None:
    """Finding L5: one such record stopped publisher and receiver for good."""
    source, target = open_stream(new_stream()), open_stream(new_stream())
    publisher = UpdatePublisher(live.path, source, every_seconds=None)
    source.append(FOREIGN)
    assert publisher.poll() == 1
    source.append([b"hello"] * 50)
    live.add(4)
    assert publisher.poll() == 1
    assert publisher.statistics().foreign == 50
    receiver = UpdateReceiver(target, tmp_path / "replica", every_seconds=None)
    contents = [record.content for record in all_of(source)]
    for number, content in enumerate(contents):  # between the records of one checkpoint, too
        target.append([content, FOREIGN[number % len(FOREIGN)]])
    receiver.poll()
    counted = receiver.statistics()
    assert (counted.step, counted.checkpoints) == (4, 2)
    assert counted.foreign == len(contents) + sum(content in FOREIGN for content in contents)
    receiver.close()
    session = InferenceSession.open(tmp_path / "replica", tables=TABLES)
    assert_as_the_trainer(session, live, trained, 4)
    session.close()


class Backlog:
    """A stream of small records that has no end within a test."""

    record_bytes = 2_000

    def read(self, after: str | None) -> list[StreamRecord]:
        time.sleep(0.01)
        return [StreamRecord(str(int(after or 0) + number), b"{}") for number in (1, 2)]


@pytest.mark.parametrize("every_seconds", [None, 0.01])
def test_a_receiver_that_catches_up_stops(tmp_path: Path, every_seconds: float | None) -> None:
    """It read the whole backlog first, in `wait` as in `close`."""
    receiver = UpdateReceiver(Backlog(), tmp_path, every_seconds=every_seconds)  # type: ignore[arg-type]
    waited: list[bool] = []
    waiting = threading.Thread(target=lambda: waited.append(receiver.wait(0.1)), daemon=True)
    polling = threading.Thread(target=receiver.poll, daemon=True)
    closing = threading.Thread(target=receiver.close, daemon=True)
    for thread, others in ((waiting, ()), (closing, (polling,))):
        for started in (*others, thread):
            started.start()
        for ended in (*others, thread):
            ended.join(PATIENCE)
            assert not ended.is_alive()
    assert waited == [False]
    UpdateReceiver(Backlog(), tmp_path, every_seconds=None).close()  # type: ignore[arg-type]  # the directory is free


def test_a_receiver_is_ready_at_the_first_checkpoint_of_a_backlog(live: Live, tmp_path: Path) -> None:
    class Recorded(Backlog):
        """A checkpoint, then records without an end."""

        def __init__(self) -> None:
            self.contents: list[bytes] = []

        def newest_first(self) -> Iterator[bytes]:
            return iter(())

        def append(self, contents: Sequence[bytes]) -> list[str]:
            self.contents += contents
            return ["1"] * len(contents)

        def trim(self, before: str) -> None:
            pass

        def read(self, after: str | None) -> list[StreamRecord]:
            count = int(after or 0)
            return [
                StreamRecord(str(number + 1), self.contents[number]) for number in range(count, len(self.contents))
            ] or super().read(after)

    recorded = Recorded()
    assert UpdatePublisher(live.path, recorded, every_seconds=None).poll() == 1
    for every_seconds in (None, 0.01):
        receiver = UpdateReceiver(recorded, tmp_path / str(every_seconds), every_seconds=every_seconds)
        waiting = threading.Thread(target=receiver.wait, args=(float("inf"),), daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert receiver.statistics().step == 2
        receiver.close()


def test_a_directory_has_one_receiver(tmp_path: Path) -> None:
    """Two of them rejected each other's checkpoints."""

    def receiver() -> UpdateReceiver:
        stream = open_stream(RedisStreamSpec(server=RedisSpec(address="127.0.0.1:1"), stream="s"))
        return UpdateReceiver(stream, tmp_path / "replica", every_seconds=None)

    with receiver(), pytest.raises(StorageError, check=at(str(tmp_path / "replica"))):
        receiver()
    receiver().close()


@POLLS_OFTEN
def test_a_checkpoint_that_cannot_be_written_is_received_again(
    live: Live, stream: UpdateStream, spec: UpdateStreamSpec, tmp_path: Path
) -> None:
    UpdatePublisher(live.path, stream, every_seconds=None).poll()
    in_the_way = tmp_path / "replica" / "received.partial"
    in_the_way.parent.mkdir()
    in_the_way.touch()
    with UpdateReceiver(open_stream(spec), tmp_path / "replica", every_seconds=None) as receiver:
        for _ in range(2):
            with pytest.raises(ConfigError, check=at(str(in_the_way))):
                receiver.poll()
        in_the_way.unlink()
        assert receiver.poll() == 1
        assert (receiver.statistics().step, receiver.statistics().rejected) == (2, 0)


@POLLS_OFTEN
def test_both_in_the_background(live: Live, trained: TrainedRun, spec: UpdateStreamSpec, tmp_path: Path) -> None:
    with (
        UpdatePublisher(live.path, open_stream(spec), every_seconds=0.02),
        UpdateReceiver(open_stream(spec), tmp_path / "replica", every_seconds=0.02) as receiver,
    ):
        assert receiver.wait(PATIENCE)
        live.add(4)
        with (
            InferenceSession.open(tmp_path / "replica", 2, tables=TABLES) as session,
            LiveUpdates(session, tmp_path / "replica", every_seconds=0.02),
        ):
            wait_for(lambda: session.step == 4)
            assert_as_the_trainer(session, live, trained, 4)


def test_the_command_line_publishes_and_a_server_receives(
    live: Live, trained: TrainedRun, new_stream: Callable[[], UpdateStreamSpec], tmp_path: Path
) -> None:
    spec = new_stream()
    (tmp_path / "stream.json").write_text(json.dumps(to_data(spec)))
    reported = figures("publish", live.path, "--to", tmp_path / "stream.json", "--once")
    assert (reported["step"], reported["checkpoints"]) == (2, 1)
    assert unnamed(reported, "publish") == set()
    found: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(server: RunningServer) -> None:
        found.append(server)
        is_ready.set()

    serving = ServingSpec(port=0, tables=ServedTablesSpec())
    thread = threading.Thread(
        target=serve, args=(tmp_path / "replica", serving, ready), kwargs={"stream": spec}, daemon=True
    )
    thread.start()
    try:
        assert is_ready.wait(timeout=PATIENCE)
        client, records = InferenceClient(found[0].url), trained.records(0, 20)
        live.add(4)
        assert figures("publish", live.path, "--to", tmp_path / "stream.json", "--once")["step"] == 4
        expected = InferenceSession.open(live.path, 4).predict(records)
        wait_for(lambda: bool((client.infer(records)["score"] == expected).all()))
    finally:
        for server in found:
            server.stop()
        thread.join(timeout=PATIENCE)
    with pytest.raises(ConfigError, check=at("ServingSpec.tables")):
        serve(live.path, ServingSpec(port=0), stream=spec)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_with_its_figures(
    live: Live, stream: UpdateStream, spec: UpdateStreamSpec, tmp_path: Path, number: signal.Signals
) -> None:
    """It ended as a failure, which a service manager starts again, and without figures."""
    (tmp_path / "stream.json").write_text(json.dumps(to_data(spec)))

    def stop() -> None:
        wait_for(lambda: next(stream.newest_first(), None) is not None)  # from then on it handles signals
        os.kill(os.getpid(), number)

    stopping = threading.Thread(target=stop)
    stopping.start()
    reported = figures("publish", live.path, "--to", tmp_path / "stream.json", "--every-seconds", 600)
    stopping.join()
    assert (reported["step"], reported["failed"], reported["last_error"]) == (2, 0, "")


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_command_goes_on_after_errors_that_pass(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """It tried again for ever what does not pass: a damaged record, or a run that was removed."""
    pytest.importorskip("redis")
    polls: list[Exception | None] = [None, StorageError("stream", "full"), ConnectionResetError("gone"), None]
    polls.append(FormatError("stream", "damaged"))

    def poll(publisher: UpdatePublisher) -> int:
        if len(polls) == 2 and is_gone:
            live.path.rename(tmp_path / "moved")
        if (error := polls.pop(0)) is not None:
            raise error
        return 0

    monkeypatch.setattr(UpdatePublisher, "poll", poll)
    command = ("publish", live.path, "--to", "redis://127.0.0.1:1/stream", "--every-seconds", 0.01)
    if is_gone:
        rejected(*command, error=DataNotFoundError, where=live.path)
    else:
        rejected(*command, error=FormatError, where="stream", problem="damaged")
    assert len(polls) == is_gone


def test_a_checkpoint_that_the_trainer_removes_meanwhile(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: UpdateStream
) -> None:
    """Also at the only poll of --once: what was read was no longer there, and a newer one is."""
    read: list[Path] = []

    def read_chain(path: Path) -> object:
        read.append(path)
        if len(read) == 1:
            live.add(4)
        if len(read) in (1, 3):
            raise DataNotFoundError(path, "no such file")
        return directory.read_chain(path)

    monkeypatch.setattr(publishing, "read_chain", read_chain)
    publisher = UpdatePublisher(live.path, stream, every_seconds=None)
    assert publisher.poll() == 2
    assert [path.name for path in read] == ["step-00000002", "step-00000004"]
    with pytest.raises(DataNotFoundError):
        publisher.poll()


def test_a_stream_that_is_gone_is_left_to_the_next_poll(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer has written a checkpoint meanwhile, each time."""

    class Gone:
        calls = 0

        def newest_first(self) -> object:
            self.calls += 1
            live.add(2 + 2 * self.calls)
            raise UnreachableError("redis", "did not answer")

    stream = Gone()
    publisher = UpdatePublisher(live.path, stream, every_seconds=None)  # type: ignore[arg-type]
    with pytest.raises(UnreachableError):
        publisher.poll()
    assert (stream.calls, publisher.statistics().failed) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_gone(kind: str) -> None:
    pytest.importorskip({"redis": "redis", "kafka": "confluent_kafka"}[kind])
    specs: dict[str, UpdateStreamSpec] = {
        "redis": RedisStreamSpec(server=RedisSpec(address="127.0.0.1:1")),
        "kafka": KafkaTopicSpec(brokers="127.0.0.1:1", timeout_seconds=0.2),
    }
    stream = open_stream(specs[kind])
    for action in (lambda: stream.append([b"a"]), lambda: next(stream.newest_first()), lambda: stream.read(None)):
        with pytest.raises(StorageError) as caught:
            action()
        assert "\n" not in str(caught.value)
        assert "127.0.0.1:1" in str(caught.value)
    stream.close()


@pytest.mark.slow
def test_a_broker_that_is_killed_and_forgets_its_topics(live: Live, trained: TrainedRun, tmp_path: Path) -> None:
    with kafka_broker() as broker:
        spec = broker.spec("updates", timeout_seconds=2.0)
        source, target = open_stream(spec), open_stream(spec)
        publisher = UpdatePublisher(live.path, source, every_seconds=None)
        receiver = UpdateReceiver(target, tmp_path / "replica", every_seconds=None)
        assert (publisher.poll(), receiver.poll()) == (1, 1)
        live.add(4)
        assert (publisher.poll(), receiver.poll()) == (1, 1)
        with InferenceSession.open(tmp_path / "replica", tables=TABLES) as session:
            broker.kill()
            live.add(6)
            for follower in (publisher, receiver):
                with pytest.raises(StorageError):
                    follower.poll()
            assert_as_the_trainer(session, live, trained, 4)
            broker.start()  # without its records, so that the base comes anew
            for follower in (publisher, receiver):
                for _ in range(20):
                    if follower.statistics().step == 6:
                        break
                    with contextlib.suppress(StorageError):
                        follower.poll()
                assert follower.statistics().step == 6
            with LiveUpdates(session, tmp_path / "replica", every_seconds=None) as updates:
                assert updates.poll()
                assert_as_the_trainer(session, live, trained, 6)
        receiver.close()
        for stream in (source, target):
            stream.close()


def test_a_topic_that_does_not_exist_is_named_to_readers_and_made_by_the_first_record() -> None:
    with kafka_broker() as broker:
        spec = broker.spec("clicks", timeout_seconds=5.0)
        stream = open_stream(spec)
        with pytest.raises(StorageError, check=at(f"kafka {spec.brokers}", "no topic 'clicks'")):
            stream.read(None)
        assert next(stream.newest_first(), None) is None
        stream.append([b"first"])
        assert list(stream.newest_first()) == [b"first"]
        stream.close()


@pytest.mark.slow  # a broker of its own
def test_a_topic_of_several_partitions_is_used_in_its_first() -> None:
    with kafka_broker() as broker:
        stream = open_stream(broker.spec(broker.create("clicks", partitions=3)))
        contents = [b"%d" % number for number in range(40)]
        stream.append(contents)
        found = stream.read(None)
        while len(found) < len(contents):
            found += stream.read(found[-1].position)
        assert [record.content for record in found] == contents
        stream.close()


def test_a_record_above_the_largest_message_of_kafka_is_rejected() -> None:
    pytest.importorskip("confluent_kafka")
    stream = open_stream(KafkaTopicSpec(brokers="127.0.0.1:1", record_bytes=1000, timeout_seconds=0.2))
    with pytest.raises(StorageError, check=at("kafka 127.0.0.1:1", "too large")):
        stream.append([bytes(100_000)])
    stream.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("kafka://a:9092,b:9093/clicks", KafkaTopicSpec(brokers="a:9092,b:9093", topic="clicks")),
        ("redis://10.0.0.5:6379/clicks", RedisStreamSpec(server=RedisSpec(address="10.0.0.5:6379"), stream="clicks")),
    ],
)
def test_streams_by_url_and_file(source: str, expected: UpdateStreamSpec, tmp_path: Path) -> None:
    assert load_update_stream(source) == expected
    (tmp_path / "stream.json").write_text(json.dumps(to_data(expected)))
    assert load_update_stream(tmp_path / "stream.json") == expected


@pytest.mark.parametrize("source", ["kafka://a:9092", "kafka://a/b", "kafka://a:1/b/c", "http://a:1/b", "redis://a:1/"])
def test_urls_of_no_stream(source: str) -> None:
    with pytest.raises(ConfigError, check=at(source)):
        load_update_stream(source)


@pytest.mark.parametrize(
    ("where", "make"),
    [
        ("RedisStreamSpec.stream", lambda: RedisStreamSpec(stream="a b")),
        ("RedisStreamSpec.record_bytes", lambda: RedisStreamSpec(record_bytes=0)),
        ("KafkaTopicSpec.topic", lambda: KafkaTopicSpec(topic="")),
        ("KafkaTopicSpec.brokers", lambda: KafkaTopicSpec(brokers="localhost")),
        ("KafkaTopicSpec.record_bytes", lambda: KafkaTopicSpec(record_bytes=0)),
        ("KafkaTopicSpec.timeout_seconds", lambda: KafkaTopicSpec(timeout_seconds=0.0)),
    ],
)
def test_specs_are_checked(where: str, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, check=at(where)):
        make()


@pytest.mark.parametrize(
    "content",
    [
        "# of the client\nsecurity.protocol=SASL_SSL\n\nsasl.mechanism = PLAIN\nsasl.password=a=b\n",
        '{"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.password": "a=b"}',
    ],
)
def test_settings_of_a_kafka_client_reach_it(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    path = tmp_path / "client"
    path.write_text(content)
    given: list[dict[str, object]] = []
    monkeypatch.setattr(library, "Producer", lambda settings, logger: given.append(settings))
    open_stream(load_update_stream("kafka://127.0.0.1:1/t", path)).close()
    expected = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.password": "a=b"}
    assert given
    assert given[0].items() >= (expected | {"bootstrap.servers": "127.0.0.1:1"}).items()


@pytest.mark.parametrize(
    ("content", "error", "where"),
    [
        ("security.protocol=s3cret", ConfigError, ""),
        ("sasl.passwort=s3cret", ConfigError, ""),
        ("security.protocol=SSL\nssl.ca.location=/s3cret/none.pem", ConfigError, ""),
        ("sasl.password s3cret", FormatError, ":1"),
        ("sasl.password=s3cret\n\nsasl.password = s3cret", FormatError, ":3"),
        ("\ngroup.id=s3cret", ConfigError, ": group.id"),
        ("bootstrap.servers=s3cret:1", ConfigError, ": bootstrap.servers"),
        ('{"sasl.password": ["s3cret"]}', FormatError, ": sasl.password"),
        ('{"sasl.password": "s3cret"', FormatError, ""),
    ],
)
def test_wrong_settings_of_a_kafka_client_are_rejected_at_once(
    content: str, error: type[TerarecError], where: str, tmp_path: Path
) -> None:
    pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    path = tmp_path / "client"
    path.write_text(content)
    with pytest.raises(error, check=at(f"{path}{where}")) as rejected:
        open_stream(KafkaTopicSpec(client_file=str(path)))
    assert "s3cret" not in str(rejected.value)
    assert rejected.value.__cause__ is None


def test_settings_of_a_kafka_client_that_are_missing_or_of_no_use(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    with pytest.raises(DataNotFoundError):
        open_stream(KafkaTopicSpec(client_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, check=at("client_file")):
        load_update_stream("redis://127.0.0.1:1/t", tmp_path / "none")
