# SPDX-License-Identifier: Apache-2.0
"""A device "simulated" in host memory that raises for mistakes as a GPU does; ``device.cpp`` says for which.

A process registers it at most once, and for good.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from terarec.kernels import registry
from terarec.memory import growing_rows, initial_values
from terarec.spec import run as run_spec
from terarec.train import devices
from terarec.train import run as training_run

NAME = "simulated"
SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(__file__).parents[2] / "build" / "simulated_device"
"""Where commands build it; tests build it in directories of their own."""


class Counts(NamedTuple):
    """What a host does that a GPU would make it wait for, or that hands out memory of the device.

    Kernels and the initial values of new rows are left out: on a GPU others run in place of the reference kernels.

    Attributes:
        to_host: Copies to host memory.
        to_device: Copies from host memory.
        waits: Numbers that were read, such as by ``item()``, and results whose size the host has to know.
        addresses: Addresses of tensors that were handed out.
    """

    to_host: int
    to_device: int
    waits: int
    addresses: int

    def since(self, before: Counts) -> Counts:
        """Return the counts from `before` on."""
        return Counts(*(number - earlier for number, earlier in zip(self, before, strict=True)))


_addresses = 0
_built: Path | None = None
loaded: Path | None = None
"""The library that this process has registered, for processes that it starts."""


def missing_to_build() -> str:
    """Return why the device cannot be built here; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "the simulated device is built on Linux alone"
    # Not above: importing it asks CUDA's driver where there is one, after which no rank that is forked can use a GPU.
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if not cpp_extension.check_compiler_ok_for_platform(compiler):
        return f"there is no C++ compiler {compiler!r}"
    return "" if cpp_extension.is_ninja_available() else "there is no ninja"


def build(directory: Path) -> Path:
    """Compile the backend into `directory` and return the library; that of an earlier call, if there is one.

    Compiling also loads it, and a process that loads a second one aborts: it has the same operators.
    """
    global _built
    from torch.utils import cpp_extension

    if _built is None:
        cpp_extension.load(
            "simulated_device",
            [str(SOURCE)],
            build_directory=str(directory),
            extra_cflags=["-O0"],
            is_python_module=False,
        )
        _built = directory / "simulated_device.so"
    return _built


def register(library: Path) -> torch.device:
    """Register the backend in this process and return its device."""
    global loaded
    loaded = library
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def counts() -> Counts:
    """Return the counts since the device was registered."""
    return Counts(*torch.ops.simulated_device.counts(), _addresses)


def count_accesses() -> None:
    """Leave the work of kernels out of `counts` from now on, and count the addresses that tensors hand out."""
    for op in registry.Op:
        module = importlib.import_module(f"terarec.kernels.ref.{op.module}")
        kernel = getattr(module, op, None)
        if inspect.isclass(kernel):
            for name, method in inspect.getmembers(kernel, inspect.isfunction):
                if not name.startswith("_"):
                    setattr(kernel, name, _uncounted(method))
        elif kernel is not None:
            setattr(module, op, _uncounted(kernel))
    for module in (growing_rows, initial_values):
        module.initialise_keys = _uncounted(module.initialise_keys)  # type: ignore[attr-defined]
    address_of = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        global _addresses
        _addresses += tensor.device.type == NAME
        return address_of(tensor)

    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]


def _uncounted(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose copies and waits are not counted."""

    @functools.wraps(kernel)
    def run(*arguments: Any, **options: Any) -> Any:
        torch.ops.simulated_device.set_counting(False)
        try:
            return kernel(*arguments, **options)
        finally:
            torch.ops.simulated_device.set_counting(True)

    return run


def cpu_without_wait(module: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a ``Tensor.cpu`` that does not wait for copies which a module begins."""
    waits = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        is_of_module = sys._getframe(1).f_globals["__name__"] == module
        return tensor.to("cpu", non_blocking=True) if is_of_module else waits(tensor)

    return cpu


def _module() -> types.ModuleType:
    """Return ``torch.simulated``, which has what torch asks the module of a device for."""
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        Stream=torch.Stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        # Each process has one of its own, unless a test says otherwise.
        get_device_properties=lambda device=None: types.SimpleNamespace(
            name=os.environ.get("SIMULATED_NAME", NAME), uuid=os.environ.get("SIMULATED_UUID", str(os.getpid()))
        ),
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
