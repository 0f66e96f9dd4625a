# SPDX-License-Identifier: Apache-2.0
"""Lookup, update and hash index on a device, compared with torch's and with what a large copy reaches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gpu_clock import once, seconds
from record import Row
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from terarec.kernels.contract import KernelGradient
from terarec.kernels.row_rules import row_rule
from terarec.kernels.triton.bag_lookup import bag_lookup
from terarec.kernels.triton.hash_index import HashIndex
from terarec.kernels.triton.row_update import row_update_

WIDTH = 128


@dataclass(frozen=True, kw_only=True)
class Tables:
    """One-key bags over tables of equal size that share one arena.

    Attributes:
        weights: float32[V, 128].
        layout: layout array.
        keys: int64[S * B], feature-major.
        offsets: int64[S * B + 1].
        rows: the arena row of each key.
    """

    weights: Tensor
    layout: Tensor
    keys: Tensor
    offsets: Tensor
    rows: Tensor

    @property
    def size(self) -> str:
        """The tables in words."""
        tables, rows = self.layout.shape[0], int(self.layout[0, 1])
        return f"{tables} x {rows:,} x {WIDTH} ({self.weights.numel() * 4 / 1e9:.3g} GB)"

    @property
    def batch(self) -> int:
        """Samples B."""
        return self.keys.shape[0] // self.layout.shape[0]


def make_tables(device: torch.device, gigabytes: float, batch: int, features: int = 26) -> Tables:
    """Return the tables of float32 of so many gigabytes together, and uniform keys."""
    rows = max(1, int(gigabytes * 1e9 / (4 * WIDTH * features)))
    weights = torch.empty(features * rows, WIDTH, device=device).uniform_(-0.01, 0.01)
    base = torch.arange(features) * rows
    numbers = torch.arange(features)
    layout = torch.stack([base, torch.full_like(base, rows), torch.zeros_like(base), numbers], dim=1)
    keys = torch.randint(rows, (features * batch,), device=device)
    offsets = torch.arange(features * batch + 1, device=device)
    return Tables(
        weights=weights,
        layout=layout,
        keys=keys,
        offsets=offsets,
        rows=keys + base.to(device).repeat_interleave(batch),
    )


def copy_bandwidth(device: torch.device, gigabytes: float) -> float:
    """Return the bytes a second of a large copy, both ways counted: the ceiling of what moves rows."""
    source = torch.empty(int(gigabytes * 1e9 / 4), device=device).fill_(1.0)
    target = torch.empty_like(source)
    return 8 * source.numel() / seconds(lambda: target.copy_(source), device)


def lookups(tables: Tables, device: torch.device, copy: float) -> Iterator[Row]:
    """Lookup of every type of row, and of repeated keys."""
    width_bytes = 4 * WIDTH
    arguments = (tables.keys, tables.offsets, tables.layout, True)
    torchs = seconds(
        lambda: embedding_bag(tables.rows, tables.weights, tables.offsets, mode="sum", include_last_offset=True), device
    )
    for dtype in (torch.float32, torch.bfloat16):
        weights = tables.weights.to(dtype)
        moved = tables.keys.shape[0] * (weights.element_size() * WIDTH + width_bytes)
        for is_checked in (True, False):
            took = seconds(partial(bag_lookup, weights, *arguments, is_checked=is_checked), device)
            unchecked = "" if is_checked else ", keys unchecked"
            yield Row(
                case=f"lookup {_name(dtype)}, {tables.size}, batch {tables.batch}{unchecked}",
                metric="bytes moved",
                value=moved / took / 1e9,
                unit="GB/s",
                peer="nn.EmbeddingBag float32, one merged table",
                peer_value=tables.keys.shape[0] * 2 * width_bytes / torchs / 1e9,
                limit=copy / 1e9,
            )


def updates(tables: Tables, device: torch.device, copy: float) -> Iterator[Row]:
    """Exact updates with their sort; a row's gradient is read, its weights and state are read and written."""
    grad = torch.randn(tables.batch, tables.layout.shape[0] * WIDTH, device=device)
    distinct = torch.unique(tables.rows).shape[0]
    torchs = seconds(_torch_update(tables, grad), device, repeats=3)
    for kind, states in (("sgd", 0), ("rowwise_adagrad", 0), ("adagrad", 1)):
        rule = row_rule(kind, lr=0.01) if kind == "sgd" else row_rule(kind, lr=0.01, eps=1e-8)
        shape = tables.weights.shape if states else tables.weights.shape[:1]
        state = () if kind == "sgd" else (torch.zeros(shape, device=device),)
        gradient = KernelGradient(tables.keys, tables.offsets, grad, tables.layout)
        moved = 4 * WIDTH * (tables.keys.shape[0] + distinct * (2 + 2 * states))
        took = seconds(partial(row_update_, tables.weights, state, [gradient], rule, 1), device)
        yield Row(
            case=f"update {kind}, {tables.size}, batch {tables.batch}",
            metric="bytes moved",
            value=moved / took / 1e9,
            unit="GB/s",
            peer="sparse backward of nn.EmbeddingBag and optim.SGD" if kind == "sgd" else "",
            peer_value=moved / torchs / 1e9 if kind == "sgd" else None,
            limit=copy / 1e9,
        )


def hashes(device: torch.device, num_keys: int) -> Iterator[Row]:
    """Insert with growth from empty in ten batches, and find, compared with a sorted array's search."""
    keys = torch.randint(-(2**63), 2**63 - 1, (num_keys,), device=device)
    none = keys[:0]
    HashIndex(device=device).insert(keys[: num_keys // 10], none, 0)  # compiles
    index = HashIndex(device=device)

    def fill() -> None:
        for part in keys.chunk(10):
            index.insert(part, none, len(index))

    took = once(fill, device)
    yield Row(case=f"hash {num_keys:,} keys", metric="insert", value=num_keys / took / 1e6, unit="Mkeys/s")
    found = seconds(lambda: index.find(keys), device)
    ordered = keys.sort().values
    searched = seconds(lambda: torch.searchsorted(ordered, keys), device)
    yield Row(
        case=f"hash {num_keys:,} keys",
        metric="find",
        value=num_keys / found / 1e6,
        unit="Mkeys/s",
        peer="torch.searchsorted",
        peer_value=num_keys / searched / 1e6,
    )
    yield Row(
        case=f"hash {num_keys:,} keys", metric="memory", value=index.memory_bytes / len(index), unit="bytes a key"
    )


def _torch_update(tables: Tables, grad: Tensor) -> Callable[[], object]:
    """Backward and step alone: the forward pass is made once."""
    bags = nn.EmbeddingBag.from_pretrained(
        tables.weights, mode="sum", sparse=True, freeze=False, include_last_offset=True
    )
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)
    by_bag = grad.reshape(tables.batch, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    pooled = bags(tables.rows, tables.offsets)

    def step() -> None:
        optimizer.zero_grad()
        pooled.backward(by_bag, retain_graph=True)
        optimizer.step()

    return step


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
