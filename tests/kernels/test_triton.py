"""Every Triton kernel against the plain ones, interpreted on the CPU; ``benchmarks/gpu.py`` compiles the same cases."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

from tests.kernels.triton_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_triton(name):
    CASES[name](torch.device("cpu"))
