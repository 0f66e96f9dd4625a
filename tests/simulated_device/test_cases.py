# SPDX-License-Identifier: Apache-2.0
"""All cases that compare a device with the CPU, on a simulated device that raises for mistakes as a GPU does."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.device_cases import MODULES
from tests.processes import run_python
from tests.simulated_device.device import build, missing_to_build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NEEDS_TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is installed on Linux alone")
LEFT_OUT = dict.fromkeys(
    ("layer gru", "model dien", "model dien-plain", "model gru4rec"),
    "PyTorch runs a GRU on accelerators by a fused kernel that the CPU lacks",
)
"""Case -> why it cannot run on the simulated device."""
WRONG_INTERPRETED = {
    "rows imported into a dynamic bfloat16 table": "the interpreter truncates initial values to bfloat16",
}
"""Case -> why it fails on interpreted kernels of Triton, though it holds on a GPU."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the compiled backend; skip the test where it cannot be compiled."""
    if reason := missing_to_build():
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("simulated_device"))


def check(library, module, kernels="ref", left_out=()):
    """Raise unless all cases of a module hold but those left out."""
    cases = importlib.import_module(module).CASES
    tried = [name for name in cases if name not in left_out]
    # A process registers the backend for good.
    arguments = (library, kernels, module, *(name for name in cases if name not in tried))
    environment = {"TRITON_INTERPRET": "1"}
    ended = run_python(
        "tests.simulated_device.run_cases", *arguments, environment=environment, cwd=ROOT, is_module=True
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert ended.stdout.count("right ") == len(tried)


@pytest.mark.parametrize("module", ["mistake_cases", "wait_cases"])
def test_mistakes_are_reported(module, library):
    check(library, f"tests.simulated_device.{module}")


@pytest.mark.parametrize(
    "kind",
    # The kernels that the cases of "kernels" compare with the reference are Triton's.
    [pytest.param(kind, marks=NEEDS_TRITON if kind == "kernels" else ()) for kind in MODULES],
)
def test_cases_hold(kind, library):
    check(library, MODULES[kind], left_out=LEFT_OUT)


@NEEDS_TRITON
@pytest.mark.parametrize("kind", ["stores", "checkpoints"])
def test_cases_hold_on_interpreted_kernels(kind, library):
    check(library, MODULES[kind], "triton", left_out=LEFT_OUT | WRONG_INTERPRETED)


@NEEDS_TRITON
def test_cases_left_out_are_there():
    names = {name for module in MODULES.values() for name in importlib.import_module(module).CASES}
    assert LEFT_OUT.keys() | WRONG_INTERPRETED.keys() <= names
