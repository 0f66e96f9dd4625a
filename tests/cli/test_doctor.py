import tomllib
from pathlib import Path

import torch

from terarec import __version__
from terarec.cli import diagnostics
from terarec.kernels.registry import active
from terarec.ops import linear_choice
from tests.cli.conftest import figures, terarec


def test_doctor_tells_what_is_there() -> None:
    told = figures("doctor")
    assert told["versions"]["terarec"] == __version__
    assert told["versions"]["torch"] == torch.__version__
    assert told["threads"]["torch"] == torch.get_num_threads()
    assert told["cpu"]["cores"] >= told["cpu"]["usable_cores"] >= 1
    assert told["disk"]["total_bytes"] >= told["disk"]["free_bytes"] > 0
    assert told["gpu"]["available"] == torch.cuda.is_available()
    on_cpu = {row["op"]: (row["implementation"], row["why"]) for row in told["kernels"] if row["device"] == "cpu"}
    linear = linear_choice()
    assert on_cpu.pop("linear") == (linear.implementation, linear.why)
    assert on_cpu == {op: (active(op, "cpu").implementation, active(op, "cpu").why) for op in on_cpu}
    assert len(on_cpu) > 3
    libraries = {
        "starlette",
        "uvicorn",
        "matplotlib",
        "jinja2",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "tensorboard",
        "mlflow-skinny",
    }
    training = told["training"]
    assert training["device"].startswith("cuda:0" if torch.cuda.is_available() else "cpu")
    assert (training["threads"], training["precisions"][0]) == (torch.get_num_threads(), "fp32")
    assert {row["implementation"] for row in told["kernels"]} >= set(training["kernels"]) != set()
    assert {row["library"] for row in told["extras"]} == libraries


def test_the_compiled_core_is_right_on_this_machine() -> None:
    told = figures("doctor")
    assert told["ok"], told["check"]
    assert told["check"]["passed"]
    assert told["check"]["why"] is None
    assert told["check"]["largest_difference"] <= 1e-5
    assert told["check"]["lookup_rows_per_second"] > 0
    assert len(told["threads"]["openmp_runtimes"]) <= 1  # a second team would fight the first
    assert told["threads"]["instruction_set"] in {"generic", "avx2", "avx512", "neon"}


def test_people_see_it_too() -> None:
    ended = terarec("doctor")
    assert ended.code == 0
    assert "All is well." in ended.out
    assert torch.__version__ in ended.out


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra, libraries in diagnostics.EXTRAS.items():
        assert tuple(line.split(">=")[0] for line in project["optional-dependencies"][extra]) == libraries


def test_the_host_is_described_in_plain_numbers() -> None:
    memory = diagnostics.memory()
    assert memory["total_bytes"] is None or memory["total_bytes"] >= memory["available_bytes"] > 0
    assert diagnostics.huge_pages() in {"always", "madvise", "never", None}
    assert diagnostics.processor()["model"]
