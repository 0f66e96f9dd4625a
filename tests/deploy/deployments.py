# SPDX-License-Identifier: Apache-2.0
"""The command lines, ports, probes and times of the files of deploy/, as their programs would read them."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "terarec.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
TABLES = DEPLOY / "compose" / "tables.json"
MONITORING = DEPLOY / "monitoring"
KUBERNETES = DEPLOY / "kubernetes"
KSERVE = DEPLOY / "kserve"


@dataclass(frozen=True)
class Deployment:
    """How a server is started and ended.

    Attributes:
        name: What starts it.
        command: Words behind ``terarec``.
        ports: Ports at which others call it; of HTTP first.
        grace_seconds: Time between SIGTERM and SIGKILL; None where the user of an image says it.
        probes: Paths that are requested to see how it is.
    """

    name: str
    command: Sequence[str]
    ports: Sequence[int]
    grace_seconds: float | None
    probes: Sequence[str] = ()


def read(path: Path) -> Any:
    """Return the content of a file of YAML or JSON."""
    return yaml.safe_load(path.read_text())


def unit_settings() -> dict[str, list[str]]:
    """Return the values of each setting of the unit of systemd."""
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text().replace("\\\n", " "), re.MULTILINE):
        settings.setdefault(name, []).append(value)
    return settings


def instructions() -> dict[str, str]:
    """Return the last words of each instruction of the Dockerfile, which are those of the image."""
    return dict(re.findall(r"^([A-Z]+) +(.*)$", DOCKERFILE.read_text().replace("\\\n", " "), re.MULTILINE))


def health_url() -> str:
    """Return what the image's health check requests."""
    (url,) = re.findall(r"urlopen\('([^']+)'", instructions()["HEALTHCHECK"])
    return str(url)


def health_check(url: str) -> str:
    """Return the program of the image's health check, for a server at another URL."""
    python, option, program = json.loads(instructions()["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, option) == ("python", "-c")
    return str(program).replace("http://127.0.0.1:8000", url)


def from_unit() -> Deployment:
    """Return the server of systemd."""
    settings = unit_settings()
    program, *command = shlex.split(settings["ExecStart"][0])
    assert Path(program).name == "terarec"
    return Deployment("systemd", command, (8000, 8001), float(settings["TimeoutStopSec"][0]))


def from_image() -> Deployment:
    """Return the server of the image."""
    image = instructions()
    assert json.loads(image["ENTRYPOINT"]) == ["terarec"]
    path = "/" + health_url().partition("://")[2].partition("/")[2]
    return Deployment("image", json.loads(image["CMD"]), tuple(map(int, image["EXPOSE"].split())), None, (path,))


def from_compose() -> Deployment:
    """Return the server of the Compose file."""
    server = read(COMPOSE)["services"]["server"]
    ports = tuple(int(port.rpartition(":")[2]) for port in server["ports"])
    return Deployment("Compose", server["command"], ports, float(server["stop_grace_period"].removesuffix("s")))


def from_kubernetes() -> Deployment:
    """Return the server of the Deployment."""
    pod = read(KUBERNETES / "base" / "deployment.yaml")["spec"]["template"]["spec"]
    return _of_pod("Kubernetes", pod, pod["terminationGracePeriodSeconds"])


def from_kserve() -> Deployment:
    """Return the server of the runtime of KServe."""
    predictor = read(KSERVE / "inferenceservice.yaml")["spec"]["predictor"]
    runtime = read(KSERVE / "runtime.yaml")["spec"]
    return _of_pod("KServe", runtime, predictor["terminationGracePeriodSeconds"])


def named(words: Iterable[str]) -> tuple[str, ...]:
    """Return a command line with the names that Kubernetes and KServe fill in."""
    service = read(KSERVE / "inferenceservice.yaml")["metadata"]["name"]
    return tuple(_replaced(words, {"$(NAMESPACE)": "shop", "{{.Name}}": service}))


def _of_pod(name: str, pod: dict[str, Any], grace: float) -> Deployment:
    (container,) = pod["containers"]
    ports = tuple(port["containerPort"] for port in container["ports"])
    probes = tuple(container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness"))
    return Deployment(name, named(container["args"]), ports, grace, probes)


def deployments() -> list[Deployment]:
    """Return all servers."""
    return [from_unit(), from_image(), from_compose(), from_kubernetes(), from_kserve()]


def _replaced(words: Iterable[str], variables: dict[str, str]) -> Iterator[str]:
    for word in words:
        for name, value in variables.items():
            word = word.replace(name, value)
        yield word


def moved(command: Sequence[str], places: dict[str, object], **options: object) -> list[str]:
    """Return a command line for a test, on free ports.

    Args:
        command: The command line.
        places: Text in a path -> what takes its place.
        options: Option, without hyphens -> its value, in place of another one.
    """
    values = {
        f"--{name.replace('_', '-')}": str(value) for name, value in {"port": 0, "grpc_port": 0, **options}.items()
    }
    words: list[str] = []
    for word in command:
        option, equals, _ = word.partition("=")
        if words and words[-1] in values:
            words.append(values[words[-1]])
        else:
            words += [option, values[option]] if equals and option in values else [word]
    return list(_replaced(words, {name: str(path) for name, path in places.items()}))


def expressions() -> dict[str, list[str]]:
    """Return the expressions of PromQL of the dashboard's panels and of the alerts, by their names."""
    panels = read(MONITORING / "grafana" / "terarec.json")["panels"]
    panel_expressions = {panel["title"]: [target["expr"] for target in panel.get("targets", ())] for panel in panels}
    (group,) = read(MONITORING / "alerts.yml")["groups"]
    return panel_expressions | {rule["alert"]: [rule["expr"]] for rule in group["rules"]}


def metric_names() -> set[str]:
    """Return the names of the metrics in `expressions`."""
    text = " ".join(expression for group in expressions().values() for expression in group)
    return set(re.findall(r"\b(?:terarec|process)_\w+", text))
