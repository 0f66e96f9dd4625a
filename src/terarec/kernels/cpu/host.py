"""The compiled core, loaded after torch so that it finds torch's threads, and what it runs on."""

from __future__ import annotations

import os

import torch

from terarec.errors import KernelError
from terarec.kernels.cpu import _embedding
from terarec.kernels.environment import forced_cpu

__all__ = ["_embedding", "features", "instruction_sets", "select", "threads"]


def threads() -> tuple[int, str]:
    """Threads that a kernel uses (torch's), and the runtime whose team they are."""
    return torch.get_num_threads(), _embedding.parallel_runtime()


def features() -> str:
    """The instruction set in use: "generic", "avx2" or "avx512"."""
    name: str = _embedding.selected()
    return name


def instruction_sets() -> list[str]:
    """The instruction sets that this CPU runs, slowest first."""
    names: list[str] = _embedding.runnable()
    return names


def select(name: str) -> None:
    """Use one instruction set's kernels from now on; "auto" takes the best that this CPU runs.

    Raises:
        KernelError: a name that is unknown or that this CPU cannot run.
    """
    if not _embedding.select(name):
        raise KernelError(f"CPU kernels: got {name!r}, expected one of {', '.join(instruction_sets())}, 'auto'")


def _use_one_thread() -> None:
    """Leave the team of threads that a fork does not bring along; OpenMP would wait for it for ever."""
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_use_one_thread)
_embedding.use_exchange_api(torch.Tensor.__dlpack_c_exchange_api__)
if (_forced := forced_cpu()) is not None:
    select(_forced)
