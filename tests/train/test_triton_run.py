# SPDX-License-Identifier: Apache-2.0
"""Training end to end on the Triton kernels, interpreted, equals training on the compiled core."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

from tests.params import in_every_run
from tests.processes import run_python
from tests.train.kernel_run import CASES, CPU, MODELS, OPS, assert_follows, train
from tests.train.small_run import assert_same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Return what a process with Triton's kernels computes."""
    directory = tmp_path_factory.mktemp("triton")
    environment = {"TRITON_INTERPRET": "1", "TERAREC_KERNELS": "triton"}
    result = run_python("tests.train.kernel_run", directory, environment=environment, cwd=ROOT, is_module=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return torch.load(directory / "result.pt")


@pytest.mark.slow
@pytest.mark.parametrize("tables", MODELS)
def test_training_on_triton_equals_training_on_the_core(tables, interpreted, tmp_path):
    found, expected = interpreted[tables], train(tmp_path, MODELS[tables])
    assert found["kernels"] == dict.fromkeys(OPS, "triton")
    assert expected["kernels"] == dict.fromkeys(OPS, "cpu")
    assert_follows(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["static", "dynamic"])
def test_tables_in_tiers_equal_those_in_memory(tables, interpreted):
    plain, tiered = interpreted[tables], interpreted[f"{tables} in tiers"]
    assert tiered["losses"] == plain["losses"]
    assert_same(tiered["weights"], plain["weights"])


# On the CPU the others compare a run with itself, over tables that other tests train on.
@pytest.mark.parametrize("name", in_every_run(["a resumed run with dropout"], CASES))
def test_the_cases_for_a_gpu_hold_on_the_cpu(name):
    CASES[name](CPU)
