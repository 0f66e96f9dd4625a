# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from terarec import __version__
from terarec.cli import diagnostics
from terarec.kernels.registry import active
from terarec.ops.onednn import linear_choice
from tests.cli.conftest import figures, terarec

pytestmark = pytest.mark.usefixtures("reports")


def test_doctor_describes_the_machine() -> None:
    reported = figures("doctor")
    assert reported["versions"]["terarec"] == __version__
    assert reported["versions"]["torch"] == torch.__version__
    assert reported["threads"]["torch"] == torch.get_num_threads()
    assert reported["cpu"]["cores"] >= reported["cpu"]["usable_cores"] >= 1
    assert reported["disk"]["total_bytes"] >= reported["disk"]["free_bytes"] > 0
    assert reported["gpu"]["available"] == torch.cuda.is_available()
    on_cpu = {row["op"]: (row["implementation"], row["why"]) for row in reported["kernels"] if row["device"] == "cpu"}
    linear = linear_choice()
    assert on_cpu.pop("linear") == (linear.implementation, linear.why)
    assert on_cpu == {op: (active(op, "cpu").implementation, active(op, "cpu").why) for op in on_cpu}
    assert len(on_cpu) > 3
    libraries = {library for extra in diagnostics.EXTRAS.values() for library in extra}
    training = reported["training"]
    assert training["device"].startswith("cuda:0" if torch.cuda.is_available() else "cpu")
    assert (training["threads"], training["precisions"][0]) == (torch.get_num_threads(), "fp32")
    assert {row["implementation"] for row in reported["kernels"]} >= set(training["kernels"]) != set()
    assert {row["library"] for row in reported["extras"]} == libraries


def test_the_compiled_core_is_right_on_this_machine() -> None:
    reported = figures("doctor")
    assert reported["ok"], reported["check"]
    assert reported["check"]["passed"]
    assert reported["check"]["why"] is None
    assert reported["check"]["largest_difference"] <= 1e-5
    assert reported["check"]["lookup_rows_per_second"] > 0
    assert reported["threads"]["instruction_set"] in {"generic", "avx2", "avx512", "neon"}


@pytest.mark.slow
def test_one_openmp_runtime_is_loaded() -> None:
    # In a process of its own: other tests load libraries that bring one of theirs.
    program = "from terarec.cli.app import run; raise SystemExit(run(['doctor', '--json']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    reported = json.loads(ended.stdout.splitlines()[-1])
    assert len(reported["threads"]["openmp_runtimes"]) <= 1  # a second team would fight the first


def test_people_see_it_too() -> None:
    ended = terarec("doctor")
    assert ended.code == 0
    assert "All is well." in ended.out
    assert torch.__version__ in ended.out


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert diagnostics.EXTRAS.keys() == project["optional-dependencies"].keys() - {"all", "docs", "dev"}
    for extra, libraries in diagnostics.EXTRAS.items():
        assert tuple(line.split(">=")[0] for line in project["optional-dependencies"][extra]) == libraries


def test_the_host_is_described_in_plain_numbers() -> None:
    memory = diagnostics.memory()
    assert memory["total_bytes"] is None or memory["total_bytes"] >= memory["available_bytes"] > 0
    assert diagnostics.huge_pages() in {"always", "madvise", "never", None}
    assert diagnostics.processor()["model"]
