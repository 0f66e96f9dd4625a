# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the simulated device reports, so that a case with one fails, and what it allows, both as CUDA does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from tests.on_device import Case, assert_on, keep_in
from tests.simulated_device.device import Counts, counts
from tests.simulated_device.group import SimulatedGroup

CASES: dict[str, Case] = {}
case = keep_in(CASES)

MIXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum": lambda there, here: there + here,
    "a sum that begins on the CPU": lambda there, here: here + there,
    "a sum that is written to the CPU": lambda there, here: here.add_(there),
    "a number that is added on the CPU": lambda there, here: torch.tensor(0.0).add_(there.sum()),
    "an output": lambda there, here: torch.add(there, there, out=torch.empty(3)),
    "tensors in a list": lambda there, here: torch.cat([there, here]),
    "numbers in a list": lambda there, here: torch.stack([there.sum(), here.sum()]),
    "rows selected by keys": lambda there, here: there.index_select(0, torch.tensor([1])),
    "indices into a tensor of the CPU": lambda there, here: here[there.long()],
    "a mask": lambda there, here: torch.where(here > 0, there, 0.0),
    "batch norm": lambda there, here: torch.nn.functional.batch_norm(there[None], here, here),
    "parameters and gradients": lambda there, here: torch._foreach_add_([there], [here]),
}
"""Operators on tensors of the device and of the CPU."""


def mixing_devices_raises(mix: Callable[[Tensor, Tensor], Any], device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, device=device), torch.ones(3))


CASES |= {f"{name} mixes devices": partial(mixing_devices_raises, mix) for name, mix in MIXES.items()}


@case
def no_numpy_array_is_made(device: torch.device) -> None:
    there = torch.ones(3, device=device)
    for convert in (Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert"):
            convert(there)  # type: ignore[operator]


@case
def a_generator_of_the_cpu_is_rejected(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=device, generator=torch.Generator())


@case
def an_operator_with_a_kernel_for_the_cpu_alone_is_rejected(device: torch.device) -> None:
    @torch.library.custom_op("simulated_device::doubled", mutates_args=(), device_types="cpu")
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(NotImplementedError, match="doubled"):
        doubled(torch.ones(3, device=device))


@case
def numbers_and_indices_may_be_on_the_cpu(device: torch.device) -> None:
    there = torch.arange(3.0, device=device)
    results = [there + torch.tensor(2.0), there[torch.tensor([2, 1])], there.masked_fill(there > 1, torch.tensor(5.0))]
    assert_on(device, *results)
    assert [result.tolist() for result in results] == [[2.0, 3.0, 4.0], [2.0, 1.0], [0.0, 1.0, 5.0]]


@case
def copies_keep_values_and_strides(device: torch.device) -> None:
    here = torch.arange(6.0).view(2, 3)
    there = here.to(device)
    there.t()[1:].mul_(2)
    here.t()[1:].mul_(2)
    assert torch.equal(there.cpu(), here)
    assert there.t().to("cpu").stride() == here.t().stride()


def group_of_one() -> SimulatedGroup:
    return SimulatedGroup(ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=60)))


@case
def results_of_a_collective_are_there_after_its_wait(device: torch.device) -> None:
    sent, came = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    work = group_of_one().all_to_all_single(came, sent, [4], [4], AllToAllOptions())
    with pytest.raises(RuntimeError, match=r"reads memory that stream [0-9]+ writes"):
        came.sum()
    work.wait()
    assert torch.equal(came, sent)


@case
def a_write_to_what_a_collective_reads_raises(device: torch.device) -> None:
    sent, came = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    work = group_of_one().all_to_all_single(came, sent, [4], [4], AllToAllOptions())
    with pytest.raises(RuntimeError, match=r"writes memory that stream [0-9]+ reads"):
        sent[0] = 7.0
    work.wait()
    sent[0] = 7.0


USES_BY_HOST: dict[str, Callable[[Tensor], object]] = {
    "by an operator": lambda here: here.sum(),
    "by NumPy": lambda here: here.numpy().sum(),
    "by its address": lambda here: ctypes.string_at(here.data_ptr(), 4),
    "by writing": lambda here: here.zero_(),
}


@case
def what_is_copied_to_the_host_is_used_after_a_wait_alone(device: torch.device) -> None:
    there, stream = torch.arange(4.0, device=device), torch.accelerator.current_stream(device)
    waits: dict[str, Callable[[], object]] = {
        "for the stream": stream.synchronize,
        "for an event": lambda: stream.record_event().synchronize(),
        "for all": lambda: torch.get_device_module(device).synchronize(),
        "for a copy behind it": lambda: there.cpu(),
        "for a number behind it": lambda: there[0].item(),
    }
    given = torch.empty(4, pin_memory=True)
    for name, wait in waits.items():
        for here in (there.to("cpu", non_blocking=True), given.copy_(there, non_blocking=True)):
            wait()
            assert here.tolist() == [0.0, 1.0, 2.0, 3.0], name
            there + 1  # raises nothing
    for use in USES_BY_HOST.values():
        use(there.to("cpu", non_blocking=True))
        with pytest.raises(RuntimeError, match="the host uses memory that stream 0 writes, expected to wait"):
            there + 1
    use(there.to("cpu", non_blocking=True))
    with pytest.raises(RuntimeError, match="the host uses memory"):
        stream.synchronize()


@case
def what_is_copied_from_the_host_is_written_after_a_wait_alone(device: torch.device) -> None:
    stream = torch.accelerator.current_stream(device)
    here = torch.arange(4.0).pin_memory()
    there = here.to(device, non_blocking=True)
    assert here.sum() == 6.0
    there + 1  # raises nothing
    here.numpy()[1] = 7.0
    with pytest.raises(RuntimeError, match="the host writes memory that stream 0 reads, expected to wait"):
        there + 1
    here.to(device, non_blocking=True)
    stream.synchronize()
    here.zero_()
    there + 1


@case
def memory_that_is_not_pinned_is_free_after_the_call(device: torch.device) -> None:
    here = torch.arange(4.0)
    there = here.to(device, non_blocking=True)
    here.zero_()
    assert here.copy_(there, non_blocking=True).tolist() == [0.0, 1.0, 2.0, 3.0]
    there + 1


@case
def pinned_memory_may_be_dropped_while_it_is_copied(device: torch.device) -> None:
    there = torch.arange(4.0).pin_memory().to(device, non_blocking=True)
    assert (there + 1).tolist() == [1.0, 2.0, 3.0, 4.0]


@case
def pinned_memory_that_another_stream_writes_is_copied_after_a_wait_alone(device: torch.device) -> None:
    other, there = torch.Stream(device), torch.ones(3, device=device)
    other.wait_stream(torch.accelerator.current_stream(device))
    with other:
        here = there.to("cpu", non_blocking=True)
    with pytest.raises(RuntimeError, match=r"stream 0 reads memory that stream [0-9]+ writes"):
        here.to(device, non_blocking=True)
    torch.accelerator.current_stream(device).wait_stream(other)
    assert here.to(device, non_blocking=True).tolist() == [1.0] * 3


@case
def what_another_stream_writes_is_read_after_a_wait_alone(device: torch.device) -> None:
    other, here = torch.Stream(device), torch.accelerator.current_stream(device)
    waits: dict[str, Callable[[], object]] = {
        "for the stream": lambda: here.wait_stream(other),
        "for an event": lambda: here.wait_event(other.record_event()),
        "of the host": other.synchronize,
        "of the host for an event": lambda: other.record_event().synchronize(),
        "of the host for all": lambda: torch.get_device_module(device).synchronize(),
    }
    for name, wait in waits.items():
        with other:
            there = torch.ones(3, device=device)
        with pytest.raises(RuntimeError, match=r"stream 0 reads memory that stream [0-9]+ writes, expected to wait"):
            there + 1
        with pytest.raises(RuntimeError, match="stream 0 reads"):
            there.cpu()
        wait()
        assert (there + 1).tolist() == [2.0] * 3, name
        other.wait_stream(here)  # before it gets memory that this stream reads


@case
def what_another_stream_reads_is_written_after_a_wait_alone(device: torch.device) -> None:
    other, there = torch.Stream(device), torch.ones(3, device=device)
    other.wait_stream(torch.accelerator.current_stream(device))
    with other:
        kept = there + 1
    with pytest.raises(RuntimeError, match=r"stream 0 writes memory that stream [0-9]+ reads"):
        there.zero_()
    torch.accelerator.current_stream(device).wait_stream(other)
    there.zero_()
    assert kept.tolist() == [2.0] * 3


@case
def an_event_that_was_recorded_too_early_does_not_help(device: torch.device) -> None:
    other = torch.Stream(device)
    early = other.record_event()
    with other:
        there = torch.ones(3, device=device)
    torch.accelerator.current_stream(device).wait_event(early)
    with pytest.raises(RuntimeError, match="stream 0 reads"):
        there.sum()
    other.synchronize()


@case
def memory_that_is_freed_while_another_stream_reads_it_raises(device: torch.device) -> None:
    def freed(*, is_recorded: bool, is_waited_for: bool) -> None:
        other, there = torch.Stream(device), torch.ones(3, device=device)
        other.wait_stream(torch.accelerator.current_stream(device))
        with other:
            there.sum()
        if is_recorded:
            there.record_stream(other)
        if is_waited_for:
            torch.accelerator.current_stream(device).wait_stream(other)

    for is_recorded, is_waited_for in ((True, False), (False, True)):
        freed(is_recorded=is_recorded, is_waited_for=is_waited_for)
        torch.ones(3, device=device).sum()
    freed(is_recorded=False, is_waited_for=False)
    with pytest.raises(RuntimeError, match=r"memory of stream 0 was freed while stream [0-9]+ uses it"):
        torch.ones(3, device=device)


@case
def a_backward_pass_waits_for_the_streams_of_its_forward_pass(device: torch.device) -> None:
    other, x = torch.Stream(device), torch.ones(3, device=device, requires_grad=True)
    other.wait_stream(torch.accelerator.current_stream(device))
    with other:
        y = (x * 2).sum()
    torch.accelerator.current_stream(device).wait_stream(other)
    (y * 3).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 3
    other.synchronize()


@case
def copies_and_waits_are_counted(device: torch.device) -> None:
    there = torch.arange(4.0, device=device)
    counted = {
        "a copy to the host": (lambda: there.cpu(), Counts(1, 0, 0, 0)),
        "a copy from the host": (lambda: torch.zeros(2).to(device), Counts(0, 1, 0, 0)),
        "a number": (lambda: there[0].item(), Counts(0, 0, 1, 0)),
        "a mask": (lambda: there[there > 1], Counts(0, 0, 1, 0)),
        "numbers that repeat": (lambda: there.repeat_interleave(there.long()), Counts(0, 0, 1, 0)),
        "numbers that repeat, of known size": (
            lambda: there.repeat_interleave(there.long(), output_size=6),
            Counts(0, 0, 0, 0),
        ),
        "work of the device": (lambda: there.sort(), Counts(0, 0, 0, 0)),
    }
    for name, (run, expected) in counted.items():
        before = counts()
        run()
        assert counts().since(before) == expected, name
