# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine: what torchrun would start, for functions of tests.

Importing terarec takes each rank longer than most of what it does. So ranks are forked from one process, which imports
the modules of the functions and does nothing else.
"""

import atexit
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import distributed

from terarec.dist import Ranks, join
from tests.processes import CONTEXT
from tests.waiting import PATIENCE

_MOST_SECONDS = 600.0
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Raised:
    """An exception of a rank.

    Attributes:
        kind: Name of its class.
        message: Its text.
        fields: Its attributes that are numbers, texts or tuples.
    """

    kind: str
    message: str
    fields: dict[str, Any]


def raised(error: Exception) -> Raised:
    fields = {name: value for name, value in vars(error).items() if isinstance(value, int | str | tuple)}
    return Raised(type(error).__name__, str(error), fields)


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, joins: bool = True) -> list[Any]:
    """Call ``function(ranks, *arguments)`` on ranks 0 to `size` - 1; return what each returned or raised, in order.

    Args:
        size: Number of processes.
        function: Function of a module; without `joins` its first argument is the number of the rank.
        arguments: Further arguments.
        joins: Whether the processes join each other before the call.
    """
    # The store is here, as torchrun's is: a port that is free now may be taken when rank 0 listens.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent = _parent()
    try:
        parent.send_bytes(pickle.dumps((size, store.port, function, arguments, joins)))
        results = []
        for _ in range(size):
            if not parent.poll(_MOST_SECONDS + 60.0):
                raise TimeoutError("the process that forks ranks does not answer")
            results.append(pickle.loads(parent.recv_bytes()))
    except (OSError, EOFError):
        _parent.cache_clear()
        raise
    late = [rank for rank, result in enumerate(results) if result is TimeoutError]
    if late:
        raise TimeoutError(f"ranks {late}: no result within {_MOST_SECONDS:g} s")
    return results


@cache
def _parent() -> Connection:
    """Return the connection to the process that forks ranks; it ends with this one."""
    mine, its = CONTEXT.Pipe()
    CONTEXT.Process(target=_fork_ranks, args=(its,)).start()
    its.close()
    atexit.register(mine.close)
    return mine


def _fork_ranks(connection: Connection) -> None:
    """Fork the ranks that the connection requests, until it is closed; answer with the result of each."""
    # Whether there is a GPU may be asked here, but not of CUDA's driver, which the ranks could then not use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    while True:
        try:
            size, port, function, arguments, joins = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        processes, readers = [], []
        for rank in range(size):
            reader, writer = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_main, args=(rank, size, port, writer, function, arguments, joins))
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        end = time.monotonic() + _MOST_SECONDS
        for reader, process in zip(readers, processes, strict=True):
            connection.send_bytes(_result(reader, process, end))
            reader.close()
        for process in processes:
            process.join(max(0.0, min(30.0, end - time.monotonic())))
            process.kill()
            process.join()


def _result(reader: Connection, process: BaseProcess, end: float) -> bytes:
    """Return what a rank sends, or `TimeoutError` or how it ended, as it would be sent."""
    if not reader.poll(max(0.0, end - time.monotonic())):
        return pickle.dumps(TimeoutError)
    try:
        return reader.recv_bytes()
    except EOFError:
        process.join(PATIENCE)
        return pickle.dumps(f"ended with status {process.exitcode}")


def _main(
    rank: int,
    size: int,
    port: int,
    writer: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    joins: bool,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    ranks: Ranks | None = None
    try:
        # Processes of a busy machine may start far apart.
        ranks = join(link_timeout=200.0) if joins else None
        result = function(rank if ranks is None else ranks, *arguments)
    except Exception as error:
        result = raised(error)
    writer.send_bytes(pickle.dumps(result))
    writer.close()
    if ranks is not None:
        ranks.close()
