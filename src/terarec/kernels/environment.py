# SPDX-License-Identifier: Apache-2.0
"""The only module that reads terarec's environment variables.

``TERAREC_CPU`` = ``generic``, ``avx2``, ``avx512`` or ``neon`` forces the instruction set of the compiled kernels.
``TERAREC_KERNELS`` = ``triton``, ``cpu`` or ``ref`` chooses the implementation of each op that it has for a device.
``TERAREC_LINEAR`` = ``onednn`` or ``torch`` forces the library that multiplies in fully connected layers on the CPU.
``TRITON_INTERPRET`` = ``1``, which is Triton's own, makes its kernels run on the CPU, slowly.
``HUGECTR_DISABLE_OVERFLOW_CHECK`` = ``1``, which is HugeCTR's own, lets the facade's tables outgrow their workspace.
``TERAREC_HUGECTR_RELEASE`` = ``3.1``, for instance, selects the release of HugeCTR that the facade behaves like.
``TERAREC_ALLOW_URLS`` = ``s3://bucket,https://host/data`` lets files, such as lists of files, name URLs that begin so.
``OMP_WAIT_POLICY``, which is OpenMP's own, is set for a server whose executor has threads of its own.
``JAVA_HOME``, which is Java's own, is the Java that Spark runs on.
``RANK`` and ``WORLD_SIZE``, which are torchrun's, say that a process is one of several that train together, and
``TORCHELASTIC_RESTART_COUNT`` how often they were started again. ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``
and ``OMPI_COMM_WORLD_LOCAL_SIZE``, which are Open MPI's, and ``PMI_RANK``, ``PMI_SIZE`` and ``MPI_LOCALNRANKS``, which
are those of MPICH's family, say the same where there are several; ``MASTER_ADDR`` and ``MASTER_PORT`` say where they
meet, and ``TORCHELASTIC_USE_AGENT_STORE`` that torchrun itself listens there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terarec.errors import ConfigError, KernelError

CPU_SETS = ("generic", "avx2", "avx512", "neon")
IMPLEMENTATIONS = ("triton", "cpu", "ref")
"""Packages of ``terarec.kernels``, the fastest first. Triton has no ops of processors alone."""
LINEAR_LIBRARIES = ("onednn", "torch")
HUGECTR_RELEASE = "TERAREC_HUGECTR_RELEASE"
ALLOW_URLS = "TERAREC_ALLOW_URLS"


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait, unless ``OMP_WAIT_POLICY`` is set; before torch is imported.

    They would spin for milliseconds after each parallel region, on cores that other threads may need.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def notify_socket() -> str | None:
    """Return the address at which a manager of services waits for what ``sd_notify`` sends; None for none."""
    return os.environ.get("NOTIFY_SOCKET") or None


def forced_cpu() -> str | None:
    """Return the instruction set that ``TERAREC_CPU`` names; None if it is not set."""
    return _one_of("TERAREC_CPU", CPU_SETS)


def forced_implementation() -> str | None:
    """Return the implementation that ``TERAREC_KERNELS`` names; None if it is not set."""
    return _one_of("TERAREC_KERNELS", IMPLEMENTATIONS)


def forced_linear() -> str | None:
    """Return the library that ``TERAREC_LINEAR`` names; None if it is not set."""
    return _one_of("TERAREC_LINEAR", LINEAR_LIBRARIES)


def triton_interprets() -> bool:
    """Return whether Triton, loaded now, would interpret its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def checks_overflow() -> bool:
    """Return whether tables of the HugeCTR facade are held to the size of their workspace."""
    return os.environ.get("HUGECTR_DISABLE_OVERFLOW_CHECK") != "1"


def hugectr_release() -> str | None:
    """Return the release that ``TERAREC_HUGECTR_RELEASE`` names; None if it is not set."""
    return os.environ.get(HUGECTR_RELEASE) or None


def set_hugectr_release(release: str) -> None:
    """Select a release of HugeCTR for this process and those that it starts."""
    os.environ[HUGECTR_RELEASE] = release


def allowed_urls() -> tuple[str, ...]:
    """Return the beginnings of URLs that ``TERAREC_ALLOW_URLS`` names."""
    return tuple(filter(None, map(str.strip, os.environ.get(ALLOW_URLS, "").split(","))))


def add_search_path(folder: str) -> None:
    """Put a folder first in the search path of the Python processes that this one starts."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *others])


def java_home() -> str | None:
    """Return where Java is installed, according to ``JAVA_HOME``; None if it is not set."""
    return os.environ.get("JAVA_HOME") or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The launch of this process as one of several.

    Attributes:
        rank: Its number.
        size: Number of all.
        local_size: Number of processes on this machine, if mpirun sets it.
        local_rank: Its number on this machine; `rank` if the launcher does not set it.
        has_address: Whether the variables of torchrun give the address of the rendezvous.
        is_mpi: Whether mpirun started it, or another launcher of MPI, whose processes are MPI's world.
    """

    rank: int
    size: int
    local_size: int | None
    local_rank: int
    has_address: bool
    is_mpi: bool


MOST_PORT = 65535
_QUOTED = 60
"""Characters of a value that an error shows."""
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)


def launch() -> Launch | None:
    """Return how torchrun, mpirun or a compatible launcher started this process; None for a single process.

    Raises:
        ConfigError: A variable that is not a number, or a rank that is not below the number of processes.
    """
    has_address = bool(os.environ.get("MASTER_ADDR"))
    for rank, size, local, local_rank in (("RANK", "WORLD_SIZE", "", "LOCAL_RANK"), *_MPI_VARIABLES):
        if not os.environ.get(rank) or not os.environ.get(size):
            continue
        variables = Launch(
            rank=_number(rank),
            size=_number(size),
            local_size=_number(local) if os.environ.get(local) else None,
            local_rank=_number(local_rank if os.environ.get(local_rank) else rank),
            has_address=has_address or not local,
            is_mpi=bool(local),
        )
        if not 0 <= variables.rank < variables.size:
            raise ConfigError(rank, f"got {variables.rank}, expected a number from 0 below {size}, {variables.size}")
        if not local or variables.size > 1:  # mpirun may start a single process
            return variables
    return None


def meeting_place() -> tuple[str, int] | None:
    """Return the host and the first port at which rank 0 may listen; None where ``MASTER_ADDR`` is not set.

    Raises:
        ConfigError: A port that is not set, or not a number from 1 to 65535.
    """
    host = os.environ.get("MASTER_ADDR")
    if not host:
        return None
    if "MASTER_PORT" not in os.environ:
        raise ConfigError("MASTER_PORT", "is not set, expected the port at which rank 0 listens")
    if not 0 < (port := _number("MASTER_PORT")) <= MOST_PORT:
        raise ConfigError("MASTER_PORT", f"got {port}, expected a port from 1 to {MOST_PORT}")
    return host, min(port + (os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"), MOST_PORT)


def family_file(prefix: str) -> Path:
    """Return the path of a file by which the processes of one mpirun on one machine find each other."""
    # They have one parent; its start time tells it from one that had its number.
    stat = Path(f"/proc/{os.getppid()}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "0"
    return Path(tempfile.gettempdir()) / f"{prefix}-{os.getuid()}-{os.getppid()}-{began}"


def is_launched() -> bool:
    """Return whether torchrun or mpirun started this process as one of several."""
    return launch() is not None


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(name, f"got {os.environ[name][:_QUOTED]!r}, expected a number") from None


def start_number() -> str:
    """Return how often torchrun has restarted the processes; "0" elsewhere."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def _one_of(name: str, values: Sequence[str]) -> str | None:
    """Return the value of a variable; None if it is not set."""
    value = os.environ.get(name)
    if not value:
        return None
    if value not in values:
        raise KernelError(name, f"got {value!r}, expected one of {', '.join(values)}")
    return value
