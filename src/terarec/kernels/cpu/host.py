# SPDX-License-Identifier: Apache-2.0
"""The compiled core, loaded after torch so that it finds its threads: instruction sets, faults, memory of results."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.errors import ConfigError, KernelError
from terarec.kernels.contract import BadKeyError, bad_offsets
from terarec.kernels.cpu import _embedding as _embedding
from terarec.kernels.environment import forced_cpu


def threads() -> tuple[int, str]:
    """Return the number of threads that a kernel uses, which is torch's, and the name of their OpenMP runtime."""
    return torch.get_num_threads(), _embedding.parallel_runtime()


def features() -> str:
    """Return the instruction set in use, one of `terarec.kernels.environment.CPU_SETS`."""
    name: str = _embedding.selected()
    return name


def instruction_sets() -> list[str]:
    """Return the instruction sets that this CPU runs, slowest first."""
    names: list[str] = _embedding.runnable()
    return names


def select(name: str) -> None:
    """Use one instruction set's kernels from now on; "auto" takes the best that this CPU runs.

    Raises:
        KernelError: A name that is unknown or that this CPU cannot run.
    """
    if not _embedding.select(name):
        raise KernelError("CPU kernels", f"got {name!r}, expected one of {', '.join(instruction_sets())}, 'auto'")


def _use_one_thread() -> None:
    """Use one thread after a fork, which does not copy OpenMP's threads: OpenMP would wait for them forever."""
    torch.set_num_threads(1)


# A worker of torch's DataLoader is such a child. Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_use_one_thread)
# Once, before the first call: the core reads all tensors through it.
_embedding.use_exchange_api(torch.Tensor.__dlpack_c_exchange_api__)
if (_forced := forced_cpu()) is not None:
    select(_forced)


Report = tuple[int, int, int, int, int]
"""(kind, gradient, feature, position, value), kind 0 meaning that nothing is wrong."""
_OFFSET = 1


def error_of(report: Report, num_keys: Sequence[int], layouts: Sequence[Tensor]) -> BadKeyError | ConfigError:
    """Return the report of a kernel as an error.

    Args:
        report: Report of the core, whose kind is not 0.
        num_keys: Number of keys of each gradient, or of the lookup.
        layouts: Layout array of each.

    Returns:
        A `BadKeyError` for a key outside its table, a `ConfigError` for offsets that fall or do not cover the keys.
    """
    kind, gradient, feature, position, value = report
    if kind == _OFFSET:
        return bad_offsets(position, value, num_keys[gradient])
    return BadKeyError(feature, position, value, int(layouts[gradient][feature, 1]), gradient)


_OWN_FLOATS = 1 << 20
# A page of 4 KiB costs some 2 us when it is first touched: of a search among 10 M keys a fifth (two Zen 3 cores).
_OWN_INTEGERS = 1 << 18


def empty_floats(rows: int, columns: int) -> Tensor:
    """Return float32[rows, columns], its content unspecified."""
    # Large results come from memory that the core keeps: new pages take longer than filling them (result_memory.cpp).
    if rows * columns >= _OWN_FLOATS:
        memory = _embedding.allocate_result(rows, columns)
        if memory is not None:
            return torch.from_numpy(memory)
    return torch.empty(rows, columns)


def empty_integers(count: int) -> Tensor:
    """Return int64[count], its content unspecified."""
    if count >= _OWN_INTEGERS:
        memory = _embedding.allocate_result(count, 2)
        if memory is not None:
            # Memory of floats, two to an integer.
            return torch.from_numpy(memory).view(torch.int64).flatten()
    return torch.empty(count, dtype=torch.int64)
