# SPDX-License-Identifier: Apache-2.0
"""Training pass by pass through `Model`, in the spellings of its releases."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.formats.hugectr.split_writer import write_keyset
from terarec.formats.hugectr.weights import open_sparse_folder
from terarec.hugectr.errors import IllegalCallError, WrongInputError
from terarec.hugectr.training_cache import with_cache_tiers
from terarec.kernels.slots import SLOT_BYTES
from tests.dist.launch import run_ranks
from tests.errors import at
from tests.hugectr.planted import ROWS, Planted, write_norm
from tests.hugectr.scripts import auc_of, build_dcn, dcn, norm_reader, solver
from tests.params import in_every_run


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Two sources with their keysets, an evaluation source, and the best AUC."""
    directory, valid = tmp_path_factory.mktemp("passes"), Planted(5_000, seed=1)
    sources, keysets = [], []
    for number in range(2):
        sources.append(write_norm(directory / f"train{number}", Planted(10_000, seed=number + 2)))
        keysets.append(str(directory / f"{number}.keyset"))
        write_keyset(directory / f"{number}.keyset", np.arange(4 * ROWS), 8)
    return sources, keysets, write_norm(directory / "valid", valid), valid.best_auc


def cached(passes, params, *, dropout_rate=0.1, **settings):
    sources, keysets, eval_source, _ = passes
    reader = norm_reader(sources, eval_source, keyset=keysets)
    return build_dcn(
        hugectr.Model(
            solver(repeat_dataset=False, **settings),
            reader,
            hugectr.CreateOptimizer(update_type=hugectr.Update_t.LazyGlobal),
            params,
        ),
        dropout_rate=dropout_rate,
    )


def etc(folder):
    return hugectr.CreateETC(ps_types=[hugectr.TrainPSType_t.Staged], sparse_models=[str(folder)])


def test_create_mos_of_3_2_1_is_create_etc(passes):
    """Finding M: 3.2.1 gave `CreateMOS` what 3.3 calls `CreateETC`."""
    kinds, names = hugectr.TrainPSType_t, ("ps_types", "sparse_models", "local_paths", "hmem_cache_configs")
    values = ([kinds.Cached], ["rows"], ["files"], [hugectr.CreateHMemCache(2, 0.5, 0)])
    reader = norm_reader(passes[0], passes[2], keyset=passes[1])
    for params in (hugectr.CreateMOS(*values), hugectr.CreateMOS(**dict(zip(names, values, strict=True)))):
        made = hugectr.Model(solver(repeat_dataset=False), reader, hugectr.CreateOptimizer(), params)
        assert made._etc_params == hugectr.CreateETC(*values)
    with pytest.raises(WrongInputError, check=at("CreateMOS: sparse_models")):
        hugectr.CreateMOS([kinds.Staged], ["a", "b"])


@pytest.mark.parametrize(
    "params", [etc("rows"), hugectr.CreateMOS(True, True, [], ["rows"])], ids=["CreateETC", "CreateMOS"]
)
def test_data_of_passes_does_not_repeat(passes, params):
    """By iterations `fit` would read the first source alone, without its keyset; upstream rejects it as well."""
    with pytest.raises(WrongInputError, check=at("Model: etc_params")):
        hugectr.Model(solver(), norm_reader(passes[0], passes[2], keyset=passes[1]), hugectr.CreateOptimizer(), params)


def test_fit_walks_over_sources_and_keysets(passes, tmp_path, capsys):
    made = cached(passes, etc(tmp_path / "rows"))
    made.fit(num_epochs=2, display=0, eval_interval=40, snapshot=1, snapshot_prefix=str(tmp_path / "never"))
    output = capsys.readouterr().out
    assert "Finish 2 epochs 84 global iterations" in output
    assert output.count("Evaluation, AUC") == 2
    assert auc_of(made) > 0.95 * passes[3]
    assert not list(tmp_path.glob("never*"))
    made.save_params_to_files(str(tmp_path / "end"), 7)
    assert {path.name for path in tmp_path.iterdir()} == {"rows", "end_dense_7.model", "end_opt_dense_7.model"}
    assert open_sparse_folder(tmp_path / "rows", 8).count == 4 * ROWS


def test_a_script_that_walks_itself_gets_what_each_pass_changed(passes, tmp_path):
    made = cached(passes, hugectr.CreateMOS(True, True, [], [str(tmp_path / "rows")]))
    reader, cache = made.get_data_reader_train(), made.get_model_oversubscriber()
    for source, keyset in zip(*passes[:2], strict=True):
        reader.set_source(source)
        cache.update(keyset)
        while made.train():
            pass
    ((keys, vectors),) = made.get_incremental_model()
    assert keys.shape == (4 * ROWS,)
    assert vectors.shape == (4 * ROWS, 8)
    ((nothing, _),) = made.get_incremental_model()
    assert not len(nothing)


def trained_by_passes(rank, folder, places, kind):
    """Train a model over two passes, from rows if there are some; return its incremental model and what is written."""
    made = cached(
        places,
        hugectr.CreateETC(ps_types=[kind], sparse_models=[str(folder / "rows")], local_paths=[str(folder)]),
        dropout_rate=0.0,  # each rank draws its own
        batchsize=100,
        seed=5,
    )
    made.fit(num_epochs=1, display=0, eval_interval=0)
    (changed,) = made.get_incremental_model()
    made.save_params_to_files(str(folder / "end"), 7)
    made.get_embedding_training_cache().store([str(folder / "single")])
    if rank == 0:
        rows = open_sparse_folder(folder / "rows", 8)
        (chunk,) = rows.chunks()
        return changed, (chunk.keys, chunk.vectors), (folder / "single").stat().st_size
    return changed, None, 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Staged", "Cached"])
def test_passes_on_two_processes_train_and_write_what_one_does(tmp_path, kind):
    places = [], [], write_norm(tmp_path / "valid", Planted(300, seed=1)), 0.5
    for number in range(2):
        places[0].append(write_norm(tmp_path / f"train{number}", Planted(500, seed=number + 2)))
        places[1].append(str(tmp_path / f"{number}.keyset"))
        write_keyset(tmp_path / f"{number}.keyset", np.arange(4 * ROWS), 8)
    found = {}
    for again in range(2):  # the second time from the rows that the first one wrote
        for size in (1, 2):
            folder = tmp_path / f"on{size}"
            folder.mkdir(exist_ok=True)
            found[size] = run_ranks(
                size, trained_by_passes, folder, places, getattr(hugectr.TrainPSType_t, kind), joins=False
            )
            assert all(isinstance(result, tuple) for result in found[size]), found[size]
        expected, mine = found[1][0], found[2][0]
        for (keys, vectors), (wanted, of_wanted) in zip(mine[:2], expected[:2], strict=True):
            assert len(wanted) > 3 * ROWS, again
            order, wanted_order = np.argsort(keys), np.argsort(wanted)
            np.testing.assert_array_equal(keys[order], wanted[wanted_order])
            np.testing.assert_allclose(vectors[order], of_wanted[wanted_order], rtol=1e-3, atol=1e-5)
        assert mine[2] == expected[2] > 0
        for values, of_first in zip(found[2][1][0], mine[0], strict=True):
            np.testing.assert_array_equal(values, of_first)


def test_sources_can_be_changed_between_fits(passes, tmp_path):
    sources, keysets, eval_source, _ = passes
    made = cached(passes, etc(tmp_path / "rows"))
    made.set_source(source=sources[:1], keyset=keysets[:1], eval_source=eval_source)
    assert made.reader_params.source == sources[:1]
    made.fit(num_epochs=1, display=0, eval_interval=0)
    with pytest.raises(WrongInputError, check=at("set_source")):
        made.set_source(sources[0])


def test_epochs_take_the_source_that_was_set(passes, capsys):
    sources, _, eval_source, _ = passes
    made = dcn(sources[0], eval_source, repeat_dataset=False)
    made.set_source(sources[1], eval_source)
    made.fit(num_epochs=1, display=0, eval_interval=0)
    assert f"Training source file: {sources[1]}" in capsys.readouterr().out


def test_a_model_without_a_cache_has_none(planted):
    made = dcn(*planted[:2])
    for call in (made.get_embedding_training_cache, made.get_model_oversubscriber, made.get_incremental_model):
        with pytest.raises(IllegalCallError, check=at("get_embedding_training_cache")):
            call()
    with pytest.raises(IllegalCallError, check=at("dump_incremental_model_2kafka")):
        made.dump_incremental_model_2kafka()


def test_each_tier_has_the_size_that_its_call_names(passes, tmp_path):
    made = dcn(passes[0][0], passes[2], optimizer={"update_type": hugectr.Update_t.Local})
    embeddings, optimizer = made._network.of_type(hugectr.SparseEmbedding), hugectr.CreateOptimizer()

    def tiers(params, device, folder=None, parts=embeddings):
        plan, _ = with_cache_tiers(
            made._network.plan({}), params, parts, optimizer, num_devices=2, device=device, folder=folder
        )
        return plan.spec.embeddings[0].tables[0].tiers

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    workspace = 2 * (2**20 // 96) * (96 + 16 + SLOT_BYTES)  # of two devices; Adam keeps two states of 8 floats
    kinds, path = hugectr.TrainPSType_t, str(tmp_path)
    staged = hugectr.CreateETC([kinds.Staged], [path], [path])
    assert tiers(staged, cpu) is None
    found = tiers(staged, gpu)
    assert (found.fast_bytes, found.file) == (workspace, None)
    assert found.host_bytes_below > 2**20
    cached = hugectr.CreateETC([kinds.Cached], [path], [path], [hugectr.CreateHMemCache(3, 0.5, 0)])
    left = tmp_path / "cache-7-0123abcd"  # by a process that was killed
    (left / "embedding.rows").mkdir(parents=True)
    (left / "embedding.lock").touch()
    assert tiers(cached, cpu).fast_bytes == 4 * workspace
    # The number of all rows of the slots is not that of a pass.
    options = embeddings[0].values()
    del options["max_vocabulary_size_per_gpu"]
    options |= {"embedding_type": hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash, "slot_size_array": [10**7] * 4}
    parts = [hugectr.SparseEmbedding(**options)]
    assert tiers(cached, cpu, parts=parts).fast_bytes == 4 * workspace
    assert not left.exists()
    found = tiers(cached, gpu)
    assert (found.fast_bytes, found.host_bytes_below) == (workspace, 3 * workspace)
    assert Path(found.file).parent == tmp_path
    assert tiers(hugectr.CreateETC([kinds.Cached], [path]), cpu) is None
    on_disk = hugectr.CreateMOS(True, use_host_memory_ps=False, dest_sparse_models=[str(tmp_path / "a" / "rows")])
    found = tiers(on_disk, gpu)
    assert (found.fast_bytes, found.host_bytes_below) == (workspace, workspace)
    assert Path(found.file).parent == tmp_path / "a"
    assert Path(tiers(on_disk, cpu, folder=str(tmp_path / "temp")).file).parent == tmp_path / "temp"
    assert tiers(hugectr.CreateMOS(True, dest_sparse_models=[path]), cpu) is None
    with pytest.raises(WrongInputError, check=at("local_paths")):
        tiers(hugectr.CreateETC([kinds.Cached], [path], ["s3://bucket/rows"]), cpu)


UPDATES = ["Local", "LazyGlobal", "Global"]


@pytest.mark.parametrize(
    ("kind", "update"),
    in_every_run(
        [("CreateETC", "Global"), ("CreateMOS", "Local")], itertools.product(["CreateETC", "CreateMOS"], UPDATES)
    ),
)
def test_rows_in_files_give_the_results_of_rows_in_memory(passes, tmp_path, capsys, update, kind):
    sources, keysets, eval_source, _ = passes
    found = []
    for in_files in (False, True):
        folder = tmp_path / f"{in_files}" / "rows"
        optimizer = hugectr.CreateOptimizer(update_type=hugectr.Update_t[update])
        has_tiers = in_files and update != "Global"  # which moves all rows in every step, and keeps them in memory

        def params(folder=folder, in_files=in_files, is_first=True):
            if kind == "CreateMOS":
                paths = {"dest_sparse_models" if is_first else "trained_sparse_models": [str(folder)]}
                return hugectr.CreateMOS(is_first, use_host_memory_ps=not in_files, **paths)
            return hugectr.CreateETC(
                ps_types=[hugectr.TrainPSType_t.Cached if in_files else hugectr.TrainPSType_t.Staged],
                sparse_models=[str(folder)],
                local_paths=[str(folder.parent)],
                hmem_cache_configs=[hugectr.CreateHMemCache(1, 0.5, 0)],
            )

        reader = norm_reader(sources, eval_source, keyset=keysets)
        made = build_dcn(hugectr.Model(solver(repeat_dataset=False), reader, optimizer, params()))
        made.fit(num_epochs=1, display=0, eval_interval=0)
        (collection,) = made.module.embeddings.values()
        use = collection.tier_use()
        assert (use is None) is not has_tiers
        assert ("stays in memory: Update_t.Global" in capsys.readouterr().out) is (in_files and not has_tiers)
        found += made.get_incremental_model()
        made.save_params_to_files(str(tmp_path / "saved"), 0)
        again = build_dcn(hugectr.Model(solver(repeat_dataset=False), reader, optimizer, params(is_first=False)))
        (table,) = next(iter(again.module.embeddings.values())).tables.values()
        found.append((keys := table.keys().sort().values, table.export(keys).weights))
        if has_tiers:
            assert use.lookups > use.hits > 0
            assert use.rows_written > 0
            assert {path.name.split("-")[0] for path in folder.parent.iterdir()} == {"rows", "cache"}
    for with_memory, with_files in zip(found[:2], found[2:], strict=True):
        for expected, got in zip(with_memory, with_files, strict=True):
            assert len(expected) == 4 * ROWS
            np.testing.assert_array_equal(got, expected)


def test_rows_of_the_next_keyset_are_read_while_one_trains(passes, tmp_path):
    sources, _, eval_source, _ = passes
    keysets = [str(tmp_path / f"{number}.keyset") for number in range(3)]
    for number, path in enumerate(keysets):
        write_keyset(Path(path), np.arange(-number, 4 * ROWS), 8)
    local = str(tmp_path / "local")
    params = hugectr.CreateETC([hugectr.TrainPSType_t.Cached], [str(tmp_path / "rows")], [local])
    reader = norm_reader([*sources, sources[0]], eval_source, keyset=keysets)
    made = build_dcn(
        hugectr.Model(
            solver(repeat_dataset=False),
            reader,
            hugectr.CreateOptimizer(update_type=hugectr.Update_t.LazyGlobal),
            params,
        )
    )
    (collection,) = made.module.embeddings.values()
    requested = []

    def noted(present, keys, goes_on):
        requested.extend(-int(next(iter(part.values()))[0]) for part in (present, keys))

    collection.preload_next = noted
    cache = made.get_embedding_training_cache()
    for keyset in (keysets[0], [keysets[1]], keysets[1], keysets[2]):
        cache.update(keyset)
    with pytest.raises(FileNotFoundError):
        cache.update(str(tmp_path / "none"))
    assert requested == [0, 1, 1, 2]  # nothing is known to follow a list, and the last
    made.fit(num_epochs=2, display=0, eval_interval=0)
    cache.update([keysets[0]])  # waits for the thread
    assert requested[4:] == [0, 1, 1, 2, 2, 0, 0, 1, 1, 2]
