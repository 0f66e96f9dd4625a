"""mpi4py.MPI for a single process: what scripts import where mpi4py is not installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn


class SingleProcess:
    """A communicator of one process, whose collective calls hand back what they are given."""

    rank = 0
    size = 1

    def Get_rank(self) -> int:  # noqa: N802
        """Number of this process: 0."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Number of processes: 1."""
        return self.size

    def Barrier(self) -> None:  # noqa: N802
        """Wait for nobody."""

    barrier = Barrier

    def bcast(self, value: Any, root: int = 0) -> Any:
        """What `root` has, which is `value`."""
        return value

    def scatter(self, values: Sequence[Any], root: int = 0) -> Any:
        """This process's share of `values`: the only one."""
        return values[0]

    def gather(self, value: Any, root: int = 0) -> list[Any]:
        """The values of all processes."""
        return [value]

    def allgather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        return [value]

    def reduce(self, value: Any, op: str = "sum", root: int = 0) -> Any:
        """`op` over all processes, which leaves `value`."""
        return value

    def allreduce(self, value: Any, op: str = "sum") -> Any:
        """`op` over all processes, which leaves `value`."""
        return value

    def Abort(self, errorcode: int = 0) -> NoReturn:  # noqa: N802
        """End the process."""
        sys.exit(errorcode)


COMM_WORLD = SingleProcess()
SUM, MAX, MIN = "sum", "max", "min"


def Get_processor_name() -> str:  # noqa: N802
    """Name of the machine, as scripts print it."""
    return "localhost"


def Wtime() -> float:  # noqa: N802
    """Seconds since some moment."""
    return time.perf_counter()


def Init() -> None:  # noqa: N802
    """Nothing is to be started."""


def Is_initialized() -> bool:  # noqa: N802
    """Whether it was started: always."""
    return True


def Is_thread_main() -> bool:  # noqa: N802
    """Whether this is the thread that started it: any may call."""
    return True


def Finalize() -> None:  # noqa: N802
    """Nothing is to be ended."""
