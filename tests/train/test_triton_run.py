"""Training end to end on the Triton kernels, interpreted, equals training on the compiled core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

from tests.train.kernel_run import BEFORE_STOP, MODELS, OPS, STEPS, train

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Both compute in float32 and add in different orders; AdaGrad's first steps divide by small sums."""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What a process gives whose kernels are Triton's."""
    directory = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TERAREC_KERNELS": "triton"}
    program = [sys.executable, "-m", "tests.train.kernel_run", str(directory), *MODELS]
    result = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return torch.load(directory / "result.pt")


@pytest.mark.parametrize("tables", MODELS)
def test_training_on_triton_equals_training_on_the_core(tables, interpreted, tmp_path):
    found, expected = interpreted[tables], train(tmp_path, tables)
    assert found["kernels"] == dict.fromkeys(OPS, "triton")
    assert expected["kernels"] == dict.fromkeys(OPS, "cpu")
    assert len(found["losses"]) == STEPS > BEFORE_STOP
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], tensor, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )
