# SPDX-License-Identifier: Apache-2.0
"""Measure a server of a large DLRM against `predict` in this process and, on request, against other servers.

The server runs on the first core with one thread, the clients on the last. Records are those of Criteo's layout, 39
columns. `predict` is timed on the first core right before and after the server, so that its rate is of the same run.

With ``--triton`` that is Triton of the wheel ``nvidia-pytriton``, with both forms of the exported repository; with
``--peers`` MLServer, LitServe and a plain FastAPI server, which call `predict` and are in the environment of ``make
peers-serving``. All are on the first core, and get their requests in JSON from threads of this process; so does
terarec's server where it is compared with them.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from record import Row, append_rows, measure
from session import LARGE, records

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.addresses import own_address
from tests.apps.test_triton import as_utf8, export_for_triton
from tests.apps.test_triton import running as running_triton

from terarec.apps.bench_serve.bench import ServingBench
from terarec.apps.bench_serve.figures import LoadFigures
from terarec.apps.synthetic.criteo import generate
from terarec.etl import prepare
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.serve import InferenceSession
from terarec.spec import RunSpec, SplitByFiles, TrainingSpec
from terarec.spec.bench_serving import LoadSpec
from terarec.train.run import build

PEERS_PYTHON = Path(__file__).resolve().parents[1] / ".venv-peers-serving" / "bin" / "python"
LOADS = ((1, 1), (1, 64), (16, 16), (64, 16), (1024, 4))  # records of a request, clients
PROTOCOLS = ("http", "grpc", "json")
BODIES = 2048  # records from which requests are made


def trained(root: Path, rows: int) -> tuple[Path, list[str]]:
    """Return a run after one step on generated logs, and the lines of the last day."""
    report = generate(root / "raw", rows=rows, days=2, seed=7)
    days = [root / "raw" / file for file in report.files]
    prepare(Workflow.of(criteo(min_count=2, split=SplitByFiles(valid=1))), days, root / "data")
    training = TrainingSpec(batch_size=1024, max_steps=1, reader_threads=1)
    build(RunSpec(data=str(root / "data"), model=LARGE, training=training), root / "run").fit()
    with days[-1].open() as file:
        return root / "run", [line.rstrip("\n") for line, _ in zip(file, range(BODIES), strict=False)]


@contextlib.contextmanager
def server(run: Path, core: int, log: Path) -> Iterator[tuple[str, str]]:
    """Serve a run on a core; yields its URL, and its address of gRPC."""
    (host, port), (_, grpc_port) = own_address(), own_address()
    command = [sys.executable, "-m", "terarec", "serve", str(run), "--host", host]
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *ports],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            wait_ready(process, f"http://{host}:{port}", log)
            yield f"http://{host}:{port}", f"{host}:{grpc_port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, health: str = "/v2/health/ready") -> None:
    for _ in range(3000):
        if process.poll() is not None:
            sys.exit(log.read_text()[-3000:])
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}{health}", timeout=1)
            return
        time.sleep(0.1)
    sys.exit(f"{url} is not ready after five minutes")


def loads(url: str, grpc: str, lines: list[str], core: int, seconds: float) -> Iterator[LoadFigures]:
    table = pa.table(records(lines))
    for size, clients in LOADS:
        spec = LoadSpec(protocols=PROTOCOLS, sizes=(size,), concurrency=(clients,), seconds=seconds, cores=(core,))
        for cell in ServingBench(spec, url, grpc, table).run():
            if cell.figures is not None:
                yield cell.figures


def in_process(session: InferenceSession, lines: list[str], turns: int) -> dict[int, float]:
    """Return records a second of `predict` by the size of a call, on this process's core and thread."""
    rates = {}
    for size in sorted({size for size, _ in LOADS}):
        raw = records(lines[:size])
        rates[size] = size / measure(lambda raw=raw: session.predict(raw), turns * (20 if size == 1 else 1)).median
    return rates


def serving(options: argparse.Namespace) -> Iterator[Row]:
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run, lines = trained(root, options.rows)
        os.sched_setaffinity(0, {first})
        torch.set_num_threads(1)
        session = InferenceSession.open(run)
        before = in_process(session, lines, options.turns)
        os.sched_setaffinity(0, set(cores))
        with server(run, first, root / "log") as (url, grpc):
            figures = list(loads(url, grpc, lines, last, options.seconds))
        os.sched_setaffinity(0, {first})
        after = in_process(session, lines, options.turns)
        rates = {size: (before[size] + after[size]) / 2 for size in before}
        for size, rate in rates.items():
            yield Row(case=f"{size:,} records, in process", metric="predict", value=rate, unit="records/s")
        for one in figures:
            yield from rows_of(one, rates)
        if options.triton or options.peers:
            yield from compared(run, lines, first, last, options)


def rows_of(one: LoadFigures, rates: dict[int, float]) -> Iterator[Row]:
    case = f"{one.records:,} records a request, {one.clients} clients, {one.protocol}"
    if one.errors:
        sys.exit(f"{case}: {one.errors} requests failed")
    # Requests of one record are joined to batches: what bounds them is the rate of the largest that may be.
    joined = max(rates[size] for size in rates if size <= max(one.records, one.clients or 1))
    yield Row(
        case=case,
        metric="server",
        value=one.records_per_second,
        unit="records/s",
        peer="predict in process",
        peer_value=rates[one.records],
        limit=joined,
    )
    yield Row(case=case, metric="server, median latency", value=one.p50_ms, unit="ms")
    yield Row(case=case, metric="server, 99th percentile", value=one.p99_ms, unit="ms")


@dataclass(frozen=True)
class Contender:
    """A server that is compared.

    Attributes:
        name: Its name.
        serve: Starts it in a folder, and gives its URL.
        path: Path of its requests.
        form: Form of their bodies.
    """

    name: str
    serve: Callable[[Path], contextlib.AbstractContextManager[str]]
    path: str
    form: Literal["v2", "utf8", "plain"] = "v2"


def contenders(run: Path, first: int, options: argparse.Namespace) -> list[Contender]:
    def own(folder: Path) -> contextlib.AbstractContextManager[str]:
        return _url(server(run, first, folder / "log"))

    def triton(form: str, folder: Path) -> contextlib.AbstractContextManager[str]:
        export_for_triton(run, folder / "repository", text="utf8", form=form)
        return running_triton(folder / "repository", folder / "triton.log")

    infer = "/v2/models/model/infer"
    found = [Contender("terarec", own, infer)]
    if options.triton:
        for name, form in (("Triton, one model", "model"), ("Triton, ensemble", "ensemble")):
            found.append(Contender(name, partial(triton, form), "/v2/models/clicks/infer", "utf8"))
    if options.peers:
        found += [
            Contender("MLServer", partial(peer, "mlserver", run, "/v2/models/model/ready"), infer),
            Contender("LitServe", partial(peer, "litserve", run, "/health"), "/predict", "plain"),
            Contender("FastAPI", partial(peer, "fastapi", run, "/health"), "/predict", "plain"),
        ]
    return found


@contextlib.contextmanager
def _url(started: contextlib.AbstractContextManager[tuple[str, str]]) -> Iterator[str]:
    with started as (url, _):
        yield url


@contextlib.contextmanager
def peer(library: str, run: Path, health: str, folder: Path) -> Iterator[str]:
    """Serve a run by another library, with one thread, on the core of this process; yields its URL."""
    host, port = "127.0.0.1", own_address()[1]  # LitServe takes no other loopback address
    if not PEERS_PYTHON.exists():
        sys.exit(f"got no interpreter {PEERS_PYTHON}, expected the one that `make peers-serving` makes")
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(PEERS_PYTHON), "-m", "peer_sides.served_model", library, str(run), host, str(port)],
            cwd=Path(__file__).parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            wait_ready(process, f"http://{host}:{port}", log, health)
            yield f"http://{host}:{port}"
        finally:
            # With the processes that it has started.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(20)
            process.wait()


def compared(run: Path, lines: list[str], first: int, last: int, options: argparse.Namespace) -> Iterator[Row]:
    """Compare with other servers, one after another in turns, by the same client."""
    kinds = {column.name: column.kind for column in InferenceSession.open(run).inputs}
    measured: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    chosen = contenders(run, first, options)
    for _ in range(options.compared_turns):
        for one in chosen:
            with tempfile.TemporaryDirectory() as folder:
                os.sched_setaffinity(0, {first})  # which a server inherits
                with one.serve(Path(folder)) as url:
                    os.sched_setaffinity(0, {last})
                    for size in options.sizes:
                        raw = [records(lines[place : place + size]) for place in range(0, 64 * size, size)]
                        bodies = [body_of(columns, kinds, one.form) for columns in raw if columns["C1"]]
                        send(url + one.path, bodies, 1, 20)
                        for clients, count in ((1, 200), (16, 40)):
                            found = send(url + one.path, bodies, clients, max(count // size, 10))
                            measured.setdefault((one.name, size, clients), []).append(found)
    for (name, size, clients), figures in measured.items():
        if name == "terarec":
            continue
        own, other = np.median(measured["terarec", size, clients], axis=0), np.median(figures, axis=0)
        noun = "record" if size == 1 else "records"
        case = f"{size:,} {noun} a request, {clients} clients, JSON, same client"
        for place, metric, unit in ((0, "server", "requests/s"), (1, "server, 99th percentile", "ms")):
            yield Row(
                case=case, metric=metric, value=float(own[place]), unit=unit, peer=name, peer_value=float(other[place])
            )


def body_of(raw: dict[str, list[object]], kinds: dict[str, str], form: str) -> bytes:
    return json.dumps(raw).encode() if form == "plain" else json_request(raw, kinds, is_utf8=form == "utf8")


def json_request(raw: dict[str, list[object]], kinds: dict[str, str], *, is_utf8: bool) -> bytes:
    inputs = []
    for name, values in raw.items():
        if kinds[name] == "number":
            data: list[object] = [value or 0 for value in values]
            inputs.append({"name": name, "datatype": "FP64", "shape": [len(values), 1], "data": data})
        elif is_utf8:
            array = as_utf8(values)
            inputs.append({"name": name, "datatype": "UINT8", "shape": array.shape, "data": array.ravel().tolist()})
        else:
            inputs.append({"name": name, "datatype": "BYTES", "shape": [len(values), 1], "data": values})
    return json.dumps({"inputs": inputs}).encode()


def send(url: str, bodies: list[bytes], clients: int, count: int) -> tuple[float, float]:
    """Return requests a second and the 99th percentile of their times in milliseconds."""
    seconds: list[float] = []

    def work(first: int) -> None:
        address = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(address.netloc)
        head = {"Content-Type": "application/json"}
        for number in range(count):
            start = time.perf_counter()
            connection.request("POST", address.path, bodies[(first + number) % len(bodies)], head)
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise RuntimeError(content[:500])
            seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(work, range(clients)))  # which raises what a thread raises
    return len(seconds) / (time.perf_counter() - start), 1e3 * float(np.quantile(seconds, 0.99))


def sizes_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the generated logs")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--triton", action="store_true", help="compare with Triton: pip install nvidia-pytriton")
    parser.add_argument("--peers", action="store_true", help="compare with MLServer, LitServe and FastAPI")
    parser.add_argument("--sizes", type=sizes_of, default=[1], help="records of the compared requests, such as 1,16")
    parser.add_argument("--compared-turns", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    append_rows("serving", serving(options := parser.parse_args()), dry=options.dry)


if __name__ == "__main__":
    main()
