# SPDX-License-Identifier: Apache-2.0
"""Training pass by pass equals training without a cache; keysets bound what a pass may touch; rows come and go."""

from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.split_writer import write_keyset
from terarec.formats.hugectr.weights import open_sparse_folder
from terarec.hugectr import CreateETC, CreateHMemCache, CreateMOS, Embedding_t, SparseEmbedding, TrainPSType_t
from terarec.hugectr.data import FileNames
from terarec.hugectr.errors import MissingKeyError, WrongInputError
from terarec.hugectr.sparse_weights import embedding_file
from terarec.hugectr.training_cache import TrainingCache
from terarec.models import GraphModel
from terarec.spec import AdamSpec
from terarec.train import Trainer
from tests.errors import at
from tests.hugectr.graphs import WIDTH, batch, dynamic, embedding, evaluated, model, new_trainer, static

KINDS = {
    Embedding_t.DistributedSlotSparseEmbeddingHash: dynamic("e"),
    Embedding_t.LocalizedSlotSparseEmbeddingHash: dynamic("e.0", "e.1"),
    Embedding_t.LocalizedSlotSparseEmbeddingOneHot: static(**{"e.0": 10, "e.1": 5}),
}
HASH = next(iter(KINDS))
BATCHES = [batch([[7], [3], [7]], [[1], [2], [1]]), batch([[5], [3], [9]], [[1], [3], [4]], seed=1)]
CPU = torch.device("cpu")
SPEC = AdamSpec(lr=0.1, eps_hat=True)
STAGED, CACHED = TrainPSType_t.Staged, TrainPSType_t.Cached


def make(kind: Embedding_t, device: torch.device = CPU) -> tuple[GraphModel, Trainer]:
    net = model(embedding(KINDS[kind], slots=2)).to(device)
    return net, new_trainer(net, SPEC, {"default": SPEC})


def cache_of(net: GraphModel, params: object, kind: Embedding_t = HASH) -> TrainingCache:
    described = SparseEmbedding(
        embedding_type=kind,
        workspace_size_per_gpu_in_mb=1,
        embedding_vec_size=WIDTH,
        combiner="sum",
        sparse_embedding_name="e",
        bottom_name="data",
        slot_size_array=[10, 5],
    )
    held = net.collection("e")
    return TrainingCache(params, [embedding_file(described, held, devices=1, capacity=99)], [held], key_bytes=4)


def etc(*folders: Path, ps_type: TrainPSType_t = STAGED) -> object:
    return CreateETC(ps_types=[ps_type], sparse_models=list(map(str, folders)))


def keysets(directory: Path, kind: Embedding_t = HASH) -> list[str]:
    moved = [0, 10] if kind is Embedding_t.LocalizedSlotSparseEmbeddingOneHot else [0, 0]
    paths = []
    for number, samples in enumerate(BATCHES):
        own = [
            samples.sparse.keys[samples.sparse.offsets[3 * slot] : samples.sparse.offsets[3 * slot + 3]] + moved[slot]
            for slot in (0, 1)
        ]
        paths.append(str(directory / f"{number}.keyset"))
        write_keyset(Path(paths[-1]), torch.cat(own).unique().flip(0).numpy(), 4)
    return paths


@pytest.mark.parametrize("ps_type", [STAGED, CACHED])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_passes_equal_training_without_a_cache(tmp_path, kind, ps_type):
    (plain, trainer), (net, cached) = make(kind), make(kind)
    cache = cache_of(net, etc(tmp_path / "rows", ps_type=ps_type), kind)
    paths = keysets(tmp_path, kind)
    for _ in range(2):
        for path, samples in zip(paths, BATCHES, strict=True):
            cache.update(path)
            assert torch.equal(cached.train_step(samples), trainer.train_step(samples))
    assert torch.equal(net.eval().predict(BATCHES[0]), plain.eval().predict(BATCHES[0]))
    assert torch.equal(net.predict(BATCHES[1]), plain.predict(BATCHES[1]))


def test_a_key_outside_the_keyset_is_rejected_in_training_alone(tmp_path):
    net, trainer = make(HASH)
    cache = cache_of(net, etc(tmp_path / "rows"))
    cache.update(keysets(tmp_path)[0])
    trainer.train_step(BATCHES[0])
    with pytest.raises(MissingKeyError) as raised:
        trainer.train_step(BATCHES[1])
    assert (raised.value.slot, raised.value.key, raised.value.sample) == ("data.0", 5, 3)
    few = batch([[7], [3], [1]], [[1], [4], [9]])
    with pytest.raises(MissingKeyError) as raised:  # the first sample counts, not the first slot
        trainer.train_step(few)
    assert (raised.value.slot, raised.value.key, raised.value.sample) == ("data.1", 4, 4)
    assert net.collection("e").tables["e"].keys().tolist() == [1, 2, 3, 7]
    evaluated(net, BATCHES[1])


def test_rows_are_written_to_their_folder_and_read_from_there(tmp_path):
    net, trainer = make(HASH)
    cache = cache_of(net, etc(tmp_path / "rows"))
    cache.update(keysets(tmp_path)[0])
    trainer.train_step(BATCHES[0])
    cache.save(tmp_path, FileNames("wdl", 3))
    assert open_sparse_folder(tmp_path / "rows", WIDTH).keys().tolist() == [1, 2, 3, 7]
    assert not list(tmp_path.glob("wdl*"))
    other, _ = make(HASH)
    cache_of(other, etc(tmp_path / "rows"))
    mine, theirs = (one.collection("e").tables["e"] for one in (net, other))
    assert torch.equal(mine.export(mine.keys()).weights, theirs.export(theirs.keys()).weights)


def test_the_incremental_model_holds_what_passes_since_the_last_one_may_have_changed(tmp_path):
    net, trainer = make(HASH)
    cache = cache_of(net, etc(tmp_path / "rows"))
    first, second = keysets(tmp_path)
    write_keyset(Path(first), np.array([2, 7, 3, 1, 77]), 4)
    cache.update(first)
    trainer.train_step(BATCHES[0])
    ((keys, vectors),) = cache.incremental_model()
    assert keys.tolist() == [1, 2, 3, 7]  # nothing was seen of key 77
    assert (keys.dtype, vectors.dtype) == (np.int64, np.float32)
    cache.update(second)
    trainer.train_step(BATCHES[1])
    ((keys, vectors),) = cache.incremental_model()
    assert keys.tolist() == [1, 3, 4, 5, 9]
    table = net.collection("e").tables["e"]
    np.testing.assert_array_equal(vectors, table.export(torch.from_numpy(keys)).weights.numpy())
    ((keys, vectors),) = cache.incremental_model()
    assert (keys.shape, vectors.shape) == ((0,), (0, WIDTH))


def test_moved_keys_name_the_rows_of_slots_that_count_from_zero(tmp_path):
    kind = Embedding_t.LocalizedSlotSparseEmbeddingOneHot
    net, trainer = make(kind)
    cache = cache_of(net, etc(tmp_path / "rows"), kind)
    cache.update(keysets(tmp_path, kind)[1])
    trainer.train_step(BATCHES[1])
    ((keys, vectors),) = cache.incremental_model()
    assert keys.tolist() == [3, 5, 9, 11, 13, 14]
    np.testing.assert_array_equal(vectors[3:], net.collection("e").table("e.1")[[1, 3, 4]].detach().numpy())


def test_the_older_spelling(tmp_path):
    net, trainer = make(HASH)
    scratch = CreateMOS(train_from_scratch=True, dest_sparse_models=[str(tmp_path / "rows")])
    cache = cache_of(net, scratch)
    cache.update([keysets(tmp_path)[0]])
    trainer.train_step(BATCHES[0])
    cache.save(tmp_path, FileNames("unused", 0))
    assert open_sparse_folder(tmp_path / "rows", WIDTH).count == 4
    with pytest.raises(WrongInputError, check=at("dest_sparse_models")):
        cache_of(net, scratch)
    trained = CreateMOS(train_from_scratch=False, trained_sparse_models=[str(tmp_path / "rows")])
    other, _ = make(HASH)
    cache_of(other, trained)
    assert len(other.collection("e").tables["e"]) == 4
    absent = CreateMOS(train_from_scratch=False, trained_sparse_models=[str(tmp_path / "absent")])
    with pytest.raises(WrongInputError, check=at("trained_sparse_models")):
        cache_of(net, absent)


def test_folders_behind_urls_are_rejected(tmp_path):
    net, _ = make(HASH)
    with pytest.raises(WrongInputError, check=at("sparse_models", "got 'hdfs://node/rows'")):
        cache_of(net, etc("hdfs://node/rows"))


def test_release_3_0_stores_single_files_and_starts_from_them(tmp_path):
    net, trainer = make(HASH)
    cache = cache_of(net, CreateMOS(train_from_scratch=True))
    cache.update(keysets(tmp_path)[0])
    trainer.train_step(BATCHES[0])
    cache.store([str(tmp_path / "0_sparse.model")])
    assert (tmp_path / "0_sparse.model").stat().st_size == 4 * (8 + 4 * WIDTH)
    other, _ = make(HASH)
    trained = CreateMOS(train_from_scratch=False, trained_sparse_models=[str(tmp_path / "0_sparse.model")])
    cache_of(other, trained).save(tmp_path, FileNames("_", 7))
    assert open_sparse_folder(tmp_path / "_0_sparse_7.model", WIDTH).keys().tolist() == [1, 2, 3, 7]
    with pytest.raises(WrongInputError, check=at("store")):
        cache.store(["a", "b"])


def test_what_does_not_fit_is_rejected(tmp_path):
    net, _ = make(HASH)
    cache = cache_of(net, etc(tmp_path / "rows"))
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent.keyset")):
        cache.update(str(tmp_path / "absent.keyset"))
    (tmp_path / "x.keyset").write_bytes(b"")
    with pytest.raises(WrongInputError, check=at("update", "x.keyset holds no key")):
        cache.update(str(tmp_path / "x.keyset"))
    (tmp_path / "x.keyset").write_bytes(b"12345")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.keyset")):
        cache.update(str(tmp_path / "x.keyset"))
    with pytest.raises(WrongInputError, check=at("update", "got 2 keysets")):
        cache.update(["a", "b"])
    with pytest.raises(WrongInputError, check=at("sparse_models", "got 0 folders")):
        cache_of(net, CreateETC(ps_types=[STAGED]))
    two = CreateETC([STAGED, CACHED], ["a", "b"], ["."], [CreateHMemCache(2, 0.5, 0)])
    with pytest.raises(WrongInputError, check=at("ps_types")):
        cache_of(net, two)


def test_a_negative_key_of_4_bytes_is_the_key_of_its_bits(tmp_path):
    """Finding Q: a Parquet file of int32 has -1, and the keyset, which HugeCTR reads as unsigned, lacked it."""
    net, trainer = make(HASH)
    cache = cache_of(net, etc(tmp_path / "rows"))
    np.array([-1, 3, 1], dtype=np.int32).tofile(tmp_path / "keyset")
    cache.update(str(tmp_path / "keyset"))
    trainer.train_step(batch([[-1], [3], [-1]], [[1], [1], [1]]))
    ((keys, _),) = cache.incremental_model()
    assert keys.tolist() == [-1, 1, 3]
    with pytest.raises(MissingKeyError):
        trainer.train_step(batch([[-2], [3], [-1]], [[1], [1], [1]]))
