# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks are on the simulated device, and what ranks on devices report."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terarec.checkpoint import complete_checkpoints, load
from terarec.dist import Ranks, RowWise, join, same_for_all, shard
from terarec.dist.devices import group_backend
from terarec.errors import ConfigError, NoSpaceError
from terarec.kernels.environment import Launch
from terarec.nn.objectives import build_objective
from terarec.spec import RunSpec, SGDSpec, Tiers, TrainingSpec
from terarec.train import Callback, Optimizers, Trainer, devices
from terarec.train.ranks_step import RanksStep
from terarec.train.run import build
from terarec.train.step import StepInput, TrainingStep
from tests.dist import test_bags
from tests.dist.device_matrix import device_of
from tests.dist.launch import Raised, raised, run_ranks
from tests.dist.matrix import Model, samples
from tests.dist.test_device_matrix import library
from tests.dist.test_training import check_close, check_same_weights, data, fit, run_spec
from tests.errors import at
from tests.simulated_device.device import NAME
from tests.train.test_tiers import with_tiers

__all__ = ["data", "library"]  # fixtures


def joined(library: Path, **settings: Any) -> Ranks:
    return join(link_timeout=200.0, device=device_of(library), **settings)


def train(rank: int, library: Path, spec: RunSpec, *arguments: Any) -> dict[str, Any]:
    ranks = joined(library)
    spec = replace(spec, training=replace(spec.training, device=NAME))
    try:
        return fit(ranks, spec, *arguments)
    finally:
        ranks.close()


def on_devices(size: int, *arguments: Any) -> dict[str, Any]:
    results = run_ranks(size, train, *arguments, joins=False)
    assert all(result == results[0] for result in results), results
    assert isinstance(results[0], dict), results
    return results[0]


def run_with(data: Path, tables: str, files: Path, **training: Any) -> RunSpec:
    """Return a run whose fast tier is too small for its tables, if they are in tiers."""
    if tables != "tiers":
        return run_spec(data, tables=tables, **training)
    return with_tiers(run_spec(data, **training), Tiers(device="40KiB", host="20KiB", file=str(files)))


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["static", "dynamic", "tiers"])
def test_a_run_on_devices_equals_one_process_and_continues_on_any_number(
    library: Path, data: Path, tmp_path: Path, tables: str
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    expected = fit(Ranks(), run_with(data, tables, one / "rows"), one, None, False)
    half = run_with(data, tables, many / "rows", epochs=1)
    assert on_devices(2, library, half, many, "mixed", False)["steps"] == 10
    found = on_devices(4, library, run_with(data, tables, many / "rows"), many, None, True)
    check_close(found, expected)
    described = many / "run.json"
    described.write_text(described.read_text().replace(f'"{NAME}"', '"cpu"'))  # this process has no such device
    check_same_weights(many, one)
    alone = fit(Ranks(), run_with(data, tables, many / "rows", epochs=3), many, None, True)  # on the CPU
    check_close(alone, fit(Ranks(), run_with(data, tables, one / "rows", epochs=3), one, None, True))


def waits_of_steps(rank: int, library: Path, spec: RunSpec, out: Path) -> list[int]:
    """Return how often the host waited for the stream of the steps in each step."""
    ranks, run, waits = joined(library), RanksStep.run, []

    def counted(stepping: RanksStep, step: StepInput) -> None:
        before = torch.ops.simulated_device.waits_for_stream(0)
        run(stepping, step)
        waits.append(torch.ops.simulated_device.waits_for_stream(0) - before)

    RanksStep.run = counted  # type: ignore[method-assign]
    build(replace(spec, training=replace(spec.training, device=NAME)), out, ranks=ranks).fit()
    return waits


@pytest.mark.slow
def test_steps_do_not_wait_for_themselves(library: Path, data: Path, tmp_path: Path) -> None:
    spec = run_spec(data, tables="static", epochs=1)
    for waits in run_ranks(2, waits_of_steps, library, spec, tmp_path, joins=False):
        # The first steps show how the model looks up; behind the last one no batch follows.
        assert waits[3:-1] == [0] * (10 - 4)


def falling_offsets(rank: int, library: Path) -> Any:
    """Look up bags that the ranks of the rows pool, on rank 1 with offsets that fall."""
    ranks = joined(library)
    device = torch.device(NAME, 0)
    jagged = test_bags.samples(ranks.share(test_bags.BATCH), is_weighted=False)
    if rank == 1:
        jagged.offsets[1] = 30
    try:
        test_bags.sharded(ranks, "rows", "rows").to(device)(
            replace(jagged, keys=jagged.keys.to(device), offsets=jagged.offsets.to(device))
        )
    except Exception as error:
        return raised(error)
    return None


@pytest.mark.slow
def test_falling_offsets_on_a_device_are_named(library: Path) -> None:
    other, rank = run_ranks(2, falling_offsets, library, joins=False)
    assert other.kind == "CollectiveError"
    assert (rank.kind, rank.fields["where"]) == ("ConfigError", "offsets[2]")


def faults(rank: int, library: Path, uuid: str, name: str, shares_device: bool) -> Any:
    """Join with a device of these properties."""
    os.environ |= {"SIMULATED_UUID": uuid, "SIMULATED_NAME": name if rank else NAME}
    try:
        joined(library, shares_device=shares_device).close()
    except Exception as error:
        return raised(error)
    return None


@pytest.mark.slow
def test_ranks_that_share_a_device_unasked_and_other_devices_are_named(library: Path) -> None:
    def results(*arguments: Any) -> list[Raised | None]:
        return run_ranks(2, faults, library, *arguments, joins=False)

    for result in results("GPU-1", NAME, False):
        assert result is not None
        assert result.kind == "ConfigError"
        assert "for ranks 0 and 1, expected one for each rank, or --share-device" in result.message
    assert results("GPU-1", NAME, True) == [None, None]
    for result in results("GPU-1", "another", True):
        assert result is not None
        assert (result.kind, result.fields["differences"]) == ("CollectiveError", ((1, "name"),))


def out_of_memory(rank: int, library: Path) -> Any:
    """Train steps, in the last of which rank 1 has no memory left."""
    ranks = joined(library)
    model = Model(trains_layer=False, names=("sum.static", "mean.static"))
    shard(model, same_for_all(model.tables.specs, RowWise(), ranks.size), ranks)
    device = torch.device(NAME, 0)
    model.to(device)
    try:
        for step in range(3):
            ranks.step = step
            jagged, labels = samples(step, model.names).part(8 * rank, 8 * rank + 8)
            there = type(jagged)(
                names=jagged.names, keys=jagged.keys.to(device), offsets=jagged.offsets.to(device), weights=None
            )
            labels = labels.to(device)
            if step == 2 and rank == 1:
                torch.ops.simulated_device.set_largest_allocation(64)
            model(there, labels)
    except Exception as error:
        return raised(error)
    return None


@pytest.mark.slow
def test_a_rank_without_memory_is_named_with_its_largest_table(library: Path) -> None:
    first, second = run_ranks(2, out_of_memory, library, joins=False)
    assert first.kind == "CollectiveError"
    assert second.kind == "NoSpaceError"
    assert second.message.startswith("rank 1 (")
    assert "step 2: no memory left on its device for lookups of tables (" in second.message
    assert "the largest table here is 'sum.static' with 960 bytes" in second.message


class LittleMemory(Callback):
    """Leaves the device of rank 0 without memory after a step."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == 7 and trainer.ranks.is_first:
            torch.ops.simulated_device.set_largest_allocation(64)


def run_out_of_memory(rank: int, library: Path, spec: RunSpec, out: Path) -> Any:
    ranks = joined(library)
    try:
        build(replace(spec, training=replace(spec.training, device=NAME)), out, [LittleMemory()], ranks=ranks).fit()
    except Exception as error:
        return raised(error)
    return None


@pytest.mark.slow
def test_all_ranks_end_if_one_has_no_memory_left_and_the_last_checkpoint_is_whole(
    library: Path, data: Path, tmp_path: Path
) -> None:
    spec = run_spec(data, checkpoint_every=3)
    first, second = run_ranks(2, run_out_of_memory, library, spec, tmp_path, joins=False)
    assert (first.kind, second.kind) == ("NoSpaceError", "CollectiveError")
    assert first.message.startswith("rank 0 (")
    assert "step 8: no memory left on its device for" in first.message
    assert [load(path).step for path in complete_checkpoints(tmp_path / "checkpoints")][-1] == 6


def launched(rank: int) -> Launch:
    return Launch(rank=rank, size=8, local_size=None, local_rank=rank % 4, has_address=True, is_mpi=False)


def test_each_rank_of_a_machine_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    assert devices.select_device("cpu", launched(5)) == torch.device("cpu")
    assert devices.select_device("cuda", None) == torch.device("cuda", 0)
    assert devices.select_device("cuda", launched(6)) == torch.device("cuda", 2)
    assert devices.select_device("cuda:0", launched(6)) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, check=at("training.device", "got 'cuda' for rank 7, number 3 of this machine")):
        devices.select_device("cuda", launched(7))
    assert devices.select_device("cuda", launched(7), is_shared=True) == torch.device("cuda", 0)
    assert selected == [torch.device("cuda", number) for number in (2, 0, 0)]


def test_a_step_without_memory_names_the_rank_and_its_largest_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(trains_layer=True, names=("sum.static", "mean.static"))
    ranks = Ranks(hosts=["here"])
    shard(model, same_for_all(model.tables.specs, RowWise(), 1), ranks)

    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TrainingStep, "run", without_memory)
    spec, objective = TrainingSpec(), build_objective(None)
    optimizers = Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1))
    step = RanksStep(model, spec, optimizers, objective, ranks=ranks, device=torch.device("cpu"), check_loss=False)
    with pytest.raises(NoSpaceError, check=at("rank 0 (here), step 0", "Tried to allocate 2.00 GiB")) as caught:
        step.run(StepInput(number=1, epoch=1, batches=(), sizes=(), is_own=True, following=None, is_interrupted=False))
    assert "the largest table here is 'sum.static' with 1,920 bytes" in caught.value.problem


def test_a_plan_for_larger_devices_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "small")
    devices.check_room(None, device)
    devices.check_room(10**9, device)
    devices.check_room(10**12, torch.device("cpu"))
    with pytest.raises(ConfigError, check=at("plan.rank_bytes", "got 1,000,000,001 for cuda:1 (small)")):
        devices.check_room(10**9 + 1, device)


@pytest.mark.parametrize("name", ["cuda:99", "meta", "mps", "nonsense", "cpu:"])
def test_a_device_that_is_not_there_is_rejected(name: str) -> None:
    """They ended in errors of torch, some with several lines, after the ranks had met."""
    with pytest.raises(ConfigError, check=at("device", name)) as caught:
        join(device=name, shares_device=True)
    assert str(caught.value).isprintable()
    assert join(device="cpu").size == 1


def test_a_device_without_collectives_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, check=at("device", "torch has not its backend 'nccl'")):
        group_backend(device, is_staged=False)
    assert group_backend(device, is_staged=True) == group_backend(torch.device("cpu"), is_staged=False) == "gloo"
    monkeypatch.undo()
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    assert group_backend(device, is_staged=False) == "cpu:gloo,cuda:nccl"
