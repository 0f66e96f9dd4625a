# SPDX-License-Identifier: Apache-2.0
"""A device "simulated" in host memory that raises for mistakes as a GPU does; ``device.cpp`` says for which.

A process registers it at most once, and for good.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils import cpp_extension

from terarec.kernels import registry
from terarec.spec import run as run_spec
from terarec.train import devices
from terarec.train import run as training_run

NAME = "simulated"
SOURCE = Path(__file__).with_name("device.cpp")


def missing_to_build() -> str:
    """Return why the device cannot be built here; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "the simulated device is built on Linux alone"
    compiler = cpp_extension.get_cxx_compiler()
    if not cpp_extension.check_compiler_ok_for_platform(compiler):
        return f"there is no C++ compiler {compiler!r}"
    return "" if cpp_extension.is_ninja_available() else "there is no ninja"


def build(directory: Path) -> Path:
    """Compile the backend into `directory` and return the library."""
    cpp_extension.load(
        "simulated_device", [str(SOURCE)], build_directory=str(directory), extra_cflags=["-O0"], is_python_module=False
    )
    return directory / "simulated_device.so"


def register(library: Path) -> torch.device:
    """Register the backend in this process and return its device."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def _module() -> types.ModuleType:
    """Return ``torch.simulated``, which has what torch asks the module of a device for."""
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        # Operators run on the CPU and draw from its generator.
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        _is_in_bad_fork=lambda: False,
    )
    return module


def treat_as_gpu(*, interprets_triton: bool = False) -> None:
    """Make terarec treat the device as a GPU in this process, and torch where it treats PrivateUse1 unlike CUDA.

    Args:
        interprets_triton: Whether to run the kernels of Triton, interpreted, instead of the reference kernels.
    """
    if interprets_triton:
        registry._DEVICES["triton"] = ("cuda", NAME)
    run_spec.DEVICE_PATTERN += rf"|{NAME}(:\d+)?"
    devices.resolve_device = training_run.resolve_device = partial(_resolve, devices.resolve_device)  # type: ignore[attr-defined]
    # `Module.to` keeps the parameters, with other memory, for CUDA, and replaces them by others for PrivateUse1.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.sparse_coo_tensor = _dense_of_rows


def _resolve(of_terarec: Callable[[str], torch.device], name: str) -> torch.device:
    """Return the device called `name`, the simulated one or what `of_terarec` returns."""
    return torch.device(name) if name.startswith(NAME) else of_terarec(name)


def _dense_of_rows(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], **_: bool) -> torch.Tensor:
    """Return a sparse tensor of rows as a dense one: PrivateUse1 has no sparse kernels."""
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_add_(0, indices[0], values)
