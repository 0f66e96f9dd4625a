# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: each is accepted by its own tool, the server takes their options, and they agree."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from terarec.io.files import read_json
from terarec.serve import run
from terarec.serve.workers import STOP_SECONDS
from terarec.spec import ServingSpec
from tests.cli.conftest import terarec
from tests.deploy import deployments as deploy
from tests.deploy.deployments import DEPLOY, KSERVE, KUBERNETES, MONITORING, Deployment
from tests.programs import (
    CHECK_JSONSCHEMA,
    HADOLINT,
    KUBECTL,
    KUBERNETES_VALIDATE,
    PROMTOOL,
    SYSTEMD_ANALYZE,
    YAMLLINT,
    Program,
    lacks,
)

PROBES = ("startup", "readiness", "liveness")
ALL = [pytest.param(one, id=one.name) for one in deploy.deployments()]


def check(program: Program, *arguments: object, cwd: Path | None = None) -> str:
    """Run a program that must accept a file; returns what it prints."""
    command = [program.require(), *map(str, arguments)]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def captured(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> ServingSpec:
    """Return what a command line would serve with."""
    specs: list[ServingSpec] = []
    monkeypatch.setattr(run, "serve", lambda _source, spec, *_, **__: specs.append(spec))
    ended = terarec(*[word.replace("/etc/terarec/tables.json", str(deploy.TABLES)) for word in command])
    assert ended.code == 0, ended.err
    return specs[0]


@pytest.mark.parametrize("deployment", ALL)
def test_the_server_takes_every_option(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = captured(deployment.command, monkeypatch)
    assert [spec.port, *([] if spec.grpc_port is None else [spec.grpc_port])] == list(deployment.ports)
    # A container's loopback is reached by nobody else.
    assert spec.host == ("127.0.0.1" if deployment.name == "systemd" else "0.0.0.0")
    if deployment.grace_seconds is not None:
        assert spec.drain_seconds + STOP_SECONDS < deployment.grace_seconds


def test_a_job_promotes_with_options_that_exist(tmp_path: Path) -> None:
    (container,) = deploy.read(KUBERNETES / "promote.yaml")["spec"]["template"]["spec"]["containers"]
    ended = terarec(*[word.replace("/runs", str(tmp_path)) for word in container["args"]])
    assert (ended.code, str(tmp_path / "today" / "run") in ended.err) == (1, True)  # no such run


def test_the_services_of_the_compose_file_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = deploy.read(deploy.COMPOSE)
    services = compose["services"]
    port = deploy.from_compose().ports[0]
    assert deploy.health_url().startswith(f"http://127.0.0.1:{port}/")
    (job,) = [
        job for job in deploy.read(MONITORING / "prometheus.yml")["scrape_configs"] if job["job_name"] == "terarec"
    ]
    assert job["static_configs"] == [{"targets": [f"server:{port}"]}]
    assert os.path.basename(job["authorization"]["credentials_file"]) in services["prometheus"]["secrets"]
    (source,) = deploy.read(MONITORING / "grafana" / "datasources.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    (tier,) = read_json(deploy.TABLES)["tiers"]
    assert tier["address"] == "tables:6379"
    assert "--port" not in services["tables"]["command"]
    assert "server" in captured(deploy.from_compose().command, monkeypatch).access.allowed_hosts
    assert {name for service in services.values() for name in service.get("secrets", ())} == set(compose["secrets"])
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (deploy.COMPOSE.parent / volume.partition(":")[0]).is_file()


def test_the_manifests_of_kubernetes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = deploy.read(KUBERNETES / "base" / "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    service = deploy.read(KUBERNETES / "base" / "service.yaml")
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [(port["name"], port["port"], port["targetPort"]) for port in service["spec"]["ports"]] == [
        (name, number, name) for name, number in numbers.items()
    ]
    assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in PROBES} == {"http"}
    access = captured(deploy.from_kubernetes().command, monkeypatch).access
    assert service["metadata"]["name"] in access.allowed_hosts
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for file in (access.token_file, access.admin_token_file):
        assert os.path.dirname(str(file)) in mounts


def test_the_manifests_of_kserve_agree() -> None:
    runtime = deploy.read(KSERVE / "runtime.yaml")
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == str(deploy.from_kserve().ports[0])
    model = deploy.read(KSERVE / "inferenceservice.yaml")["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


def test_containers_run_without_rights() -> None:
    containers = [
        (pod["securityContext"], container)
        for file in ("base/deployment.yaml", "promote.yaml")
        for pod in [deploy.read(KUBERNETES / file)["spec"]["template"]["spec"]]
        for container in pod["containers"]
    ]
    containers += [({}, container) for container in deploy.read(KSERVE / "runtime.yaml")["spec"]["containers"]]
    user = int(deploy.instructions()["USER"].partition(":")[0])
    for pod, container in containers:
        rights = {**pod, **container["securityContext"]}
        assert (rights["runAsUser"], rights["runAsNonRoot"], rights["readOnlyRootFilesystem"]) == (user, True, True)
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert not rights["allowPrivilegeEscalation"]
        assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert user != 0
    for service in deploy.read(deploy.COMPOSE)["services"].values():
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def copied_names() -> set[str]:
    """Return what the Dockerfile copies from the project's root."""
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", deploy.DOCKERFILE.read_text(), re.MULTILINE)
    return {name for line in copied for name in line.split()}


def test_the_image_gets_what_it_copies() -> None:
    ignored = (deploy.DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split("\n")
    assert copied_names() == {line[1:] for line in ignored if line.startswith("!")}
    assert all((deploy.ROOT / name).exists() for name in copied_names())
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", deploy.DOCKERFILE.read_text(), re.MULTILINE)
    project = tomllib.loads((deploy.ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.slow
def test_the_package_is_made_of_what_the_image_copies(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in copied_names():
        path = deploy.ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(path, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source]
    subprocess.run(list(map(str, build)), check=True)
    (wheel,) = tmp_path.glob("terarec-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    sources = {str(path.relative_to(source / "src")) for path in (source / "src" / "terarec").rglob("*.py")}
    assert sources <= names
    assert "terarec/serve/http/dashboard.html" in names
    assert any(name.startswith("terarec/kernels/cpu/_embedding.") and name.endswith(".so") for name in names)


def test_hadolint_accepts_the_dockerfile() -> None:
    check(HADOLINT, deploy.DOCKERFILE)


def test_yamllint_accepts_all_files_of_yaml() -> None:
    check(YAMLLINT, "--strict", "-c", DEPLOY / "yamllint.yaml", DEPLOY, Path(__file__).parent)


def test_the_compose_file_is_one_of_its_specification() -> None:
    check(CHECK_JSONSCHEMA, "--builtin-schema", "vendor.compose-spec", deploy.COMPOSE)


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is for Linux")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / deploy.UNIT.name
    # Its program must exist, which is that of these tests here.
    unit.write_text(deploy.UNIT.read_text().replace("/opt/terarec/bin/terarec", sys.executable))
    check(SYSTEMD_ANALYZE, "verify", "--man=no", "--recursive-errors=no", unit)
    # The exposure of a unit without any restriction is 96.
    check(SYSTEMD_ANALYZE, "security", "--offline=yes", "--threshold=20", unit)


def test_kubernetes_accepts_the_manifests(tmp_path: Path) -> None:
    documents = [deploy.read(file) for file in sorted(KUBERNETES.glob("base/*.yaml")) if file.stem != "kustomization"]
    job = deploy.read(KUBERNETES / "promote.yaml")
    job["metadata"]["name"] = job["metadata"].pop("generateName") + "x"
    # The schemas of Kubernetes know no runtimes of KServe, whose containers and volumes are those of a pod.
    runtime = deploy.read(KSERVE / "runtime.yaml")["spec"]
    pod = {"containers": runtime["containers"], "volumes": runtime["volumes"]}
    documents += [job, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kserve"}, "spec": pod}]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(documents))
    printed = check(KUBERNETES_VALIDATE, "--strict", tmp_path / "all.yaml")
    assert printed.count(" passed for resource ") == len(documents)


def test_kustomize_builds_the_base_and_its_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = re.search(r"v1\.(\d+)", check(KUBECTL, "version", "--client"))
    if version is None or int(version[1]) < 27:
        pytest.skip(lacks("kubectl 1.27", "apt-get install kubernetes-client"))
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    both = {"resources": ["../kubernetes/base"], "components": ["../kubernetes/tls", "../kubernetes/servicemonitor"]}
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "kustomization.yaml").write_text(json.dumps(both))
    built = {
        folder: {
            one["kind"]: one for one in yaml.safe_load_all(check(KUBECTL, "kustomize", folder, cwd=tmp_path)) if one
        }
        for folder in ("kubernetes/base", "both")
    }
    assert set(built["kubernetes/base"]) == {"PersistentVolumeClaim", "Deployment", "Service", "PodDisruptionBudget"}
    assert set(built["both"]) == {*built["kubernetes/base"], "ServiceMonitor"}
    for objects in built.values():
        pods = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "PodDisruptionBudget"):
            assert objects[kind]["spec"]["selector"]["matchLabels"].items() <= pods.items()
        assert objects["Service"]["spec"]["selector"].items() <= pods.items()
        pod = objects["Deployment"]["spec"]["template"]["spec"]
        for constraint in pod["topologySpreadConstraints"]:
            assert constraint["labelSelector"]["matchLabels"].items() <= pods.items()
    monitor, service = built["both"]["ServiceMonitor"], built["both"]["Service"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "terarec"
    assert [point["port"] for point in monitor["spec"]["endpoints"]] == [service["spec"]["ports"][0]["name"]]
    (container,) = built["both"]["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "readiness", "liveness")} == {
        "HTTPS"
    }
    access = captured(deploy.named(container["args"]), monkeypatch).access
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for file in (access.certificate, access.key):
        assert os.path.dirname(str(file)) in mounts


def test_prometheus_accepts_its_configuration_and_each_alert_fires(tmp_path: Path) -> None:
    for file in (MONITORING / "prometheus.yml", MONITORING / "alerts.yml", Path(__file__).parent / "alerts_test.yml"):
        shutil.copy(file, tmp_path)
    (tmp_path / "token").write_text("x")
    text = (tmp_path / "prometheus.yml").read_text().replace("/run/secrets", str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(text)
    check(PROMTOOL, "check", "config", "prometheus.yml", cwd=tmp_path)
    check(PROMTOOL, "test", "rules", "alerts_test.yml", cwd=tmp_path)
    (group,) = deploy.read(MONITORING / "alerts.yml")["groups"]
    tests = deploy.read(Path(__file__).parent / "alerts_test.yml")["tests"]
    tried = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tried == {rule["alert"] for rule in group["rules"]}


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    board = deploy.read(MONITORING / "grafana" / "terarec.json")
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables
    taken: list[tuple[int, int]] = []
    for panel in panels:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        assert columns.stop <= 24
        taken += [(column, row) for column in columns for row in rows]
    assert len(taken) == len(set(taken))
    (provider,) = deploy.read(MONITORING / "grafana" / "dashboards.yml")["providers"]
    mounted = [volume.split(":")[1] for volume in deploy.read(deploy.COMPOSE)["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/terarec.json" in mounted
