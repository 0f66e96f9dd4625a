# SPDX-License-Identifier: Apache-2.0
"""The keys of the next batch on a stream of their own, whose missing waits the simulated device reports."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.batch import Batch
from terarec.dist import shard, sum_gradients
from terarec.dist.exchange import Exchange
from terarec.dist.ranks import PendingResult, Ranks
from terarec.dist.shard import ShardedCollection
from terarec.dist.streams import KeyStream
from terarec.optim import RowOptimizer
from terarec.train import devices
from tests.dist.launch import Raised, raised, run_ranks
from tests.dist.matrix import (
    BATCH,
    OPTIMIZERS,
    TOLERANCES,
    Case,
    Model,
    cuts,
    differences,
    expected_rows,
    plan_of,
    samples,
)
from tests.dist.test_device_matrix import library
from tests.dist.test_device_runs import joined
from tests.simulated_device.device import cpu_without_wait

__all__ = ["library"]  # a fixture

SIZE = 2
STEPS = 7
WARM_UP = 2
STREAM = "a stream of the keys"
CASES = [
    Case(size=SIZE, placement=placement, optimizer="SGD", mode=mode)
    for placement, mode in (
        ("row-wise", "fp32"),
        ("row-wise", "deterministic"),
        ("row-wise", "pooled there"),
        ("column-wise", "pooled there"),
        ("hybrid", "deterministic"),
    )
]
NAMES = ("sum.static", "mean.static", "sequence.static", "weighted.static")


@contextmanager
def _only_again(stream: KeyStream, _: object) -> Iterator[None]:
    with stream.again():
        yield


def _pinned_once() -> Callable[..., Tensor]:
    """Return a ``torch.empty`` that has one piece of pinned memory for all tensors of a shape."""
    plain, made = torch.empty, cache(partial(torch.empty, pin_memory=True))

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return made(*size, **options) if pin_memory else plain(*size, **options)

    return empty


MISSING: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "the step's wait for the keys": (KeyStream, "join", lambda stream: None, "stream 0 reads memory"),
    "the keys' wait for the batch": (KeyStream, "after", _only_again, "expected to wait for that stream"),
    "memory for as long as steps read it": (KeyStream, "keep", lambda stream, made: None, "was freed while stream 0"),
    "memory of a batch for as long as steps read it": (
        devices,
        "batch_tensors",
        lambda batch: [],
        "was freed while stream 0",
    ),
    "the wait for a collective": (PendingResult, "wait", lambda result: result._result, "expected to wait"),
    "the wait for numbers of keys": (
        torch.Tensor,
        "cpu",
        cpu_without_wait("terarec.dist.exchange"),
        "the host uses memory that stream",
    ),
    "pinned memory of its own for each batch": (
        torch,
        "empty",
        _pinned_once(),
        "the host writes memory that stream",
    ),
    "the wait for vectors": (
        Exchange,
        "numbers",
        lambda _, pending, received: list(torch.split(pending._result.float(), list(received))),
        "stream 0 reads memory",
    ),
}
"""What is missing -> the method without it, and what the device then says."""


def batches(rank: int) -> Iterator[tuple[Batch, None]]:
    for step in range(STEPS):
        at = cuts(step, SIZE)
        jagged, labels = samples(step, NAMES).part(at[rank], at[rank + 1])
        yield Batch(dense=labels[:, None], label=labels[:, None], sparse=jagged), None


def train(ranks: Ranks, case: Case, device: torch.device) -> tuple[Model, int]:
    """Train as `Trainer` does; return the model, and how often the host waited for the stream of the steps."""
    model = Model(trains_layer=True, names=NAMES)
    shard(model, plan_of(case, NAMES), ranks)
    model.to(device)
    tables = model.tables
    assert isinstance(tables, ShardedCollection)
    rows, dense, waits = RowOptimizer(model, OPTIMIZERS["SGD"]), torch.optim.SGD([model.scales], lr=0.05), 0
    with closing(devices.copied_ahead(batches(ranks.rank), device)) as copied:
        following: Batch | None = next(copied)[0]
        step = 0
        while following is not None:
            batch, (following, _) = following, next(copied, (None, None))
            waited = torch.ops.simulated_device.waits_for_stream(0)
            tables.start(batch.sparse)
            if following is not None:
                tables.announce(following.sparse)
            loss = model(batch.sparse, batch.label[:, 0]) / BATCH
            dense.zero_grad()
            loss.backward()
            sum_gradients(ranks, [model.scales])
            rows.step()
            dense.step()
            step += 1
            if step > WARM_UP:
                waits += torch.ops.simulated_device.waits_for_stream(0) - waited
    return model, waits


def on_device(rank: int, library: Path, todo: list[Case], missing: str, expected: Any) -> Any:
    """Train without what is missing; return the differences and waits of `train` for each case."""
    ranks = joined(library)
    if missing == STREAM:
        # `terarec.dist.shard` is the function.
        vars(import_module("terarec.dist.shard"))["has_streams"] = lambda device: False
    elif missing:
        owner, name, without, _ = MISSING[missing]
        setattr(owner, name, without)
    try:
        found = []
        for case in todo:
            model, waits = train(ranks, case, torch.device("simulated", 0))
            found.append((differences(ranks, model, expected), waits))
        return found
    except Exception as error:
        return raised(error)


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "expected_waits"), [("", 0), (STREAM, STEPS - WARM_UP - 1)])
def test_the_host_waits_for_the_stream_of_the_keys_alone(library: Path, missing: str, expected_waits: int) -> None:
    expected = expected_rows(STEPS, NAMES, ["SGD"])["SGD", True]
    todo = CASES[:1] if missing else CASES
    for result in run_ranks(SIZE, on_device, library, todo, missing, expected, joins=False):
        assert isinstance(result, list), result
        for case, (found, waits) in zip(todo, result, strict=True):
            assert max(value for value in found.values()) <= TOLERANCES["fp32"], case
            assert waits == expected_waits, case  # no batch is announced in the last step


@pytest.mark.slow
@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_wait_is_reported(library: Path, missing: str) -> None:
    results = run_ranks(SIZE, on_device, library, CASES[:1], missing, None, joins=False)
    messages = [result.message for result in results if isinstance(result, Raised)]
    assert any(MISSING[missing][3] in message for message in messages), results
