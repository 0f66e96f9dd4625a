# SPDX-License-Identifier: Apache-2.0
"""The servers of deploy/, started by their command lines: probes, tokens, hosts, metrics and the end."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient import grpc as triton

from terarec.serve import InferenceClient
from tests.deploy import deployments as deploy
from tests.deploy.deployments import Deployment, moved
from tests.deploy.servers import ADMIN_TOKEN, BEARER, places, started
from tests.processes import run_python
from tests.programs import STRACE, SYSTEMD_ANALYZE, UNSHARE
from tests.serve.conftest import TrainedRun
from tests.serve.test_workers import children
from tests.waiting import PATIENCE, wait_for

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
# Those of one machine and of a cluster here, the others in the long tests.
SERVERS = [
    pytest.param(one, id=one.name, marks=() if one.name in ("systemd", "Kubernetes") else pytest.mark.slow)
    for one in deploy.deployments()
]


def sample_names(text: str) -> set[str]:
    """Return the names that samples of metrics have, also of those that have none yet."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    families = text_string_to_metric_families(text)
    return {family.name + ending for family in families for ending in endings.get(family.type, ())}


@pytest.mark.parametrize("deployment", SERVERS)
def test_the_server_answers_as_its_files_say(
    deployment: Deployment, models: Path, secrets: Path, trained: TrainedRun, request: pytest.FixtureRequest
) -> None:
    needs_tables = any(word.startswith("--tables") for word in deployment.command)
    tables = request.getfixturevalue("tables") if needs_tables else None
    paths = places(models, trained.path, secrets, tables)
    # Of the image's own command, whose words have no "=" before their paths.
    command = [str(models) if word == "/models" else word for word in moved(deployment.command, paths, drain_seconds=0)]
    has_tokens = any(word.startswith("--token-file") for word in command)
    hosts = next((word.partition("=")[2] for word in command if word.startswith("--allowed-hosts=")), "localhost")
    records = trained.records(0, 3)
    with started(command) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for path in (*deployment.probes, urlsplit(deploy.health_url()).path):
            assert http.get(path).status_code == 200  # of probes, which have no token
        for host in hosts.split(","):
            assert server.client(Host=f"{host}:{deployment.ports[0]}").infer(records)["score"].shape == (3, 1)
        infer = "/v2/models/shop/infer"
        assert http.post(infer, json={}).status_code == (401 if has_tokens else 400)
        if hosts != "*":
            assert http.post(infer, json={}, headers={**BEARER, "Host": "elsewhere.example"}).status_code == 403
        unload = "/v2/repository/models/shop/unload"
        assert http.post(unload, json={}, headers=BEARER).status_code == (401 if has_tokens else 403)
        if has_tokens:
            assert http.post(unload, json={}, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}).status_code == 503
            reads_all = deployment.name == "systemd"  # on loopback an index needs no token
            assert http.get("/metrics").status_code == (200 if reads_all else 401)
        metrics = http.get("/metrics", headers=BEARER)
        assert deploy.metric_names() - sample_names(metrics.text) == set()
        if server.grpc is not None:
            with contextlib.closing(triton.InferenceServerClient(server.grpc)) as client:
                assert client.is_server_ready()
                assert client.is_model_ready("shop")
        check_health = deploy.health_check(server.url)
        assert run_python(check_health).returncode == 0
        server.process.send_signal(signal.SIGTERM)
        ended = server.process.wait()
        assert ended.returncode == 0, ended.stderr
        assert run_python(check_health).returncode != 0


@pytest.mark.slow
def test_the_server_is_not_ready_while_it_drains(models: Path, secrets: Path, trained: TrainedRun) -> None:
    """With the time of the manifests: requests are answered until it is over."""
    deployment = deploy.from_kubernetes()
    with (
        started(moved(deployment.command, places(models, trained.path, secrets))) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
    ):
        assert http.get(deployment.probes[1]).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: http.get(deployment.probes[1]).status_code == 503)
        assert http.get(deployment.probes[2]).status_code == 200
        # A connection that comes now, too.
        assert server.client().infer(trained.records(0, 2))["score"].shape == (2, 1)
        assert server.process.wait().returncode == 0


SANDBOX = """
set -e
mount -t tmpfs none /mnt
mkdir /mnt/models /mnt/secrets /mnt/tmp
touch /mnt/calls
mount --bind {calls} /mnt/calls
cp -r {models}/. /mnt/models
cp {secrets}/* /mnt/secrets
chown -R 61234:61234 /mnt/secrets /mnt/tmp
chmod 0700 /mnt/secrets /mnt/tmp
mount -o remount,bind,ro /
cd /
exec setpriv --reuid 61234 --regid 61234 --clear-groups --no-new-privs \\
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search \\
    {strace} -f -qq -c -U name -o /mnt/calls env -i TMPDIR=/mnt/tmp {command}
"""
"""The user has no name and no home, and may write to a /tmp of its own alone. It may read all, since this Python may be
in a home that others may not enter."""


def allowed_calls() -> set[str]:
    """Return the system calls that the unit's filter allows."""
    program = SYSTEMD_ANALYZE.require()

    def group(name: str) -> set[str]:
        listed = subprocess.run([program, "syscall-filter", name], capture_output=True, text=True, check=True).stdout
        words = {word for line in listed.splitlines()[1:] if (word := line.strip()) and not word.startswith("#")}
        return set().union(*[group(word) if word.startswith("@") else {word} for word in words])

    allowed: set[str] = set()
    for setting in deploy.unit_settings()["SystemCallFilter"]:
        calls = set().union(*map(group, setting.removeprefix("~").split()))
        allowed = allowed - calls if setting.startswith("~") else allowed | calls
    return allowed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts, as root of Linux alone may")
def test_the_unit_leaves_the_server_what_it_needs(
    models: Path, secrets: Path, trained: TrainedRun, tmp_path: Path
) -> None:
    """Of rights, of places to write, and of system calls."""
    paths: dict[str, object] = {"/srv/terarec/models": "/mnt/models", "%d": "/mnt/secrets"}
    command = [sys.executable, "-m", "terarec", *moved(deploy.from_unit().command, paths, drain_seconds=0), "--json"]
    calls = tmp_path / "calls"
    calls.touch()
    calls.chmod(0o666)
    script = SANDBOX.format(
        models=models, secrets=secrets, calls=calls, strace=STRACE.require(), command=shlex.join(command)
    )
    words = [UNSHARE.require(), "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            at = json.loads(line) if line else {"error": process.stderr.read()}
            assert "url" in at, at
            client = InferenceClient(at["url"], "shop", PATIENCE, headers=BEARER)
            assert client.infer(trained.records(0, 3))["score"].shape == (3, 1)
            answer = httpx.post(f"{at['url']}/v1/repository/models/shop/promote", json={"version": 2}, headers=ADMIN)
            assert answer.json() == {"error": "/mnt/models/shop/pointer.json: cannot be changed: Permission denied"}
            (server,) = children(process.pid)  # of strace, which passes no signals on
            os.kill(server, signal.SIGTERM)
            _, log = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert "version 1 answers" in log
    used = set(re.findall(r"^\w+$", calls.read_text(), re.MULTILINE)) - {"syscall", "total"}  # of its table
    assert {"openat", "epoll_wait"} <= used
    assert used - allowed_calls() == set()
