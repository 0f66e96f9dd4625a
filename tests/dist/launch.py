"""Ranks as processes of this machine: what torchrun would start, for functions of tests."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from terarec.dist import Ranks, join
from tests.processes import CONTEXT


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, readers = [], []
    for rank in range(size):
        reader, writer = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_main, args=(rank, size, port, writer, function, arguments, joins))
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    results = []
    for reader, process in zip(readers, processes, strict=True):
        try:
            results.append(reader.recv())
        except EOFError:
            process.join(10)
            results.append(f"ended with status {process.exitcode}")
    for process in processes:
        process.join(30)
    return results


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
