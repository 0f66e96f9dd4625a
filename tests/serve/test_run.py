# SPDX-License-Identifier: Apache-2.0
"""`serve` as a process and as a thread: address, signals, clean ends; and the client that calls it."""

import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError, DataNotFoundError, MissingDependencyError
from terarec.serve import InferenceClient, InferenceError, InferenceSession, RunningServer, serve
from terarec.serve.json_codec import decode_infer_response, encode, float32_elements
from terarec.serve.process import READY, notify
from terarec.serve.protocol import InferRequest, Tensor
from terarec.spec import ServingSpec
from tests.addresses import own_address
from tests.errors import at
from tests.processes import Python
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun
from tests.waiting import PATIENCE, wait_until_refused

PROGRAM = """
import os, signal, sys
from pathlib import Path
from terarec.serve import InferenceSession, serve
from terarec.spec import ServingSpec
loaded = InferenceSession.open
def load(*arguments, **options):
    os.kill(os.getpid(), signal.SIGHUP)  # the terminal is closed meanwhile
    return loaded(*arguments, **options)
InferenceSession.open = load
serve(Path(sys.argv[1]), ServingSpec(name="dlrm", port=0), lambda server: print(server.url, flush=True))
print("stopped", flush=True)
"""


@pytest.fixture
def manager(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where a manager of services listens: under a name of the kernel's, where it has some, or in the file system."""
    has_names = sys.platform == "linux" and number == signal.SIGTERM
    address = f"@terarec-test-{os.getpid()}-{id(tmp_path)}" if has_names else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0"))
        listening.settimeout(PATIENCE)
        yield listening


@pytest.fixture
def process(trained: TrainedRun) -> Iterator[Python]:
    with contextlib.closing(Python(PROGRAM, trained.path)) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly(
    manager: socket.socket, process: Python, trained: TrainedRun, number: signal.Signals
) -> None:
    client = InferenceClient(process.read_line(), model="dlrm")
    assert manager.recv(100) == b"READY=1"
    process.send_signal(signal.SIGHUP)
    assert client.infer(trained.records(0, 3))["score"].shape == (3, 1)
    process.send_signal(number)
    ended = process.wait()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")
    assert manager.recv(100) == b"STOPPING=1"


def test_a_manager_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    notify(READY)
    assert "/nowhere/notify" in caplog.text


def test_an_administrator_ends_the_server(process: Python) -> None:
    url = process.read_line()
    request = urllib.request.Request(f"{url}/v1/shutdown", method="POST")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert json.load(answer) == {"draining": True}
    ended = process.wait()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


def test_the_client_gets_the_scores_of_the_session(
    server: RunningServer, trained: TrainedRun, session: InferenceSession
) -> None:
    client = InferenceClient(server.url, model="dlrm")
    records = trained.records(0, 40)
    scores = client.infer(records)["score"]
    assert scores.dtype == np.float32
    assert np.array_equal(scores, session.predict(records))
    assert [item.name for item in client.metadata.inputs] == DENSE + CATEGORICAL


def test_the_client_takes_arrays_and_nan_for_missing(server: RunningServer, trained: TrainedRun) -> None:
    client = InferenceClient(server.url, model="dlrm")
    records = trained.records(0, 10)
    arrays = {
        name: np.array(values, dtype=np.float64 if name in DENSE else str)  # None becomes NaN
        for name, values in records.items()
    }
    assert np.array_equal(client.infer(arrays)["score"], client.infer(records)["score"])


def test_eight_clients_get_their_own_answers(
    server: RunningServer, trained: TrainedRun, session: InferenceSession
) -> None:
    bounds = [(start, start + 1 + start % 9) for start in range(64)]

    def call(bound: tuple[int, int]) -> np.ndarray:
        return InferenceClient(server.url, model="dlrm").infer(trained.records(*bound))["score"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, bounds))
    for bound, answer in zip(bounds, answers, strict=True):
        # Joined requests: products of matrices are summed in another order.
        np.testing.assert_allclose(answer, session.predict(trained.records(*bound)), rtol=0, atol=1e-6)


def test_a_rejection_reaches_the_caller_with_the_servers_message(server: RunningServer, trained: TrainedRun) -> None:
    client = InferenceClient(server.url, model="dlrm")
    records = trained.records(0, 1)
    with pytest.raises(InferenceError, check=at(f"{server.url}/v2/models/dlrm/infer", "400: column 'C7': missing")):
        client.infer({name: values for name, values in records.items() if name != "C7"})
    with pytest.raises(
        InferenceError, check=at(f"{server.url}/v2/models/other", "404: model 'other': not served here")
    ):
        InferenceClient(server.url, model="other").infer(records)


def test_the_client_rejects_what_cannot_be_sent(server: RunningServer, trained: TrainedRun) -> None:
    client = InferenceClient(server.url, model="dlrm")
    with pytest.raises(ConfigError, check=at("column 'age'")):
        client.infer({"age": [3]})
    with pytest.raises(ConfigError, check=at("column 'C1'[1]")):
        client.infer({"C1": ["a", 3]})


def test_no_server_is_reported_in_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InferenceError, check=at(f"{url}/v2/models/model")):
            InferenceClient(url).infer({"I1": [1]})


def test_loopback_alone_is_bound_by_default(server: RunningServer) -> None:
    assert server.host == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}"
    with contextlib.closing(socket.socket()) as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(("127.0.0.2", server.port))  # an address of this machine that was not requested


def serve_while(run_dir: Path, spec: ServingSpec, call: Callable[[RunningServer], None]) -> None:
    """Serve in this thread until `call`, in another, is done; raise what it raised."""
    called: list[Future[None]] = []

    def call_and_stop(running: RunningServer) -> None:
        try:
            call(running)
        finally:
            running.stop()

    with ThreadPoolExecutor(1) as pool:
        serve(run_dir, spec, lambda running: called.append(pool.submit(call_and_stop, running)))
    called[0].result(timeout=60)


@pytest.mark.slow
def test_any_loopback_family_may_be_requested(trained: TrainedRun) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    answers: list[bytes] = []

    def call(running: RunningServer) -> None:
        answers.append(urllib.request.urlopen(f"{running.url}/v2/health/ready", timeout=PATIENCE).read())

    serve_while(trained.path, ServingSpec(host="::1", port=0), call)
    assert answers == [b'{"ready":true}']


def test_a_request_in_flight_is_answered_after_the_stop(trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 2)
    tensors = (
        Tensor(name=name, datatype="FP32" if name in DENSE else "BYTES", shape=(2,), data=values)
        for name, values in records.items()
    )
    body = encode(InferRequest(inputs=tuple(tensors)))
    answers: list[bytes] = []

    def call(running: RunningServer) -> None:
        with socket.create_connection((running.host, running.port), timeout=PATIENCE) as connection:
            head = f"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # the server reads the body by now
            connection.sendall(body[:100])
            running.stop()
            wait_until_refused((running.host, running.port))
            connection.sendall(body[100:])
            answers.append(b"".join(iter(lambda: connection.recv(65536), b"")))

    serve_while(trained.path, ServingSpec(port=0), call)
    head, _, answer = answers[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert decode_infer_response(answer).outputs[0].data == float32_elements(session.predict(records))


@pytest.mark.slow
def test_handlers_of_signals_are_put_back(trained: TrainedRun) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    serve(trained.path, ServingSpec(port=0), lambda running: os.kill(os.getpid(), signal.SIGTERM))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_taken_port_is_reported_in_one_line(server: RunningServer, trained: TrainedRun) -> None:
    problem = f"127.0.0.1 port {server.port} cannot be bound (Address already in use)"
    with pytest.raises(ConfigError, check=at("ServingSpec.port", problem)):
        serve(trained.path, ServingSpec(port=server.port))


def test_a_foreign_address_is_reported_in_one_line(trained: TrainedRun) -> None:
    with pytest.raises(ConfigError, check=at("ServingSpec.port")):
        serve(trained.path, ServingSpec(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, check=at("ServingSpec.host")):
        serve(trained.path, ServingSpec(host="no such host", port=0))


def test_a_directory_without_a_run_is_reported_and_frees_the_port(tmp_path: Path) -> None:
    host, port = own_address()
    with pytest.raises(DataNotFoundError):
        serve(tmp_path, ServingSpec(host=host, port=port))
    with socket.create_server((host, port)):
        pass


def test_a_missing_library_names_the_extra(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    for module in ("assembly", "connection", "server"):
        monkeypatch.delitem(sys.modules, f"terarec.serve.http.{module}", raising=False)
    with pytest.raises(MissingDependencyError, check=at("httptools", "terarec[serve]")):
        serve(trained.path, ServingSpec(port=0))
