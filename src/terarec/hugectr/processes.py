# SPDX-License-Identifier: Apache-2.0
"""The processes that torchrun or mpirun started with this one, which train a script's models together."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from terarec.hugectr.errors import as_hugectr_errors
from terarec.kernels.environment import launch

if TYPE_CHECKING:
    import torch

    from terarec.dist import Ranks

Data = TypeVar("Data")
Number = TypeVar("Number", int, float)


@cache
def ranks() -> Ranks:
    """Return the ranks of this process, which join at the first call; all processes have to make it."""
    from terarec.dist import join  # loads torch

    with as_hugectr_errors("start"):
        joined = join()
    atexit.register(_leave, joined)
    return joined


@cache
def ranks_on(device: torch.device) -> Ranks:
    """Return the ranks with collectives for tensors of a device; all processes call it with theirs.

    Raises:
        IllegalCallError: Devices of other kinds or drivers, or a torch without collectives for them.
    """
    joined = ranks()
    if device.type == "cpu":
        return joined
    import torch

    from terarec.dist.devices import check_devices, group_backend

    with as_hugectr_errors("start"):
        check_devices(joined, device, is_shared=False)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return joined.twin(group_backend(device, is_staged=False))


def rank() -> int:
    """Return the rank of this process without waiting for others."""
    launched = launch()
    return 0 if launched is None else launched.rank


def _leave(joined: Ranks) -> None:
    # At exit another process may be gone already, which is not an error of this one.
    with suppress(RuntimeError):
        joined.close()


class Communicator:
    """Replacement of ``mpi4py.MPI.COMM_WORLD`` where mpi4py is missing: collective calls of JSON data."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        return rank()

    @property
    def size(self) -> int:
        """Number of processes."""
        launched = launch()
        return 1 if launched is None else launched.size

    def Get_rank(self) -> int:  # noqa: N802
        """Return the number of this process."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Return the number of processes."""
        return self.size

    def Barrier(self) -> None:  # noqa: N802
        """Wait for the other processes."""
        ranks().barrier("MPI.Barrier")

    barrier = Barrier

    def bcast(self, value: Data, root: int = 0) -> Data:
        """Return the value of the process `root`."""
        # One collective for all calls: scripts exchange seeds, paths and flags, for which its extra bytes do not
        # matter.
        return self.allgather(value)[root]

    def scatter(self, values: Sequence[Data], root: int = 0) -> Data:
        """Return this process's element of the values of `root`."""
        return self.bcast(values, root)[self.rank]

    def gather(self, value: Data, root: int = 0) -> list[Data] | None:
        """Return the values of all processes to `root`."""
        values = self.allgather(value)
        return values if self.rank == root else None

    def allgather(self, value: Data) -> list[Data]:
        """Return the values of all processes."""
        return [value] if self.size == 1 else ranks().gather("MPI.allgather", value)

    def reduce(self, value: Number, op: str = "sum", root: int = 0) -> Number | None:
        """Return `op` over all processes to `root`."""
        total = self.allreduce(value, op)
        return total if self.rank == root else None

    def allreduce(self, value: Number, op: str = "sum") -> Number:
        """Return `op` over all processes."""
        values = self.allgather(value)
        if op == "sum":
            return sum(values)
        return max(values) if op == "max" else min(values)

    def Abort(self, errorcode: int = 0) -> None:  # noqa: N802
        """Exit; the other processes exit as well."""
        raise SystemExit(errorcode)
