# SPDX-License-Identifier: Apache-2.0
"""Several processes on one address: one copy of the tables, workers that are killed, errors, and the end."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.closer import Closer
from terarec.errors import ConfigError
from terarec.serve import InferenceClient, InferenceError, InferenceSession, serve
from terarec.serve.repository import ModelRepository
from terarec.serve.workers import STOP_SECONDS, WorkerContext, Workers
from terarec.spec import DLRMSpec, RunSpec, ServingSpec, TrainingSpec
from terarec.spec.serving_repository import PromotionSpec, RepositorySpec
from terarec.train.run import build
from tests.errors import at
from tests.processes import Python
from tests.serve.conftest import TrainedRun
from tests.serve.http.test_api_routes import tensors
from tests.serve.http.test_limits import infer_bytes
from tests.waiting import PATIENCE, wait_for, wait_until_refused

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PROGRAM = """
import sys
from pathlib import Path
from terarec.serve import serve
from terarec.spec import ServingSpec
spec = ServingSpec(name="dlrm", port=0, workers=int(sys.argv[2]), drain_seconds=float(sys.argv[3]))
serve(Path(sys.argv[1]), spec, lambda server: print(server.port, flush=True))
print("stopped", flush=True)
"""


@contextlib.contextmanager
def url_of(run: Path, workers: int, drain_seconds: float = 0.0) -> Iterator[tuple[Python, str]]:
    process = Python(PROGRAM, run, workers, drain_seconds)
    try:
        yield process, f"http://127.0.0.1:{process.read_line()}"
    finally:
        process.close()


@contextlib.contextmanager
def server_of(run: Path, workers: int) -> Iterator[tuple[Python, InferenceClient]]:
    with url_of(run, workers) as (process, url):
        yield process, InferenceClient(url, model="dlrm")


REPOSITORY_PROGRAM = """
import sys
from terarec.serve import serve
from terarec.spec import ServingSpec
from terarec.spec.serving_repository import RepositorySpec
source = RepositorySpec(path=sys.argv[1], poll_seconds=0.05)
serve(source, ServingSpec(port=0, workers=int(sys.argv[2])), lambda server: print(server.port, flush=True))
print("stopped", flush=True)
"""


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def score(client: InferenceClient, trained: TrainedRun, start: int) -> np.ndarray:
    """Ask once more where the connection was that of a worker that was killed."""
    for _ in range(100):
        try:
            return client.infer(trained.records(start, start + 3))["score"]
        except InferenceError:
            time.sleep(0.05)
    raise AssertionError("no answer")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_is_killed_is_started_again(
    trained: TrainedRun, session: InferenceSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        manager.bind(str(tmp_path / "notify"))
        process, url = stack.enter_context(url_of(trained.path, 2))
        client = InferenceClient(url, model="dlrm")
        first = children(process.pid)
        assert len(first) == 2
        for start in range(0, 30, 3):
            expected = session.predict(trained.records(start, start + 3))
            np.testing.assert_allclose(score(client, trained, start), expected, rtol=0, atol=1e-6)

        def has_all_errors() -> bool:
            counts = {num_counted(url, "terarec_errors_total", '"not_found"') for _ in range(4)}
            return counts == {8}  # whichever worker answers

        for _ in range(8):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"{url}/nowhere", timeout=PATIENCE)
        wait_for(has_all_errors)
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: len(set(children(process.pid)) - set(first)) == 1)
        for start in range(0, 30, 3):
            expected = session.predict(trained.records(start, start + 3))
            np.testing.assert_allclose(score(client, trained, start), expected, rtol=0, atol=1e-6)
        wait_for(has_all_errors)  # those of the worker that was killed, too
        workers = children(process.pid)
        address = ("127.0.0.1", urllib.parse.urlsplit(url).port or 0)
        connection = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
        request = infer_bytes(trained, "Expect: 100-continue")
        connection.sendall(request[:-100])
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        os.kill(process.pid, signal.SIGTERM)
        # New clients are refused while the request in flight is still to be answered.
        wait_until_refused(address)
        connection.sendall(request[-100:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        connection.close()
        assert process.read_line() == "stopped"
        wait_for(lambda: not any(map(is_there, workers)))
        # By the process that was started, once each, whatever becomes of workers.
        manager.setblocking(False)
        assert [manager.recv(100) for _ in range(2)] == [b"READY=1", b"STOPPING=1"]
        with pytest.raises(BlockingIOError):
            manager.recv(100)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_the_process_that_started_them(trained: TrainedRun) -> None:
    with server_of(trained.path, 2) as (process, _):
        workers = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_there, workers)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_administrator_ends_all_workers(trained: TrainedRun) -> None:
    with url_of(trained.path, 2) as (process, url):
        workers = children(process.pid)
        request = urllib.request.Request(f"{url}/v1/shutdown", method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert json.load(answer) == {"draining": True}
        assert process.read_line() == "stopped"
        wait_for(lambda: not any(map(is_there, workers)))


def proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["run", "repository"])
def test_the_tables_are_in_memory_once(trained: TrainedRun, tmp_path: Path, source: str) -> None:
    """What two more workers add to the proportional set sizes is less than half of the tables each."""
    width = 12_288
    model = DLRMSpec(width=width, bottom=(8, width), top=(8,))
    training = TrainingSpec(batch_size=128, max_steps=1, reader_threads=1)
    build(RunSpec(data=str(trained.data), model=model, training=training), tmp_path / "run").fit()
    tables = tmp_path.joinpath("run", "checkpoints").rglob("tables/*.safetensors")
    size = sum(file.stat().st_size for file in tables)
    program, path = PROGRAM, tmp_path / "run"
    if source == "repository":
        program, path = REPOSITORY_PROGRAM, tmp_path / "models"
        # By hand, and so unchecked: the check scores 1,024 records, whose vectors of this width take 400 MB.
        shutil.copytree(tmp_path / "run", path / "dlrm" / "1")
    sums: dict[int, int] = {}
    for workers in (2, 4):
        with contextlib.closing(Python(program, path, workers, 0.0)) as process:
            client = InferenceClient(f"http://127.0.0.1:{process.read_line()}", model="dlrm")
            for start in range(0, 60, 3):
                score(client, trained, start)
            sums[workers] = sum(map(proportional_bytes, (process.pid, *children(process.pid))))
    assert size > 100e6
    assert (sums[4] - sums[2]) / 2 < 0.5 * size, (sums, size)


@pytest.mark.slow
def test_workers_are_not_killed_while_they_drain(trained: TrainedRun) -> None:
    with url_of(trained.path, 2, STOP_SECONDS + 5) as (process, _):
        process.send_signal(signal.SIGTERM)
        ended = process.wait()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


def test_a_worker_that_does_not_end_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    def work(context: WorkerContext) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        context.started(lambda: None)
        signal.pause()

    workers = Workers(1, work, stop_seconds=0.01)
    pids: list[int] = []

    def stop() -> None:
        pids.extend(workers.pids)
        workers.stop()

    workers.run(stop)
    assert not any(map(is_there, pids))
    assert f"process {pids[0]} did not end within 0.01 s; it is killed" in caplog.text


def test_a_worker_that_is_ready_finishes_while_another_one_starts(tmp_path: Path) -> None:
    """It has answered since it was ready, and may have requests."""

    def work(context: WorkerContext) -> None:
        is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        if context.index == 0:
            context.started(is_over.set)
        while not is_over.wait(0.01):
            pass
        (tmp_path / str(context.index)).touch()

    def stop() -> None:
        wait_for(lambda: len(workers.pids) == 2)
        workers.stop()

    workers = Workers(2, work)
    stopping = threading.Thread(target=stop)
    stopping.start()
    workers.run(lambda: None)
    stopping.join(PATIENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_worker_closes_what_is_its_own_before_it_ends(tmp_path: Path) -> None:
    """The files of a server's executors stayed for each of its workers, which call no `atexit`."""
    kept = [threading.Event()]

    def work(context: WorkerContext) -> None:
        is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        kept.append(is_over)  # so that its end is no reason to close
        Closer(is_over, (tmp_path / "own").touch)
        context.started(is_over.set)
        while not is_over.wait(0.01):
            pass

    of_parent = Closer(kept[0], (tmp_path / "parent").touch)
    workers = Workers(1, work)
    workers.run(workers.stop)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    assert not of_parent.is_closed
    of_parent()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_all_processes_stops_workers_that_start(number: int) -> None:
    """Ctrl-C in a terminal, and systemd, signal the group: workers that end first are no failure."""
    process = Python(
        """
import os, signal, time
from functools import partial
from terarec.serve.workers import Workers

def work(context):
    print("begun", os.getpgid(0), flush=True)
    time.sleep(3600)

os.setpgid(0, 0)
workers = Workers(2, work)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: (time.sleep(0.2), workers.stop()))
workers.run(lambda: None)
workers.stop()  # late, as that of a second signal, and without an effect
print("stopped", flush=True)
"""
    )
    try:
        os.killpg(int(process.read_line().split()[1]), number)
        ended = process.wait()
    finally:
        process.close()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


def test_a_worker_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The others answer meanwhile. Here there are no descriptors for pipes when a worker has ended."""
    pids: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def work(context: WorkerContext) -> None:
        context.started(lambda: None)
        signal.pause()

    def bury(_: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        threading.Thread(target=relieve).start()

    def relieve() -> None:
        wait_for(lambda: "tried again" in caplog.text)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        wait_for(lambda: len(set(workers.pids) - set(pids)) == 1)
        workers.stop()

    def started() -> None:
        pids.extend(workers.pids)
        os.kill(pids[1], signal.SIGKILL)

    workers = Workers(2, work, bury, stop_seconds=0.01)
    try:
        workers.run(started)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "worker 1 cannot be started: Too many open files; tried again in 0.1 s" in caplog.text


JSON = {"Content-Type": "application/json"}


def mapped(pid: int) -> set[str]:
    """The files of rows that a process maps; with " (deleted)" those that are removed."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/terarec-tables-" in line}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_follow_a_repository_and_share_its_tables(
    repository: Path, trained: TrainedRun, other_run: Path
) -> None:
    """No request fails while versions change, and each answer is that of the version that it names."""
    expected = {
        str(version): InferenceSession.open(run).predict(trained.records(0, 3))
        for version, run in ((1, trained.path), (2, other_run))
    }
    body = json.dumps({"inputs": tensors(trained.records(0, 3))}).encode()
    model = ModelRepository(repository).model("shop")
    with contextlib.closing(Python(REPOSITORY_PROGRAM, repository, 2)) as process:
        url = f"http://127.0.0.1:{process.read_line()}"
        is_over = threading.Event()
        seen: list[str] = []

        def ask() -> None:
            while not is_over.is_set():
                request = urllib.request.Request(f"{url}/v2/models/shop/infer", body, JSON)
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    found = json.load(answer)
                scores = np.array(found["outputs"][0]["data"], np.float32)[:, None]
                np.testing.assert_allclose(scores, expected[found["model_version"]], rtol=0, atol=1e-6)
                seen.append(found["model_version"])

        def answers(version: str) -> bool:
            """Whether all of the last answers, of both workers, are of a version."""
            return len(seen) >= 40 and set(seen[-40:]) == {version}

        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            try:
                wait_for(lambda: answers("1") or any(future.done() for future in asking))
                model.promote(2, PromotionSpec())
                wait_for(lambda: answers("2") or any(future.done() for future in asking))
                model.roll_back()
                wait_for(lambda: answers("1") or any(future.done() for future in asking))
                request = urllib.request.Request(
                    f"{url}/v1/repository/models/shop/promote", b'{"version": 2}', method="POST"
                )
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    assert json.load(answer)["answers"] == 2
                wait_for(lambda: answers("2") or any(future.done() for future in asking))
            finally:
                is_over.set()
            for future in asking:
                future.result()
        files = [mapped(worker) for worker in children(process.pid)]
        # The version that answers and the one before; both workers map the same files.
        assert len(files) == 2
        assert files[0] == files[1]
        assert len(files[0]) >= 2
        directory = Path(next(iter(files[0]))).parents[1]
        assert directory.is_dir()
        wait_for(lambda: num_counted(url) == len(seen))
        os.kill(process.pid, signal.SIGTERM)
        assert process.read_line() == "stopped"
        assert not directory.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_is_started_again_maps_the_rows_that_are_there(repository: Path) -> None:
    with contextlib.closing(Python(REPOSITORY_PROGRAM, repository, 2)) as process:
        process.read_line()
        first, second = children(process.pid)
        rows = mapped(second)
        assert mapped(first) == rows
        assert rows
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(set(children(process.pid)) - {first, second}) == 1)
        (third,) = set(children(process.pid)) - {first, second}
        wait_for(lambda: mapped(third) == rows)
        assert mapped(second) == rows
        directory = Path(next(iter(rows))).parent
        assert {str(path) for path in directory.iterdir() if "-" in path.name} == rows


def num_counted(url: str, name: str = "terarec_requests_total", label: str = '"success"') -> int:
    """The requests that the metrics of one worker count, with those of the other."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith(name) and label in line]
    return sum(int(float(line.split()[-1])) for line in counts)


def test_the_error_of_a_worker_is_that_of_the_server() -> None:
    def work(context: WorkerContext) -> None:
        raise ConfigError("executor", f"got 'x' in worker {context.index}")

    workers = Workers(2, work)
    with pytest.raises(ConfigError, match="executor: got 'x' in worker 0"):
        workers.run(lambda: None)


def test_a_worker_that_ends_without_a_word_is_an_error() -> None:
    def work(_: WorkerContext) -> None:
        os._exit(7)

    workers = Workers(1, work)
    with pytest.raises(ConfigError, check=at("worker 0", "exit code 7")):
        workers.run(lambda: None)


def test_what_several_processes_cannot_serve_is_named(trained: TrainedRun) -> None:
    with pytest.raises(ConfigError, check=at("ServingSpec.workers", "got 2 on a GPU")):
        serve(trained.path, ServingSpec(port=0, workers=2), device=torch.device("cuda"))
    for spec, what in (
        (RepositorySpec(path="models", control="explicit"), "got 2 with control 'explicit'"),
        (RepositorySpec(path="models", control="none"), "got 2 with control 'none'"),
        (RepositorySpec(path="models", follow_runs=True), "got 2 with follow_runs"),
    ):
        with pytest.raises(ConfigError, check=at("ServingSpec.workers", what)):
            serve(spec, ServingSpec(port=0, workers=2))
    with pytest.raises(ConfigError, check=at("ServingSpec.workers")):
        ServingSpec(workers=0)


MANY = 10_000
MANY_PROGRAM = f"""
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2 * {MANY}), most))
{PROGRAM}"""


@pytest.mark.slow
def test_a_server_answers_beside_ten_thousand_idle_connections(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < MANY + 500:
        pytest.skip(f"the system allows {most} open files")
    monkeypatch.setitem(globals(), "PROGRAM", MANY_PROGRAM)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with contextlib.ExitStack() as stack:
            process, url = stack.enter_context(url_of(trained.path, 1))
            client, place = InferenceClient(url, model="dlrm"), urllib.parse.urlsplit(url)
            expected = score(client, trained, 0)
            held = statm_bytes(process.pid)
            for _ in range(MANY):
                stack.enter_context(socket.create_connection((place.hostname, place.port), PATIENCE))
            assert np.array_equal(score(client, trained, 0), expected)
            assert (statm_bytes(process.pid) - held) / MANY < 20_000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def statm_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
