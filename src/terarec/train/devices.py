# SPDX-License-Identifier: Apache-2.0
"""The device of a training: copies of batches and rows of tiers ahead of the compute, and the allocator."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

import terarec
from terarec.batch import Batch, to_device
from terarec.closer import Stream, stream
from terarec.data.decode import has_shared_offsets
from terarec.data.reader import BatchReader
from terarec.data.sampling import RankShare
from terarec.dist.shard import ShardedCollection
from terarec.dist.streams import has_streams
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, KernelError
from terarec.kernels.environment import Launch, triton_interprets
from terarec.kernels.registry import Op, active
from terarec.memory.fast_tier import TierUse
from terarec.nn.precision import CPU
from terarec.parallel import prefetched
from terarec.spec import TrainingSpec

_AHEAD = 1  # batches whose rows are read while one trains, besides the one that is being read


class ReadBatch(NamedTuple):
    """State of a reader after a batch.

    Attributes:
        state: Its state; None for its present one.
        rows: Samples of the batch, those of all ranks.
    """

    state: dict[str, Any] | None
    rows: int


T = TypeVar("T")


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`: "auto", "cpu", "cuda" or "cuda:N"."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    if name == "cpu":
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = name.partition(":")[2]
    index = int(number) if number else torch.cuda.current_device() if count else 0
    if index >= count:
        situation = f"this machine has {count} that torch can use" if count else "torch finds no GPU here"
        raise ConfigError("device", f"got {name!r}, but {situation}, expected 'cpu', or 'auto' for what there is")
    return torch.device("cuda", index)


def select_device(name: str, launched: Launch | None, *, is_shared: bool = False) -> torch.device:
    """Select the device of this process: each rank of a machine has the GPU of its number there.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
        launched: The launch of this process; None for one process.
        is_shared: Whether ranks may share a GPU.

    Returns:
        The device, which "cuda" and "auto" mean from now on in this process.
    """
    device = resolve_device(name)
    if launched is None or device.type != "cuda":
        return device
    count, number = torch.cuda.device_count(), launched.local_rank
    if ":" not in name:
        if number >= count and not is_shared:
            raise ConfigError(
                "training.device",
                f"got {name!r} for rank {launched.rank}, number {number} of this machine, which has {count} GPU"
                f"{'s' * (count != 1)}, expected a GPU for each rank, or --share-device",
            )
        device = torch.device("cuda", number % count)
    torch.cuda.set_device(device)
    return device


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that are free on a GPU; None where that is not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def check_room(rank_bytes: int | None, device: torch.device) -> None:
    """Check that a GPU has the memory with which a plan of placements reckons.

    Args:
        rank_bytes: Bytes of tables that the plan allows on a rank; None for no bound.
        device: Device of this rank.
    """
    free = free_bytes(device)
    if rank_bytes is not None and free is not None and rank_bytes > free:
        raise ConfigError(
            "plan.rank_bytes",
            f"got {rank_bytes:,} for {describe_device(device)}, which has {free:,} bytes free, expected a plan for "
            "such devices (terarec plan --ranks N --device-memory SIZE)",
        )


def describe_device(device: torch.device) -> str:
    """Return a readable name of `device`, such as "cuda:0 (NVIDIA H200)"."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


@stream
def batches_on(
    reader: BatchReader,
    device: torch.device,
    model: nn.Module | None = None,
    *,
    is_ahead: bool = False,
    check: Callable[[Batch], None] | None = None,
) -> Generator[tuple[Batch, ReadBatch], None, None]:
    """Yield the batches of `reader` on `device`, each with the state of the reader after it.

    On a GPU the reader is some batches ahead (`copied_ahead`), so its state is noted before that. The same holds if
    `model` has tables in tiers, whose rows are read ahead, and if `is_ahead` says that the caller takes batches before
    it needs them. `check` is called with each batch in host memory.
    """
    # Triton's interpreter runs in one thread at a time.
    is_interpreted = triton_interprets() and active(Op.HASH_INDEX, device.type).implementation == "triton"
    in_tiers = model is not None and bool(collections_in_tiers(model)) and not is_interpreted
    is_copied = has_streams(device)
    read = _read(reader, with_state=in_tiers or is_copied or is_ahead, check=check)
    with ExitStack() as open_streams:
        if model is not None and in_tiers:
            # The thread that copies to a GPU takes as many batches ahead again.
            distance = (_AHEAD + 1) * (2 if is_copied else 1)
            is_share = share_of_reader(reader) is not None
            for module in collections_in_tiers(model):
                if isinstance(module, ShardedCollection) and is_copied:
                    module.read_ahead_apart()  # by the thread that copies
            rows = (read_ahead_on_ranks if is_share else read_ahead)(read, model, distance)
            read = open_streams.enter_context(closing(rows))
        yield from open_streams.enter_context(closing(copied_ahead(read, device)))


def _read(
    reader: BatchReader, *, with_state: bool, check: Callable[[Batch], None] | None
) -> Iterator[tuple[Batch, ReadBatch]]:
    for batch in reader:
        if check is not None:
            check(batch)
        # Read now: the reader may be further when the batch is used.
        rows = reader.batch_rows if share_of_reader(reader) is not None else batch.batch_size
        yield batch, ReadBatch(reader.state_dict() if with_state else None, rows)


def collections_of(model: nn.Module) -> list[EmbeddingCollection | ShardedCollection]:
    """Return the collections of `model`; those on several ranks with their parts."""
    return [module for module in model.modules() if isinstance(module, EmbeddingCollection | ShardedCollection)]


def collections_in_tiers(model: nn.Module) -> list[EmbeddingCollection | ShardedCollection]:
    """Return the collections of `model` with tables in tiers; for those on several ranks, not their parts."""
    modules = collections_of(model)
    parts = {id(collection.local) for collection in modules if isinstance(collection, ShardedCollection)}
    return [module for module in modules if id(module) not in parts and module.tier_use() is not None]


def tier_use(model: nn.Module) -> TierUse | None:
    """Return the counters of the tiers of all tables of `model`; None without tiers."""
    uses = [collection.tier_use() or TierUse() for collection in collections_in_tiers(model)]
    return reduce(TierUse.plus, uses) if uses else None


def read_ahead(batches: Iterable[tuple[Batch, T]], model: nn.Module, distance: int) -> Stream[tuple[Batch, T]]:
    """Yield `batches` with their states from a thread that also prefetches their rows into `model`'s tables."""
    collections = collections_in_tiers(model)

    def drawn() -> Generator[tuple[Batch, T], None, None]:
        for batch, payload in batches:
            for collection in collections:
                collection.prefetch(batch.sparse, distance)
            yield batch, payload

    return prefetched(drawn(), _AHEAD)


@stream
def read_ahead_on_ranks(
    batches: Iterable[tuple[Batch, T]], model: nn.Module, distance: int
) -> Generator[tuple[Batch, T], None, None]:
    """Yield `batches` of this rank's samples, whose rows all ranks read ahead for each other.

    Ranks exchange the keys in the thread that takes the batches, on a GPU that which copies them; another thread reads
    the rows while the batch before trains.
    """
    collections = [module for module in collections_in_tiers(model) if isinstance(module, ShardedCollection)]
    with ThreadPoolExecutor(1, thread_name_prefix="terarec-tiers") as thread:
        reading: list[Future[None]] = []
        for batch, payload in batches:
            requested = [module.requested_rows(batch.sparse) for module in collections]
            for done in reading:
                done.result()  # the rows of the batch before are there, or its error is raised
            reading = [
                thread.submit(module.prefetch_rows, keys, distance)
                for module, keys in zip(collections, requested, strict=True)
            ]
            yield batch, payload


def share_of_reader(batches: object) -> RankShare | None:
    """Return the rank whose samples batches have; None for those of all, such as batches in a list."""
    share: RankShare | None = getattr(batches, "share", None)
    return share


@stream
def copied_ahead(batches: Iterable[tuple[Batch, T]], device: torch.device) -> Generator[tuple[Batch, T], None, None]:
    """Yield `batches` on `device`, each with its state.

    On a GPU a thread draws the next batch and copies it from pinned memory, on a stream of its own, while this one is
    computed on: 80 % of the throughput of bare steps, where the thread that launches the steps reached 35 % (DLRM,
    batches of 65,536, H100).
    """
    if not has_streams(device):
        for batch, payload in batches:
            yield (batch if device == CPU else to_device(batch, device)), payload
        return
    compute = torch.accelerator.current_stream(device)
    copies = prefetched(_copies(batches, device), _AHEAD)
    try:
        for batch, payload in copies:
            assert batch.sparse.ready is not None, "an event after the copy"
            compute.wait_event(batch.sparse.ready)
            # The allocator must not hand the batch's memory to the copying stream while the compute still reads it.
            for tensor in batch_tensors(batch):
                tensor.record_stream(compute)
            yield batch, payload
    finally:
        copies.close()


def _copies(batches: Iterable[tuple[Batch, T]], device: torch.device) -> Generator[tuple[Batch, T], None, None]:
    """Yield each batch on a GPU, as soon as its copy has begun, with the event after the copy."""
    copying = torch.Stream(device)
    shared: torch.Tensor | None = None
    for batch, payload in batches:
        # Two fifths of the bytes of Criteo's batches.
        is_shared = has_shared_offsets(batch)
        is_there = is_shared and shared is not None and shared.shape == batch.sparse.offsets.shape
        # Only copies from pinned memory run next to the compute; others wait for it.
        with copying:
            there = to_device(batch, device, pin=True, offsets=shared if is_there else None)
        shared = there.sparse.offsets if is_shared else None
        yield replace(there, sparse=replace(there.sparse, ready=copying.record_event())), payload


def batch_tensors(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors of `batch`."""
    sparse = batch.sparse
    tensors = (batch.dense, batch.label, batch.weight, sparse.keys, sparse.offsets, sparse.weights)
    return [tensor for tensor in tensors if tensor is not None]


def describe_environment(device: torch.device, training: TrainingSpec) -> dict[str, Any]:
    """Return where and how a training runs, as JSON data.

    It has ``device``, ``threads`` (of the CPU), ``precision``, ``compile`` (whether the layers are compiled),
    ``kernels`` (op -> implementation), ``torch`` and ``terarec`` (versions).
    """
    return {
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "precision": training.precision,
        "compile": training.compile,
        "kernels": active_kernels(device.type),
        "torch": torch.__version__,
        "terarec": terarec.__version__,
    }


def active_kernels(device: str) -> dict[str, str]:
    """Return the implementation that runs each op on a device type; ops that nothing runs there are left out."""
    implementations = {}
    for op in Op:
        try:
            implementations[op.value] = active(op, device).implementation
        except KernelError:
            continue
    return implementations


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST_KEPT_BYTES = 256 << 20
_MOST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let the C allocator keep freed blocks of up to 256 MiB, at most 1 GiB of them, for this process.

    A block of 32 MiB or more (the output of a layer 1024 wide for 8192 samples) is otherwise mapped again each time,
    and the system clears its pages one by one. Writing such a fresh block took 13 ms, a kept one 1.4 ms; a step of
    DLRM's top MLP had 47,000 page faults without, 3,000 with this, and took 7 % less CPU time (2 Zen 3 cores).

    Returns:
        Whether the allocator took it: glibc 2.36 does. One that does not, or is not glibc's, is left as it is.
    """
    if not sys.platform.startswith("linux"):
        return False
    # C libraries other than glibc may lack `mallopt`.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES))
