# SPDX-License-Identifier: Apache-2.0
"""The start of ranks: the rendezvous, and a check of the connection of every pair before the first collective.

Every pair of ranks opens a connection, and pairs that cannot are named. The backend itself would only time out, without
naming the machines.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import terarec
from terarec.dist.control import ANSWER_TIMEOUT, Links
from terarec.dist.devices import check_devices, find_device, group_backend
from terarec.dist.ranks import DEFAULT_TIMEOUT, Ranks, failed_collective
from terarec.errors import CollectiveError, ConfigError
from terarec.kernels.environment import Launch, family_file, launch, start_number
from terarec.spec.checks import one_line

LINK_TIMEOUT = 30.0
"""Seconds within which the ranks have to reach each other at the start."""


def join(
    settings: Mapping[str, Any] | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    link_timeout: float = LINK_TIMEOUT,
    device: torch.device | str = "cpu",
    shares_device: bool = False,
) -> Ranks:
    """Join the ranks that torchrun or mpirun started with this process; one process alone if neither did.

    Args:
        settings: JSON data that have to be the same on all ranks, such as the configuration of a run.
        timeout: Seconds after which a collective that some rank does not join fails.
        link_timeout: Seconds within which all ranks have to reach each other.
        device: Device of the tables on this rank, on which keys, vectors and gradients travel.
        shares_device: Whether ranks share it: their tensors then go through host memory, since NCCL takes one rank a
            GPU.

    Raises:
        ConfigError: A timeout that is not positive, variables of the launcher that are not numbers, a device that torch
            does not find or that has no collectives, or one that ranks share without `shares_device`.
        CollectiveError: Pairs of ranks that cannot connect, or ranks with other settings, another version of the
            code, or devices of other kinds.
    """
    for name, value in (("timeout", timeout), ("link_timeout", link_timeout)):
        if not 0 < value < float("inf"):
            raise ConfigError(name, f"got {value!r}, expected seconds > 0")
    # Before the ranks meet: where one ends afterwards the others wait for it.
    launched, device = launch(), find_device(device)
    if launched is None:
        return Ranks()
    backend = group_backend(device, is_staged=shares_device)
    store = _meeting_place(launched, link_timeout)
    rank, size = launched.rank, launched.size
    # A store of torchrun outlives the processes, and so do the addresses of those before.
    store = PrefixStore(f"terarec/start-{start_number()}", store)
    # Before the process group is made, whose backend would wait for its own timeout and name no ranks.
    links = check_links(store, rank, size, timeout=link_timeout)
    store.set_timeout(timedelta(seconds=timeout))
    try:
        distributed.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:  # a rank has ended since
        absent = links.unreachable(range(size), timeout=min(ANSWER_TIMEOUT, timeout))
        links.close()
        raise failed_collective(
            "start of the process group", error, rank=rank, hosts=links.hosts, absent=absent, timeout=timeout
        ) from None
    ranks = Ranks(distributed.group.WORLD, hosts=links.hosts, timeout=timeout, links=links, is_staged=shares_device)
    try:
        # Ranks with other code or settings may call other collectives, which would hang or mix up what they exchange.
        ranks.check_same("version", {"terarec": terarec.__version__, "code": code_digest(), "torch": torch.__version__})
        ranks.check_same("settings", settings or {})
        check_devices(ranks, device, is_shared=shares_device)
    except (CollectiveError, ConfigError):
        with suppress(RuntimeError):
            ranks.close()
        raise
    return ranks


def _meeting_place(launched: Launch, timeout: float) -> Store:
    """Return the store that all ranks reach: torchrun's, or one of its own for the processes of mpirun."""
    rank, size, wait = launched.rank, launched.size, timedelta(seconds=timeout)
    try:
        if launched.has_address:
            store: Store = next(distributed.rendezvous("env://", rank, size, timeout=wait))[0]  # type: ignore[attr-defined]
            return store
        world = _mpi_world()
        if world is not None:
            return _store_of_first(world, rank, is_local=launched.local_size == size, wait=wait)
    except ValueError as error:
        raise ConfigError("environment", f"{error}, expected the variables of torchrun") from None
    except RuntimeError as error:
        raise CollectiveError(
            f"the ranks did not meet within {timeout:g} s: {one_line(str(error))}", collective="start"
        ) from None
    if launched.local_size != size:
        raise ConfigError(
            "environment",
            f"got {size} processes on several machines without MASTER_ADDR and MASTER_PORT, expected these variables, "
            "which say where rank 0 listens, or mpi4py",
        )
    store = FileStore(str(family_file("terarec-ranks")), size)
    store.set_timeout(wait)
    return store


def _mpi_world() -> Any | None:
    """Return the communicator of mpi4py; None where that is not installed, or finds no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # its wheels bring no MPI, and raise RuntimeError where they find none
        return None
    world = MPI.COMM_WORLD
    # The replacement of mpi4py that scripts get has no version: its calls would join these ranks again.
    return world if hasattr(MPI, "Get_version") and world.Get_size() > 1 else None


def _store_of_first(world: Any, rank: int, *, is_local: bool, wait: timedelta) -> Store:
    """Return the store of rank 0, which sends the others by MPI the address where it listens."""
    host = "127.0.0.1" if is_local else socket.gethostname()
    if rank:
        host, port = world.bcast(None, root=0)
        return TCPStore(host, port, is_master=False, timeout=wait)
    # It does not wait for the others, which get its port only now.
    store = TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
    world.bcast((host, store.port), root=0)
    return store


@cache
def code_digest() -> str:
    """Return a digest of the sources of the package."""
    # The version alone does not tell sources apart that were edited on one machine.
    digest = hashlib.sha256()
    root = Path(terarec.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def check_links(store: Store, rank: int, size: int, *, timeout: float) -> Links:
    """Connect every pair of ranks; they answer from then on.

    Args:
        store: Store that all ranks reach.
        rank: Number of this rank.
        size: Number of ranks.
        timeout: Seconds within which a connection has to be open.

    Raises:
        CollectiveError: A pair of ranks that cannot connect, or a rank that is absent; the same on every rank.
    """
    store = PrefixStore("links", store)
    store.set_timeout(timedelta(seconds=timeout))
    links = Links(rank, size)
    try:
        own = [_own_address(store), links.port, socket.gethostname()]
        store.set(f"address/{rank}", json.dumps(own))
        addresses = [_told(store, "address", other, size, timeout) for other in range(size)]
        links.meet([(str(host), int(port), str(name)) for host, port, name in addresses])
        # A connection is a matter of both sides, so that of a pair the rank of the higher number calls.
        store.set(f"failed/{rank}", json.dumps(links.unreachable(range(rank), timeout=timeout)))
        waits = 3 * timeout  # for ranks that wait for connections that never open
        store.set_timeout(timedelta(seconds=waits))
        unreached = [_told(store, "failed", other, size, waits) for other in range(size)]
        store.set(f"seen/{rank}", "")
        if rank == 0:  # whose process may hold the store: it stays until all have read it
            with suppress(RuntimeError):
                store.wait([f"seen/{other}" for other in range(size)])
    except Exception as error:
        links.close()
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            raise CollectiveError(
                f"rank {rank} of {size} has lost the store of the launcher, or of rank 0: {one_line(str(error))}",
                collective="check of links",
                rank=rank,
            ) from None
        raise
    hosts = links.hosts
    lines = [
        ((here, int(there)), f"rank {here} ({hosts[here]}) cannot reach rank {there} ({hosts[int(there)]}): {reason}")
        for here, of_rank in enumerate(unreached)
        for there, reason in of_rank.items()
    ]
    if lines:
        links.close()
        raise CollectiveError(
            f"{'; '.join(text for _, text in lines[:4])}"
            f"{f'; and {len(lines) - 4} further pairs' if len(lines) > 4 else ''}; expected every rank to reach every "
            "other one by TCP on any port",
            collective="check of links",
            pairs=tuple(pair for pair, _ in lines),
        )
    return links


def _told(store: Store, what: str, other: int, size: int, timeout: float) -> Any:
    """Return the JSON data that a rank has put into the store."""
    try:
        return json.loads(store.get(f"{what}/{other}"))
    except RuntimeError:  # torch.distributed.DistStoreError
        raise CollectiveError(
            f"rank {other} of {size} did not come within {timeout:g} s, or has ended, expected all ranks to start",
            collective="check of links",
            rank=other,
        ) from None


def _own_address(store: Store) -> str:
    """Return the address of this machine on the way to the one that holds the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"  # a store in a file is one of a single machine
    # Not the address of the host name, which may be a loopback one or that of a network which others are not in.
    target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect(target[4])
        return str(probe.getsockname()[0])
