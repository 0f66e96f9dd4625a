# SPDX-License-Identifier: Apache-2.0
"""Two servers of one repository on one machine: both follow it, share its logs, and neither needs the other."""

import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from terarec.serve import InferenceClient, InferenceSession
from terarec.serve.repository import ModelRepository
from terarec.serve.served_records import PREFIX
from terarec.spec.serving_repository import PromotionSpec
from tests.processes import Python
from tests.serve.conftest import TrainedRun
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and looks at /dev/shm")

PROGRAM = """
import sys
from terarec.serve import serve
from terarec.spec import ServingSpec
from terarec.spec.serving_options import WatchingSpec
from terarec.spec.serving_repository import RepositorySpec
watching = WatchingSpec(access_log=sys.argv[2] + "/log", record_directory=sys.argv[2], record_share=1.0)
spec = ServingSpec(port=0, workers=int(sys.argv[3]), watching=watching)
serve(RepositorySpec(path=sys.argv[1], poll_seconds=0.02), spec, lambda server: print(server.port, flush=True))
"""


@contextlib.contextmanager
def started(repository: Path, watched: Path, workers: int) -> Iterator[Python]:
    process = Python(PROGRAM, repository, watched, workers)
    try:
        yield process
    finally:
        process.close()


def tables_of(process: Python) -> list[Path]:
    return list(Path("/dev/shm").glob(f"terarec-tables-{process.pid}-*"))


@pytest.mark.slow  # the parts are tested one by one: `test_watching`, `test_shared_tables`, `test_served_records`
def test_two_servers_of_one_repository(repository: Path, trained: TrainedRun, tmp_path: Path) -> None:
    records, watched, shop = trained.records(0, 5), tmp_path / "watched", ModelRepository(repository).known("shop")
    watched.mkdir()
    expected = {version: InferenceSession.open(shop.path / str(version)).predict(records) for version in shop.versions}

    def answers(client: InferenceClient, version: int) -> bool:
        return np.allclose(client.infer(records)["score"], expected[version], rtol=0, atol=1e-6)

    with started(repository, watched, 2) as first, started(repository, watched, 1) as second:
        urls = [f"http://127.0.0.1:{process.read_line()}" for process in (first, second)]
        clients = [InferenceClient(url, model="shop") for url in urls]
        assert all(answers(client, 1) for client in clients)
        promote = urllib.request.Request(
            f"{urls[1]}/v1/repository/models/shop/promote", b'{"version": 2}', {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(promote).close()
        for client in clients:
            wait_for(partial(answers, client, 2))
        shop.roll_back()
        for client in clients:
            wait_for(partial(answers, client, 1))
        # One that is killed takes nothing of the other along, and the next one that starts removes what it leaves.
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        shop.promote(2, PromotionSpec())
        wait_for(partial(answers, clients[1], 2))
        with started(repository, watched, 2) as third:
            assert answers(InferenceClient(f"http://127.0.0.1:{third.read_line()}", model="shop"), 2)
            assert (len(tables_of(first)), len(tables_of(third))) == (0, 1)
            for process in (second, third):
                process.send_signal(signal.SIGTERM)
                assert process.wait().returncode == 0
            assert tables_of(third) == []
    lines = [json.loads(line) for line in (watched / "log").read_text().splitlines()]
    assert {line["version"] for line in lines if line["method"] == "POST" and line.get("model")} >= {"1", "2"}
    table = ds.dataset([str(path) for path in watched.glob("shop/*.parquet")]).to_table()
    assert set(table[f"{PREFIX}version"].to_pylist()) == {"1", "2"}
    assert {path.name for path in shop.path.iterdir()} == {"1", "2", "pointer.json"}
