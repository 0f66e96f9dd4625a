"""Ranks as processes of this machine: what torchrun would start, for functions of tests."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import distributed

from terarec.dist import Ranks, join
from tests.processes import CONTEXT

_MOST_SECONDS = 600.0


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
    processes, readers = [], []
    for rank in range(size):
        reader, writer = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_main, args=(rank, size, store.port, writer, function, arguments, joins))
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    end = time.monotonic() + _MOST_SECONDS
    try:
        return [
            _result(rank, reader, process, end)
            for rank, (reader, process) in enumerate(zip(readers, processes, strict=True))
        ]
    finally:
        for process in processes:
            process.join(max(0.0, min(30.0, end - time.monotonic())))
            process.kill()


def _result(rank: int, reader: Connection, process: BaseProcess, end: float) -> Any:
    if not reader.poll(max(0.0, end - time.monotonic())):
        raise TimeoutError(f"rank {rank}: no result within {_MOST_SECONDS:g} s")
    try:
        return reader.recv()
    except EOFError:
        process.join(10)
        return f"ended with status {process.exitcode}"


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
    writer.send(result)
    writer.close()
    if ranks is not None:
        ranks.close()
