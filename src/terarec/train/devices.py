"""Where a model trains, and batches that are copied there ahead of the compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from terarec.batch import Batch, to_device
from terarec.data.batch_reader import BatchReader
from terarec.errors import ConfigError

CPU = torch.device("cpu")


def resolve_device(name: str) -> torch.device:
    """Return the device that `name` asks for: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: A GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    if name == "cpu":
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        found = f"this machine has {count} that torch can use" if count else "torch finds no GPU here"
        raise ConfigError(f"device: got {name!r}, but {found}, expected 'cpu', or 'auto' for what there is")
    return torch.device("cuda", index)


def device_of(model: nn.Module) -> torch.device:
    """Return where the parameters of `model`, and so its tables, are; the CPU for a model without any."""
    held = next(model.parameters(), None)
    return CPU if held is None else held.device


def describe_device(device: torch.device) -> str:
    """Return the name of `device` for people, such as "cuda:0 (NVIDIA H200)"."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def batches_on(reader: BatchReader, device: torch.device) -> Iterator[tuple[Batch, dict[str, Any] | None]]:
    """Yield the batches of `reader` on `device`, each with the reader's state after it, or None for its present one.

    On a GPU the next batch is copied from pinned memory on a stream of its own while this one trains. So the reader is
    one batch ahead there, and its state is noted before that.
    """
    if device.type != "cuda":
        for batch in reader:
            yield (batch if device == CPU else to_device(batch, device)), None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    compute = torch.cuda.current_stream(device)
    ahead: tuple[Batch, dict[str, Any], torch.cuda.Event] | None = None
    for batch in reader:
        state = reader.state_dict()
        with torch.cuda.stream(stream):
            copied = to_device(batch, device, pin=True)
            event = stream.record_event()
        if ahead is not None:
            yield _arrived(ahead, compute)
        ahead = copied, state, event
    if ahead is not None:
        yield _arrived(ahead, compute)


def _arrived(
    ahead: tuple[Batch, dict[str, Any], torch.cuda.Event], compute: torch.cuda.Stream
) -> tuple[Batch, dict[str, Any]]:
    """Return the batch for use on the stream `compute`, which from now on waits for its copy."""
    batch, state, event = ahead
    compute.wait_event(event)
    # The allocator must not hand the batch's memory to the copying stream while the compute still reads it.
    for tensor in batch_tensors(batch):
        tensor.record_stream(compute)
    return batch, state


def batch_tensors(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors of `batch`."""
    sparse = batch.sparse
    held = (batch.dense, batch.label, batch.weight, sparse.keys, sparse.offsets, sparse.weights)
    return [tensor for tensor in held if tensor is not None]
