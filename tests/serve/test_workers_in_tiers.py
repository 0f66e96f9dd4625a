# SPDX-License-Identifier: Apache-2.0
"""Several processes on one address over tables in tiers: they follow a trainer, and share rows that change."""

import contextlib
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import InferenceSession, serve
from terarec.serve.publishing import UpdatePublisher
from terarec.serve.update_streams import open_stream
from terarec.spec import RocksDBSpec, RowFileSpec, ServedTablesSpec, ServingSpec
from terarec.spec.codec import to_data
from terarec.spec.serving_repository import RepositorySpec
from tests.errors import at
from tests.params import in_every_run
from tests.processes import Python
from tests.ps.redis_processes import needs_redis, running
from tests.serve.conftest import TrainedRun
from tests.serve.http.test_api_routes import tensors
from tests.serve.test_live import Live, finished, live  # noqa: F401
from tests.serve.test_workers import JSON, children
from tests.serve.update_servers import stream_server
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shares memory below /dev/shm, and reads /proc")

PROGRAM = """
import sys
from pathlib import Path
from terarec.config.files import load_served_tables, load_update_stream
from terarec.serve import serve
from terarec.spec import ServingSpec
spec = ServingSpec(port=0, workers=2, tables=load_served_tables(sys.argv[2]))
stream = load_update_stream(sys.argv[3]) if len(sys.argv) > 3 else None
serve(Path(sys.argv[1]), spec, lambda server: print(server.port, flush=True), stream=stream)
print("stopped", flush=True)
"""


@contextlib.contextmanager
def tiers_of(kind: str, path: Path) -> Iterator[list[dict[str, object]]]:
    """Tiers that several processes open."""
    if kind == "redis":
        with running(path) as server:
            # Where Redis alone has all rows, another process may change them under a session (docs/inference.md).
            yield [{"kind": "host"}, {"kind": "redis", "address": server.address}]
    elif kind == "shared":
        yield [{"kind": "shared", "name": f"terarec-test-{os.getpid()}"}]
    else:
        yield [{"kind": "host"}]


class Asking:
    """Asks a server, and compares each answer with the scores of the checkpoint that it names."""

    def __init__(self, url: str, run: Path, trained: TrainedRun) -> None:
        self._url, self._run, self._records = url, run, trained.records(0, 20)
        self._body = json.dumps({"inputs": tensors(self._records)}).encode()
        self._expected: dict[int, np.ndarray] = {}
        self._steps: list[int] = []

    def _ask(self) -> None:
        """Ask once, by a connection of its own, which any worker accepts."""
        request = urllib.request.Request(f"{self._url}/v2/models/model/infer", self._body, JSON)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            answer = json.load(reply)
        step = answer["parameters"]["step"]
        if step not in self._expected:
            self._expected[step] = InferenceSession.open(self._run, step).predict(self._records)
        scores = np.array(answer["outputs"][0]["data"], np.float32)[:, None]
        np.testing.assert_allclose(scores, self._expected[step], rtol=0, atol=1e-6)
        self._steps.append(step)

    def wait_for(self, step: int) -> None:
        """Ask until the last answers, of both workers, are of a step."""
        self._steps.clear()

        def are_there() -> bool:
            with contextlib.suppress(ConnectionError, urllib.error.URLError):  # those of a worker that is killed
                self._ask()
            return len(self._steps) >= 20 and set(self._steps[-20:]) == {step}

        wait_for(are_there)


@pytest.mark.parametrize(
    "kind",
    [*in_every_run(["shared"], ["host", "shared"]), pytest.param("redis", marks=[needs_redis, pytest.mark.slow])],
)
def test_workers_follow_a_trainer(kind: str, live: Live, trained: TrainedRun, tmp_path: Path) -> None:  # noqa: F811
    """A worker that is killed, also the first one, which writes the rows, follows again."""
    with tiers_of(kind, tmp_path) as tiers:
        tables = tmp_path / "tables.json"
        tables.write_text(json.dumps({"tiers": tiers, "follow_seconds": 0.05}))
        with contextlib.closing(Python(PROGRAM, live.path, tables)) as process:
            server = Asking(f"http://127.0.0.1:{process.read_line()}", live.path, trained)
            server.wait_for(2)
            live.add(4)
            server.wait_for(4)
            first, second = children(process.pid)
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: len(set(children(process.pid)) - {first, second}) == 1)
            live.add(6)
            server.wait_for(6)
            # Memory goes although no worker lets go of it.
            for worker in children(process.pid):
                os.kill(worker, signal.SIGKILL)
            os.kill(process.pid, signal.SIGTERM)
            assert process.read_line() == "stopped"
    assert not list(Path("/dev/shm").glob(f"terarec-test-{os.getpid()}*"))


@needs_redis
@pytest.mark.slow
def test_one_of_the_workers_receives_a_stream(live: Live, trained: TrainedRun, tmp_path: Path) -> None:  # noqa: F811
    with stream_server("redis", tmp_path) as new_stream, tiers_of("shared", tmp_path) as tiers:
        tables, stream = tmp_path / "tables.json", tmp_path / "stream.json"
        tables.write_text(json.dumps({"tiers": tiers}))
        spec = new_stream()
        stream.write_text(json.dumps(to_data(spec)))
        with (
            contextlib.closing(open_stream(spec)) as opened,
            UpdatePublisher(live.path, opened, every_seconds=0.05),
            contextlib.closing(Python(PROGRAM, tmp_path / "replica", tables, stream)) as process,
        ):
            server = Asking(f"http://127.0.0.1:{process.read_line()}", live.path, trained)
            server.wait_for(2)
            live.add(4)
            server.wait_for(4)
            first = children(process.pid)
            os.kill(first[0], signal.SIGKILL)
            wait_for(lambda: len(set(children(process.pid)) - set(first)) == 1)
            live.add(6)
            server.wait_for(6)
            os.kill(process.pid, signal.SIGTERM)
            assert process.read_line() == "stopped"


@pytest.mark.parametrize("tier", [RowFileSpec(path="rows"), RocksDBSpec(path="rows")])
def test_tiers_that_one_process_opens_are_rejected(tier: RowFileSpec | RocksDBSpec, trained: TrainedRun) -> None:
    spec = ServingSpec(port=0, workers=2, tables=ServedTablesSpec(tiers=(tier,)))
    with pytest.raises(ConfigError, check=at("ServingSpec.workers", f"got 2 with a tier of kind {tier.kind!r}")):
        serve(trained.path, spec)
    with pytest.raises(ConfigError, check=at("ServingSpec.workers", "got 2 with tiers of a model repository")):
        serve(RepositorySpec(path="models"), ServingSpec(port=0, workers=2, tables=ServedTablesSpec()))
