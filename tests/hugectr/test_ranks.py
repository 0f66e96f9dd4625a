# SPDX-License-Identifier: Apache-2.0
"""Scripts on several processes: the files, losses and metrics of one process, and the placements that they ask for."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.batch import Batch, Jagged
from terarec.dist import ColumnWise, DataParallel, Hybrid, Ranks, RowWise, TableWise
from terarec.hugectr.network import Network
from terarec.hugectr.sharding import placement_of_rank, sharding_plan
from tests.dist.launch import run_ranks
from tests.dist.test_device_matrix import library
from tests.hugectr.scripts import ADAM, embed, solver
from tests.programs import two_processes
from tests.simulated_device.device import NAME

__all__ = ["library"]  # a fixture

SCRIPT = Path(__file__).with_name("ranks_script.py")
ROOT = SCRIPT.parents[2]


def run_script(
    launcher: tuple[str, ...],
    planted: Any,
    folder: Path,
    gpus: list[list[int]],
    runner: tuple[str | Path, ...] = ("terarec.hugectr",),
) -> str:
    folder.mkdir()
    command = [*launcher, *runner, SCRIPT, *planted[:2], folder, json.dumps(gpus)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=600, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found_by(output: str) -> dict[str, Any]:
    (line,) = re.findall(r"^FOUND (.*)$", output, re.MULTILINE)
    return json.loads(line)


def rows_of(folder: Path, embedding: int, prefix: str = "held") -> dict[tuple[int, int], Any]:
    held = folder / f"{prefix}{embedding}_sparse_12.model"
    keys = np.fromfile(held / "key", np.int64)
    slots = np.fromfile(held / "slot_id", np.uint64) if (held / "slot_id").exists() else np.zeros(len(keys))
    vectors = np.fromfile(held / "emb_vector", np.float32).reshape(len(keys), -1)
    return {(int(slot), int(key)): vector for slot, key, vector in zip(slots, keys, vectors, strict=True)}


def check_same_files(found: Path, expected: Path, *, prefix: str = "held") -> None:
    dense = (
        np.fromfile(path, np.float32) for path in (found / f"{prefix}_dense_12.model", expected / "held_dense_12.model")
    )
    np.testing.assert_allclose(*dense, rtol=1e-4, atol=1e-5)
    for embedding in (0, 1):
        mine, wanted = rows_of(found, embedding, prefix), rows_of(expected, embedding)
        assert mine.keys() == wanted.keys()
        for key, vector in wanted.items():
            np.testing.assert_allclose(mine[key], vector, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone(planted: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of one process and what it prints."""
    folder = tmp_path_factory.mktemp("alone") / "one"
    return folder, run_script((sys.executable, "-m"), planted, folder, [[0]])


@pytest.mark.slow
# With mpi4py installed, processes of mpirun meet by it, and those of torchrun still get the replacement.
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_script_on_several_processes_finds_and_saves_what_one_does(
    launcher: str, alone: tuple[Path, str], planted: Any, tmp_path: Path
) -> None:
    (wanted, printed), folder = alone, tmp_path / "many"
    output = run_script(two_processes(launcher), planted, folder, [[0, 1]])
    assert output.count("Iter: 4 ") == 1
    expected = found_by(printed)
    close = {"auc": pytest.approx(expected["auc"], abs=1e-5), "loss": pytest.approx(expected["loss"], rel=1e-4)}
    assert found_by(output) == {**expected, **close, "size": 2, "readers": 2}
    assert (folder / "labels").read_text() == (wanted / "labels").read_text()
    predictions = (np.loadtxt(of / "predictions") for of in (folder, wanted))
    np.testing.assert_allclose(*predictions, rtol=1e-3, atol=1e-5)
    check_same_files(folder, wanted)
    check_same_files(folder, wanted, prefix="again")


@pytest.mark.slow
def test_a_script_on_devices_finds_and_saves_what_one_process_does(
    library: Path, alone: tuple[Path, str], planted: Any, tmp_path: Path
) -> None:
    (wanted, printed), folder = alone, tmp_path / "many"
    output = run_script(two_processes("torchrun"), planted, folder, [[0, 1]], ("tests.hugectr.simulated_run", library))
    expected, found = found_by(printed), found_by(output)
    assert found["device"] == f"{NAME}:0"
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    check_same_files(folder, wanted)
    check_same_files(folder, wanted, prefix="again")


def placed(ranks: Ranks, cases: list[tuple[list[list[int]], list[int], list[str]]]) -> list[tuple[str, str]]:
    """Return the device of this process, and the message, in each case: vvgpu, GPUs and name of the GPU of each."""
    found = []
    for gpus, counts, names in cases:
        named = f"{{}} {names[ranks.rank]}" if names else "{}"
        properties = partial(lambda text, device: SimpleNamespace(uuid=text.format(device.index)), named)
        torch.cuda.get_device_properties = properties  # type: ignore[assignment]
        device, message = placement_of_rank(gpus, ranks, counts[ranks.rank])
        found.append((str(device), message))
    return found


def test_each_process_has_a_gpu_of_vvgpu_and_all_train_on_cpus_if_one_lacks_it() -> None:
    cases: list[tuple[list[list[int]], list[int], list[str]]] = [
        ([[0, 1]], [2, 2], []),
        ([[3, 1]], [4, 4], []),
        ([[0, 1, 2, 3]], [4, 4], []),
        ([[0], [0]], [1, 1], ["of one machine", "of another"]),
        ([[6, 7]], [1, 1], ["seen by rank 0", "seen by rank 1"]),
        ([[0, 1]], [0, 0], []),
        ([[0, 1]], [1, 0], []),
        ([[0]], [1, 1], []),
    ]
    first, second = run_ranks(2, placed, cases)
    pairs = [(mine, other) for (mine, _), (other, _) in zip(first, second, strict=True)]
    gpus, cpus = pairs[:5], pairs[5:]
    assert gpus == [
        ("cuda:0", "cuda:1"),
        ("cuda:3", "cuda:1"),
        ("cuda:0", "cuda:2"),
        ("cuda:0", "cuda:0"),
        ("cuda:0", "cuda:0"),
    ]
    assert cpus == [("cpu", "cpu")] * 3
    messages = [message for _, message in first]
    assert messages == [message for _, message in second]
    assert messages[:6] == [""] * 6
    assert messages[6].startswith("process 1 (")
    assert messages[7].startswith("processes 0 and 1 have the same GPU of ")


def network(*parts: Any, slots: int = 2) -> Network:
    made = Network(solver(), hugectr.CreateOptimizer(**ADAM))
    sparse = hugectr.DataReaderSparseParam("data", 1, True, slots)
    made.add(hugectr.Input(1, "label", 0, "dense", [sparse, hugectr.DataReaderSparseParam("other", 1, True, 1)]))
    for part in parts:
        made.add(part)
    return made


def placements(made: Network, gpus: list[list[int]], size: int, batches: Any = ()) -> tuple[dict[str, Any], list[str]]:
    graph = made.plan({}).spec
    plan, messages = sharding_plan(made, graph, gpus, size, iter(batches))
    plan.check([table for held in graph.embeddings for table in held.tables], size)
    return plan.placements, messages


class Parts:
    """Takes what a script adds to a model."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def add(self, part: Any) -> None:
        self.held.append(part)


def test_distributed_slots_are_rows_and_localized_ones_whole_tables() -> None:
    parts = Parts()
    embed(parts, "spread", 4)
    embed(parts, "slots", 4, kind=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash)
    found, messages = placements(network(*parts.held), [[0, 1], [2, 3]], 4)
    assert found == {"spread": RowWise(), "slots.0": TableWise(rank=0), "slots.1": TableWise(rank=1)}
    assert messages == []
    found, messages = placements(network(*parts.held), [[0, 1], [2, 3]], 2)
    assert found["slots.1"] == TableWise(rank=0)
    assert "4 devices" in messages[0]


def test_hybrid_embeddings_have_copies_of_the_rows_that_most_shares_of_batches_ask_for() -> None:
    parts = Parts()
    hot = hugectr.HybridEmbeddingParam(1, -1, 0.01, 1.3e11, 1.9e11, 1.0, *HYBRID)
    embed(
        parts,
        "mixed",
        4,
        kind=hugectr.Embedding_t.HybridSparseEmbedding,
        slot_size_array=[50, 9],
        hybrid_embedding_param=hot,
    )
    keys = torch.tensor([[7, 7, 7, 7], [1, 2, 3, 4]])  # slot 0 reads one row, slot 1 another each time
    batch = Batch(
        dense=torch.zeros(4, 0),
        label=torch.zeros(4, 1),
        sparse=Jagged(names=("data.0", "data.1"), keys=keys.flatten(), offsets=torch.arange(9)),
    )
    found, _ = placements(network(*parts.held), [[0, 1]], 2, [batch, batch])
    assert found["mixed.0"] == Hybrid(hot_keys=(7,))
    assert isinstance(found["mixed.1"], Hybrid)
    assert len(found["mixed.1"].hot_keys) == 1  # of those that are as hot, no more than the parameters allow


HYBRID = (hugectr.CommunicationType.NVLink_SingleNode, hugectr.HybridEmbeddingType.Distributed)


def collection() -> hugectr.EmbeddingCollectionConfig:
    config = hugectr.EmbeddingCollectionConfig()
    for name in "abcd":
        table = hugectr.EmbeddingTableConfig(name=name, max_vocabulary_size=40, ev_size=4)
        config.embedding_lookup(table_config=table, bottom_name="other", top_name=f"top_{name}", combiner="sum")
    return config


def test_matrices_of_a_collection_become_placements() -> None:
    config = collection()
    config.shard(
        shard_matrix=[["a", "b", "d"], ["a", "c", "d"]],
        shard_strategy=[("dp", ["a"]), ("mp", ["b", "c", ("d", 2)])],
    )
    found, messages = placements(network(config), [[0, 1]], 2)
    expected = {"a": DataParallel(), "b": TableWise(rank=0), "c": TableWise(rank=1), "d": ColumnWise(ranks=(0, 1))}
    assert found == expected
    assert messages == []
    found, messages = placements(network(config), [[0, 1, 2, 3]], 2)
    assert set(found.values()) == {DataParallel()}  # small tables
    assert "shard_matrix" in messages[-1]
    config = collection()
    names = [*"abcd"]
    config.shard(shard_matrix=[names, names, names], shard_strategy=[("mp", [*"abc", ("d", 2)])])
    found, messages = placements(network(config), [[0, 1, 2]], 3)
    assert set(found.values()) == {RowWise(ranks=(0, 1, 2))}
    assert "'d'" in messages[0]
