# SPDX-License-Identifier: Apache-2.0
"""Prometheus beside the server and the Valkey of the Compose file: each panel has data, and no alert fires."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.addresses import own_address
from tests.deploy import deployments as deploy
from tests.deploy.deployments import MONITORING, moved
from tests.deploy.servers import BEARER, Server, places, started
from tests.programs import PROMETHEUS
from tests.serve.conftest import TrainedRun
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def server(models: Path, secrets: Path, trained: TrainedRun, tables: Path, tmp_path: Path) -> Iterator[Server]:
    """The server of the Compose file, with options for what it does not do otherwise."""
    command = moved(deploy.from_compose().command, places(models, trained.path, secrets, tables), drain_seconds=0)
    options = ("--follow-runs", "--drift", "--record-share=1", f"--access-log={tmp_path / 'access.log'}")
    with started([*command, *options]) as running:
        yield running


@pytest.fixture
def prometheus(server: Server, secrets: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """Prometheus with the command line and the files of the Compose file, which scrapes every second."""
    program = PROMETHEUS.require()
    host, port = own_address()
    changes = {
        "server:8000": server.url.partition("://")[2],
        "localhost:9090": f"{host}:{port}",
        "/run/secrets": str(secrets),
        "15s": "1s",
    }
    text = (MONITORING / "prometheus.yml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    words = deploy.read(deploy.COMPOSE)["services"]["prometheus"]["command"]
    folders = {"/etc/prometheus": str(tmp_path), "=/prometheus": f"={tmp_path}/data"}
    command = [program, *moved(words, folders), f"--web.listen-address={host}:{port}"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://{host}:{port}/api/v1", timeout=PATIENCE) as client:
                wait_for(lambda: process.poll() is not None or answers(client))
                assert process.poll() is None, (tmp_path / "log").read_text()
                yield client
        finally:
            process.terminate()


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/status/runtimeinfo").status_code == 200
    return False


def asked(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Return the series of an expression now."""
    answer = client.get("/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])


def test_each_panel_has_data_and_no_alert_fires(server: Server, prometheus: httpx.Client, trained: TrainedRun) -> None:
    wait_for(lambda: asked(prometheus, 'up{job="terarec"} == 1') != [])
    client = server.client()

    def is_complete() -> bool:
        """Score, let a path be missing, and return whether all expressions have series."""
        client.infer(trained.records(0, 5))
        httpx.get(f"{server.url}/nowhere", headers=BEARER)
        return all(asked(prometheus, expression) for expression in panels)

    board = deploy.read(MONITORING / "grafana" / "terarec.json")
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    values = {"$instance": ".*", "$model": ".*", "$__rate_interval": "30s"}
    panels: dict[str, str] = {}  # expression -> legend
    for target in targets:
        expression = target["expr"]
        for name, value in values.items():
            expression = expression.replace(name, value)
        panels[expression] = target["legendFormat"]
    wait_for(is_complete, every=0.5)
    for expression, legend in panels.items():
        labels = set(re.findall(r"{{(\w+)}}", legend))
        for series in asked(prometheus, expression):
            assert labels <= set(series["metric"]), expression
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            assert all(label in one["metric"] for one in asked(prometheus, series.replace("$instance", ".*")))
    (group,) = prometheus.get("/rules").json()["data"]["groups"]
    states = {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}
    (written,) = deploy.read(MONITORING / "alerts.yml")["groups"]
    assert states == {rule["alert"]: ("ok", "inactive") for rule in written["rules"]}
