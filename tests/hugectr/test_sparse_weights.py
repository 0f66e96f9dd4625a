# SPDX-License-Identifier: Apache-2.0
"""Rows of embeddings and their optimizer states through HugeCTR's files."""

import numpy as np
import pytest
import torch

from terarec.embedding import EmbeddingCollection
from terarec.errors import DataNotFoundError
from terarec.formats.hugectr.weights import SparseRows, open_sparse_folder, write_sparse_folder
from terarec.hugectr import CreateOptimizer, Embedding_t, SparseEmbedding
from terarec.hugectr.errors import BrokenFileError, OutOfBoundError
from terarec.hugectr.network import capacity
from terarec.hugectr.sparse_weights import (
    EmbeddingFile,
    embedding_file,
    load_sparse,
    load_sparse_optimizer_states,
    save_sparse,
    save_sparse_optimizer_states,
)
from terarec.models import GraphModel
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RowOptions,
    SGDSpec,
    SparseOptimizerSpec,
)
from tests.errors import at
from tests.hugectr.graphs import WIDTH, batch, dynamic, embedding, model, static

TABLES = {
    Embedding_t.DistributedSlotSparseEmbeddingHash: dynamic("e"),
    Embedding_t.LocalizedSlotSparseEmbeddingHash: dynamic("e.0", "e.1"),
    Embedding_t.LocalizedSlotSparseEmbeddingOneHot: static(**{"e.0": 10, "e.1": 4}),
    Embedding_t.HybridSparseEmbedding: static(**{"e.0": 10, "e.1": 4}),
}
HASHED = list(TABLES)[:2]
SAMPLES = [batch([[7], [3], [7]], [[1], [2], [1]]), batch([[5], [3], [9]], [[1], [3], [0]], seed=1)]
OPTIMIZERS: dict[str, SparseOptimizerSpec] = {
    "sgd": SGDSpec(lr=0.1),
    "momentum": MomentumSpec(lr=0.1, lr_in_momentum=True),
    "nesterov": NesterovSpec(lr=0.1, lr_in_momentum=True),
    "adagrad": AdaGradSpec(lr=0.1),
    "adam": AdamSpec(lr=0.1, eps_hat=True),
    "lazy adam": AdamSpec(lr=0.1, eps_hat=True, rows=RowOptions(mode="lazy_global")),
    "ftrl": FTRLSpec(lr=0.1),
}


def make(kind: Embedding_t, seed: int = 1) -> GraphModel:
    return model(embedding(TABLES[kind], slots=2), seed=seed).train()


def saved(net: GraphModel, kind: Embedding_t, *, devices: int = 1) -> EmbeddingFile:
    params = SparseEmbedding(
        embedding_type=kind,
        max_vocabulary_size_per_gpu=20,
        embedding_vec_size=WIDTH,
        combiner=0,
        sparse_embedding_name="e",
        bottom_name="data",
        slot_size_array=[10, 4],
    )
    return embedding_file(params, collection(net), devices=devices, capacity=20 * devices)


def collection(net: GraphModel) -> EmbeddingCollection:
    return net.collection("e")


def train(net: GraphModel, optimizer: RowOptimizer) -> None:
    for samples in SAMPLES:
        net.loss(samples).backward()
        optimizer.step()


def vectors_of(net: GraphModel) -> torch.Tensor:
    net.eval()
    return torch.cat([net.tensor(samples, "e") for samples in SAMPLES])


@pytest.mark.parametrize(("kind", "most"), list(zip(TABLES, (5_461, 400_000, 400_000, 400_000), strict=True)))
def test_sizes_of_slots_replace_the_workspace(kind, most):
    """As in HugeCTR, where slots have rows of their own: 1 MiB is 5,461 rows of 16 floats and both states of Adam."""
    part = SparseEmbedding(
        embedding_type=kind,
        workspace_size_per_gpu_in_mb=1,
        embedding_vec_size=16,
        combiner="sum",
        sparse_embedding_name="e",
        bottom_name="data",
        slot_size_array=[100_000] * 4,
    )
    assert capacity(part, CreateOptimizer(), devices=1) == most


def test_a_distributed_embedding_has_keys_and_vectors(tmp_path):
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    net = make(kind)
    train(net, RowOptimizer(net, SGDSpec(lr=0.1)))
    save_sparse(saved(net, kind), tmp_path / "x")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["emb_vector", "key"]
    keys = np.fromfile(tmp_path / "x" / "key", "<i8")
    assert keys.tolist() == [0, 1, 2, 3, 5, 7, 9]
    vectors = np.fromfile(tmp_path / "x" / "emb_vector", "<f4").reshape(-1, WIDTH)
    held = collection(net).tables["e"].export(torch.from_numpy(keys)).weights
    np.testing.assert_array_equal(vectors, held.numpy())


def test_a_localized_embedding_names_the_slot_of_each_key(tmp_path):
    kind = Embedding_t.LocalizedSlotSparseEmbeddingHash
    net = make(kind)
    train(net, RowOptimizer(net, SGDSpec(lr=0.1)))
    save_sparse(saved(net, kind), tmp_path / "x")
    assert np.fromfile(tmp_path / "x" / "key", "<i8").tolist() == [3, 5, 7, 9, 0, 1, 2, 3]
    assert np.fromfile(tmp_path / "x" / "slot_id", "<u8").tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Embedding_t.LocalizedSlotSparseEmbeddingOneHot, ["emb_vector", "key", "slot_id"]),
        (Embedding_t.HybridSparseEmbedding, ["emb_vector", "key"]),
    ],
)
def test_keys_of_slots_that_count_from_zero_are_moved(tmp_path, kind, names):
    net = make(kind)
    save_sparse(saved(net, kind), tmp_path / "x")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == names
    assert np.fromfile(tmp_path / "x" / "key", "<i8").tolist() == list(range(14))


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.name)
def test_rows_resume_elsewhere(tmp_path, kind, single_file):
    net, other = make(kind), make(kind, seed=2)
    for each in (net, other):
        train(each, RowOptimizer(each, SGDSpec(lr=0.1)))
    save_sparse(saved(net, kind), tmp_path / "x", single_file=single_file)
    assert not torch.equal(vectors_of(net), vectors_of(other))
    load_sparse(saved(other, kind), tmp_path / "x")
    assert torch.equal(vectors_of(net), vectors_of(other))
    save_sparse(saved(other, kind), tmp_path / "y", single_file=single_file)
    if single_file:
        assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    else:
        assert all(
            path.read_bytes() == (tmp_path / "y" / path.name).read_bytes() for path in (tmp_path / "x").iterdir()
        )


def test_loading_replaces_all_keys(tmp_path):
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    net = make(kind)
    train(net, RowOptimizer(net, SGDSpec(lr=0.1)))
    rows = SparseRows(np.array([40, -2]), np.ones((2, WIDTH), np.float32))
    write_sparse_folder(tmp_path / "x", [rows])
    load_sparse(saved(net, kind), tmp_path / "x")
    assert collection(net).tables["e"].keys().tolist() == [-2, 40]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_travel_with_the_rows(tmp_path, kind, optimizer, devices):
    nets = make(kind), make(kind, seed=2)
    optimizers = [RowOptimizer(net, OPTIMIZERS[optimizer]) for net in nets]
    for net, moves in zip(nets, optimizers, strict=True):
        train(net, moves)
    first, second = (saved(net, kind, devices=devices) for net in nets)
    save_sparse(first, tmp_path / "x")
    save_sparse_optimizer_states(first, tmp_path / "s")
    num_states = {"sgd": 0, "adam": 2, "lazy adam": 2, "ftrl": 2}.get(optimizer, 1)
    # Slots of 10 and 4 keys leave the given number without effect, but for an embedding without slots.
    room = 20 if kind is HASHED[0] else {1: 10 + 4, 3: 10}[devices]
    assert (tmp_path / "s").stat().st_size == num_states * devices * room * WIDTH * 4
    load_sparse(second, tmp_path / "x")
    load_sparse_optimizer_states(second, tmp_path / "s")
    save_sparse_optimizer_states(second, tmp_path / "t")
    assert (tmp_path / "s").read_bytes() == (tmp_path / "t").read_bytes()
    if optimizer not in ("adam", "lazy adam"):  # which count steps, and no file does
        nets[1].layers.load_state_dict(nets[0].layers.state_dict())
        for net, moves in zip(nets, optimizers, strict=True):
            train(net.train(), moves)
        assert torch.equal(vectors_of(nets[0]), vectors_of(nets[1]))


def test_row_j_of_a_device_belongs_to_its_jth_key(tmp_path):
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    net = make(kind)
    train(net, RowOptimizer(net, AdaGradSpec(lr=0.1)))
    held = saved(net, kind, devices=2)
    save_sparse(held, tmp_path / "x")
    save_sparse_optimizer_states(held, tmp_path / "s")
    buffers = np.fromfile(tmp_path / "s", "<f4").reshape(2, 20, WIDTH)
    keys = np.fromfile(tmp_path / "x" / "key", "<i8")
    for device in (0, 1):
        mine = keys[keys % 2 == device]
        sums = collection(net).tables["e"].export(torch.from_numpy(mine)).state["sum"]
        np.testing.assert_array_equal(buffers[device, : len(mine)], sums.numpy())
        assert not buffers[device, len(mine) :].any()


def test_states_follow_the_order_of_the_folder(tmp_path):
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    net = make(kind)
    RowOptimizer(net, AdaGradSpec(lr=0.1))
    held = saved(net, kind)
    write_sparse_folder(tmp_path / "x", [SparseRows(np.array([9, 4]), np.zeros((2, WIDTH), np.float32))])
    load_sparse(held, tmp_path / "x")
    sums = np.zeros((20, WIDTH), np.float32)
    sums[:2] = [[9] * WIDTH, [4] * WIDTH]
    sums.tofile(tmp_path / "s")
    load_sparse_optimizer_states(held, tmp_path / "s", rows_from=tmp_path / "x")
    assert collection(net).tables["e"].export(torch.tensor([4, 9])).state["sum"].tolist() == [[4.0] * 3, [9.0] * 3]


def rows(keys: list[int], slots: list[int] | None = None) -> SparseRows:
    array = None if slots is None else np.array(slots, np.uint64)
    return SparseRows(np.array(keys), np.ones((len(keys), WIDTH), np.float32), array)


@pytest.mark.parametrize(
    ("kind", "content", "error", "problem"),
    [
        (HASHED[0], rows([1, 2, 1]), BrokenFileError, "holds key 1 twice"),
        (HASHED[1], rows([1, 1], [1, 1]), BrokenFileError, "holds key 1 twice"),
        (HASHED[1], rows([1]), BrokenFileError, "holds no slot_id"),
        (HASHED[1], rows([1, 1], [0, 2]), BrokenFileError, "slot_id 2 at byte 8"),
        (list(TABLES)[2], rows([9, 14], [0, 1]), OutOfBoundError, "holds key 14 in slot 1"),
        (list(TABLES)[2], rows([10], [0]), OutOfBoundError, "holds key 10 in slot 0"),
        (list(TABLES)[3], rows([-1]), OutOfBoundError, "holds key -1 in slot 0"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(tmp_path, kind, content, error, problem):
    net = make(kind)
    train(net, RowOptimizer(net, SGDSpec(lr=0.1)))
    before = vectors_of(net)
    write_sparse_folder(tmp_path / "x", [content])
    with pytest.raises(error, check=at(f"{tmp_path}/x", problem)):
        load_sparse(saved(net, kind), tmp_path / "x")
    assert torch.equal(vectors_of(net), before)


def test_files_that_do_not_fit_are_rejected(tmp_path):
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    net = make(kind)
    held = saved(net, kind)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent")):
        load_sparse(held, tmp_path / "absent")
    train(net, RowOptimizer(net, AdaGradSpec(lr=0.1)))
    np.zeros((2, WIDTH), np.float32).tofile(tmp_path / "s")
    with pytest.raises(BrokenFileError, check=at(f"{tmp_path}/s")):
        load_sparse_optimizer_states(held, tmp_path / "s")


def test_more_rows_than_a_device_has_room_for_are_written(tmp_path):
    """The check of a training is of all devices together, and can be turned off: its result is not lost."""
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    net = make(kind)
    optimizer = RowOptimizer(net, AdaGradSpec(lr=0.1))
    keys = list(range(0, 42, 2))  # all of the first of two devices
    net.loss(batch([[key] for key in keys], [[key] for key in keys])).backward()
    optimizer.step()
    held = saved(net, kind, devices=2)
    save_sparse_optimizer_states(held, tmp_path / "s")
    assert (tmp_path / "s").stat().st_size == 2 * 21 * WIDTH * 4
    before = collection(net).tables["e"].export(torch.tensor(keys)).state["sum"]
    load_sparse_optimizer_states(held, tmp_path / "s")
    assert torch.equal(collection(net).tables["e"].export(torch.tensor(keys)).state["sum"], before)


def test_a_large_embedding_is_written_in_chunks(tmp_path, monkeypatch):
    kind = Embedding_t.LocalizedSlotSparseEmbeddingHash
    monkeypatch.setattr("terarec.hugectr.sparse_weights.CHUNK_ROWS", 2)
    net = make(kind)
    train(net, RowOptimizer(net, AdaGradSpec(lr=0.1)))
    held = saved(net, kind, devices=2)
    save_sparse(held, tmp_path / "x")
    save_sparse_optimizer_states(held, tmp_path / "s")
    assert open_sparse_folder(tmp_path / "x", WIDTH).count == 8
    before = [table.export(table.keys()) for table in held.tables]
    load_sparse(held, tmp_path / "x")
    load_sparse_optimizer_states(held, tmp_path / "s")
    for table, was in zip(held.tables, before, strict=True):
        now = table.export(table.keys())
        assert torch.equal(now.keys, was.keys)
        assert torch.equal(now.weights, was.weights)
        assert torch.equal(now.state["sum"], was.state["sum"])
