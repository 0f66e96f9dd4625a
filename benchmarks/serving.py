# SPDX-License-Identifier: Apache-2.0
"""Measure a server of a large DLRM against `predict` in this process and, with ``--triton``, against Triton.

The server runs on the first core with one thread, the clients on the last. Records are those of Criteo's layout, 39
columns. `predict` is timed on the first core right before and after the server, so that its rate is of the same run.

Triton is that of the wheel ``nvidia-pytriton``, on the first core too, with both forms of the exported repository. It
gets its requests in JSON from threads of this process; so does terarec's server where it is compared with it.
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
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

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


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(log.read_text()[-3000:])
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=1)
            return
        time.sleep(0.1)
    sys.exit(f"{url} is not ready after a minute")


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
        if options.triton:
            yield from against_triton(run, lines, first, last, options)


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


def against_triton(run: Path, lines: list[str], first: int, last: int, options: argparse.Namespace) -> Iterator[Row]:
    """Compare with Triton, server after server in turns, by requests of one record."""
    raw = [records([line]) for line in lines[:64]]
    kinds = {column.name: column.kind for column in InferenceSession.open(run).inputs}
    measured: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(options.triton_turns):
        for name in ("terarec", "Triton, one model", "Triton, ensemble"):
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                place = Path(folder)
                os.sched_setaffinity(0, {first})  # which a server inherits
                if name == "terarec":
                    url, _ = stack.enter_context(server(run, first, place / "log"))
                    model, encoding = "model", "BYTES"
                else:
                    form = "ensemble" if name.endswith("ensemble") else "model"
                    export_for_triton(run, place / "repository", text="utf8", form=form)
                    url = stack.enter_context(running_triton(place / "repository", place / "triton.log"))
                    model, encoding = "clicks", "UINT8"
                os.sched_setaffinity(0, {last})
                bodies = [json_request(one, kinds, encoding) for one in raw]
                send(url, model, bodies, 1, 20)
                for clients, count in ((1, 200), (16, 40)):
                    measured.setdefault((name, clients), []).append(send(url, model, bodies, clients, count))
    for (name, clients), figures in measured.items():
        if name == "terarec":
            continue
        own, peer = np.median(measured["terarec", clients], axis=0), np.median(figures, axis=0)
        case = f"1 record a request, {clients} clients, JSON, same client"
        for place, metric, unit in ((0, "server", "requests/s"), (1, "server, 99th percentile", "ms")):
            yield Row(
                case=case, metric=metric, value=float(own[place]), unit=unit, peer=name, peer_value=float(peer[place])
            )


def json_request(raw: dict[str, list[object]], kinds: dict[str, str], encoding: str) -> bytes:
    inputs = []
    for name, values in raw.items():
        if kinds[name] == "number":
            data: list[object] = [value or 0 for value in values]
            inputs.append({"name": name, "datatype": "FP64", "shape": [len(values), 1], "data": data})
        elif encoding == "UINT8":
            array = as_utf8(values)
            inputs.append({"name": name, "datatype": "UINT8", "shape": array.shape, "data": array.ravel().tolist()})
        else:
            inputs.append({"name": name, "datatype": "BYTES", "shape": [len(values), 1], "data": values})
    return json.dumps({"inputs": inputs}).encode()


def send(url: str, model: str, bodies: list[bytes], clients: int, count: int) -> tuple[float, float]:
    """Return requests a second and the 99th percentile of their times in milliseconds."""
    seconds: list[float] = []

    def work(first: int) -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        for number in range(count):
            start = time.perf_counter()
            connection.request("POST", f"/v2/models/{model}/infer", bodies[(first + number) % len(bodies)])
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise RuntimeError(content[:500])
            seconds.append(time.perf_counter() - start)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(seconds) / (time.perf_counter() - start), 1e3 * float(np.quantile(seconds, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the generated logs")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--triton", action="store_true", help="compare with Triton: pip install nvidia-pytriton")
    parser.add_argument("--triton-turns", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    append_rows("serving", serving(options := parser.parse_args()), dry=options.dry)


if __name__ == "__main__":
    main()
