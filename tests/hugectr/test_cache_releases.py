# SPDX-License-Identifier: Apache-2.0
"""The training-cache script of each release, over the same files: each ends with the rows of training in memory."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.formats.hugectr.split_writer import write_keyset
from terarec.formats.hugectr.weights import SparseFileLayout, open_sparse_folder, read_sparse_file
from terarec.hugectr.graph_json import read_parts
from terarec.hugectr.json_files import read_json
from tests.hugectr.planted import ROWS, Planted, Samples, write_norm
from tests.hugectr.training_files import SCHEDULE, training_file

WIDTH, BATCH, BATCHES = 8, 200, 5
CACHED = hugectr.TrainPSType_t.Cached


class Files(NamedTuple):
    """What the scripts read: two passes with the keys of each alone, and a training file of release 2.3."""

    sources: list[str]
    keysets: list[str]
    eval_source: str
    training: str


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("passes")
    sources, keysets = [], []
    for number in range(2):
        drawn = Planted(BATCH * BATCHES, seed=number)
        keys = drawn.keys % 15 + 5 * number + ROWS * np.arange(len(drawn.keys))[:, None]
        sources.append(write_norm(directory / f"train{number}", Samples(drawn.label, drawn.dense, keys)))
        keysets.append(str(directory / f"{number}.keyset"))
        write_keyset(Path(keysets[-1]), np.unique(keys), 8)
    optimizer = {"type": "Adam", "update_type": "LazyGlobal", "adam_hparam": SCHEDULE}
    training = training_file(directory / "conf.json", sources[0], sources[1], optimizer=optimizer)
    return Files(sources, keysets, sources[1], training)


def solver(release):
    return hugectr.CreateSolver(
        max_eval_batches=2,
        batchsize_eval=BATCH,
        batchsize=BATCH,
        lr=0.01,
        seed=5,
        vvgpu=[[0]],
        i64_input_key=True,
        repeat_dataset=False,
        compat_release=release,
    )


def compiled(model, model_input, files):
    model.add(model_input)
    for part in read_parts(read_json(files.training).children("layers"))[1:]:
        model.add(part)
    model.compile()
    return model


def new_model(files, release, *params):
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=files.sources,
        keyset=files.keysets,
        eval_source=files.eval_source,
        check_type=hugectr.Check_t.Sum,
    )
    optimizer = hugectr.CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.LazyGlobal
    )
    sparse = [hugectr.DataReaderSparseParam("data", 1, True, 4)]
    return compiled(
        hugectr.Model(solver(release), reader, optimizer, *params),
        hugectr.Input(label_dim=1, label_name="label", dense_dim=3, dense_name="dense",
                      data_reader_sparse_param_array=sparse),
        files,
    )  # fmt: skip


def walk(model, files, begin_source, begin_pass):
    """The loop that a script of the low-level interface has."""
    for source, keyset in zip(files.sources, files.keysets, strict=True):
        begin_source(source)
        begin_pass(keyset)
        count = 0
        while model.train():
            count += 1
        assert count == BATCHES


def rows_of_folder(folder):
    held = open_sparse_folder(folder, WIDTH)
    return {int(key): vector for rows in held.chunks() for key, vector in zip(rows.keys, rows.vectors, strict=True)}


def rows_of_file(path):
    layout = SparseFileLayout(width=WIDTH, key_bytes=8, has_slots=False)
    found = read_sparse_file(path, layout)
    return {int(key): vector for rows in found for key, vector in zip(rows.keys, rows.vectors, strict=True)}


def in_memory(files, folder):
    model = new_model(files, "23.12")
    walk(model, files, model.get_data_reader_train().set_source, lambda keyset: None)
    model.save_params_to_files(str(folder / "made"), 10)
    return rows_of_folder(folder / "made0_sparse_10.model")


def release_2_3(files, folder):
    config = hugectr.solver_parser_helper(
        seed=5, batchsize=BATCH, batchsize_eval=BATCH, eval_batches=2, model_file="", embedding_files=[],
        vvgpu=[[0]], i64_input_key=True, repeat_dataset=False,
    )  # fmt: skip
    session = hugectr.Session(config, files.training, True, str(folder / "temp"))
    session.set_learning_rate(0.01)
    reader, oversubscriber = session.get_data_reader_train(), session.get_model_oversubscriber()
    walk(session, files, reader.set_file_list_source, oversubscriber.update)
    oversubscriber.store([str(folder / "stored.model")])
    assert list((folder / "temp").glob("cache-*"))
    return rows_of_file(folder / "stored.model")


def config_3_0(folder):
    return hugectr.solver_parser_helper(
        seed=5, max_eval_batches=2, batchsize=BATCH, batchsize_eval=BATCH, vvgpu=[[0]], i64_input_key=True,
        repeat_dataset=False, use_model_oversubscriber=True, temp_embedding_dir=str(folder / "temp"),
    )  # fmt: skip


def release_3_0(files, folder):
    session = hugectr.Session(config_3_0(folder), files.training)
    session.set_learning_rate(0.01)
    oversubscriber = session.get_model_oversubscriber()
    walk(session, files, session.get_data_reader_train().set_source, lambda keyset: oversubscriber.update([keyset]))
    session.download_params_to_files(str(folder / "made"), 10)
    assert list((folder / "temp").glob("cache-*"))
    return rows_of_file(folder / "made0_sparse_10.model")


def preview_of_3_0(files, folder):
    optimizer = hugectr.optimizer.CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.LazyGlobal, learning_rate=0.01,
        use_mixed_precision=False,
    )  # fmt: skip
    model = compiled(
        hugectr.Model(config_3_0(folder), optimizer),
        hugectr.Input(
            data_reader_type=hugectr.DataReaderType_t.Norm, source=files.sources[0], eval_source=files.eval_source,
            check_type=hugectr.Check_t.Sum, label_dim=1, label_name="label", dense_dim=3, dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 4, 1, 4)
            ],
            sparse_names=["data"],
        ),
        files,
    )  # fmt: skip
    walk(model, files, model.get_data_reader_train().set_source, model.get_model_oversubscriber().update)
    model.get_model_oversubscriber().store([str(folder / "stored.model")])
    return rows_of_file(folder / "stored.model")


def release_3_1(files, folder):
    params = hugectr.CreateMOS(
        train_from_scratch=True, use_host_memory_ps=False, dest_sparse_models=[str(folder / "rows")]
    )
    model = new_model(files, "3.1", params)
    walk(model, files, model.get_data_reader_train().set_source, model.get_model_oversubscriber().update)
    model.save_params_to_files(str(folder / "made"), 10)
    assert list(folder.glob("cache-*"))
    return rows_of_folder(folder / "rows")


def release_3_2(files, folder):
    params = hugectr.CreateMOS(
        train_from_scratch=True, use_host_memory_ps=True, dest_sparse_models=[str(folder / "rows")]
    )
    model = new_model(files, "3.2", params)
    model.fit(num_epochs=1, eval_interval=5, display=5)
    ((keys, _),) = model.get_incremental_model()
    model.save_params_to_files(str(folder / "made"), 10)
    assert sorted(keys) == sorted(rows_of_folder(folder / "rows"))
    return rows_of_folder(folder / "rows")


def release_3_3(files, folder):
    params = hugectr.CreateETC(ps_types=[hugectr.TrainPSType_t.Staged], sparse_models=[str(folder / "rows")])
    model = new_model(files, "3.3", params)
    walk(model, files, model.get_data_reader_train().set_source, model.get_embedding_training_cache().update)
    model.save_params_to_files(str(folder / "made"), 10)
    return rows_of_folder(folder / "rows")


def cached(folder):
    return hugectr.CreateETC(
        ps_types=[CACHED],
        sparse_models=[str(folder / "rows")],
        local_paths=[str(folder / "local")],
        hmem_cache_configs=[hugectr.CreateHMemCache(num_blocks=2, target_hit_rate=0.5, max_num_evict=0)],
    )


def release_3_5(files, folder):
    model = new_model(files, "3.5", cached(folder))
    model.fit(num_epochs=1, eval_interval=5, display=5)
    model.save_params_to_files(str(folder / "made"), 10)
    assert list((folder / "local").glob("cache-*"))
    return rows_of_folder(folder / "rows")


def release_3_9(files, folder):
    model = new_model(files, "3.9", cached(folder))
    for source, keyset in zip(files.sources, files.keysets, strict=True):
        model.set_source(source=[source], keyset=[keyset], eval_source=files.eval_source)
        model.fit(num_epochs=1, eval_interval=5, display=5)
    model.save_params_to_files(str(folder / "made"), 10)
    return rows_of_folder(folder / "rows")


def release_23_12(files, folder):
    model = new_model(files, "23.12", cached(folder))
    cache = model.get_embedding_training_cache()
    walk(model, files, model.get_data_reader_train().set_source, lambda keyset: cache.update([keyset]))
    found = {}
    for keys, vectors in model.get_incremental_model():
        found |= dict(zip(keys.tolist(), vectors, strict=True))
    return found


SCRIPTS = (
    release_2_3, release_3_0, preview_of_3_0, release_3_1, release_3_2, release_3_3, release_3_5, release_3_9,
    release_23_12,
)  # fmt: skip


@pytest.fixture(scope="module")
def expected(files, tmp_path_factory):
    return in_memory(files, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_ends_with_the_rows_of_training_in_memory(files, expected, tmp_path, script):
    found = script(files, tmp_path)
    assert len(expected) == 4 * ROWS
    assert found.keys() == expected.keys()
    for key, vector in expected.items():
        np.testing.assert_array_equal(found[key], vector)
