# SPDX-License-Identifier: Apache-2.0
"""Model files behind URLs, and sets of files that are taken or left as wholes."""

import fsspec
import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.data import DataSource, DataSourceParams, file_url, stored_path
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from tests.errors import at
from tests.hugectr.families import wide_deep
from tests.hugectr.scripts import ADAM, auc_of, dcn

HDFS = {"source": hugectr.FileSystemType_t.HDFS, "server": "node", "port": 1}


@pytest.fixture
def url(tmp_path):
    place = f"memory://models/{tmp_path.name}"
    yield place
    fsspec.filesystem("memory").rm(f"/models/{tmp_path.name}", recursive=True)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_snapshot_behind_a_url_is_that_of_a_disk_and_loads_again(planted, tmp_path, url):
    made = dcn(*planted[:2], optimizer=ADAM)
    made.fit(max_iter=4, display=0, eval_interval=0)
    made.save_params_to_files(f"{url}/dcn", 4)
    made.save_params_to_files(f"{url}/dcn", 4)  # in the place of the first
    made.save_params_to_files(str(tmp_path / "dcn"), 4)
    made.graph_to_json(f"{url}/dcn.json")
    files = fsspec.filesystem("memory")
    root = f"/models/{tmp_path.name}/"
    remote = {name.removeprefix(root): files.cat_file(name) for name in files.find(root) if not name.endswith("json")}
    assert remote == {str(path): content for path, content in contents(tmp_path).items()}

    other = hugectr.Model(made.solver, made.reader_params, hugectr.CreateOptimizer(**ADAM))
    other.construct_from_json(f"{url}/dcn.json", True)
    other.compile()
    other.load_dense_weights(f"{url}/dcn_dense_4.model")
    other.load_dense_optimizer_states(f"{url}/dcn_opt_dense_4.model")
    other.load_sparse_weights([f"{url}/dcn0_sparse_4.model"])
    other.load_sparse_optimizer_states([f"{url}/dcn0_opt_sparse_4.model"])
    other.start_data_reading()
    assert auc_of(other) == auc_of(made)
    other.save_params_to_files(str(tmp_path / "again" / "dcn"), 4)
    assert contents(tmp_path / "again") == {p: c for p, c in contents(tmp_path).items() if p.parts[0] != "again"}
    with pytest.raises(FileCannotOpenError, check=at(f"load_dense_weights: {url}/none")):
        other.load_dense_weights(f"{url}/none")


def test_a_snapshot_that_is_rejected_halfway_leaves_the_former_one(planted, tmp_path):
    made = wide_deep(*planted[:2])
    made.fit(max_iter=2, display=0, eval_interval=0)
    made.save_params_to_files(str(tmp_path / "w"))
    (tmp_path / "w1_sparse_0.model" / "notes").write_text("mine")
    before = contents(tmp_path)
    made.fit(max_iter=2, display=0, eval_interval=0)
    with pytest.raises(WrongInputError, check=at("save_params_to_files: out")):
        made.save_params_to_files(str(tmp_path / "w"))
    assert contents(tmp_path) == before
    assert {path.name[:1] for path in tmp_path.iterdir()} == {"w"}


def states_of(made):
    return [
        {name: tensor.clone() for name, tensor in arena.state.items()}
        for name in made.module.embeddings
        for arena in made.module.collection(name).arenas
    ]


def test_optimizer_states_of_several_embeddings_are_taken_all_or_none(planted, tmp_path):
    made = wide_deep(*planted[:2])
    made.fit(max_iter=2, display=0, eval_interval=0)
    made.save_params_to_files(str(tmp_path / "w"))
    made.fit(max_iter=2, display=0, eval_interval=0)
    good, broken = tmp_path / "w0_opt_sparse_0.model", tmp_path / "w1_opt_sparse_0.model"
    broken.write_bytes(broken.read_bytes()[:-4])
    before = states_of(made)
    with pytest.raises(BrokenFileError, check=at(f"load_sparse_optimizer_states: {broken}")):
        made.load_sparse_optimizer_states([str(good), str(broken)])
    for mine, was in zip(states_of(made), before, strict=True):
        assert all((mine[name] == was[name]).all() for name in was)


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/a/b", "hdfs://node:1/a/b"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("https://bucket.s3.us-east-1.amazonaws.com/a/b", "s3://bucket/a/b"),
        ("https://s3.us-east-1.amazonaws.com/bucket/a", "s3://bucket/a"),
        ("https://storage.googleapis.com/bucket/a", "gs://bucket/a"),
    ],
)
def test_paths_of_a_file_system_as_urls(path, url):
    assert file_url(DataSourceParams(**HDFS), path) == url


def test_a_solver_says_where_model_files_are(planted):
    made = dcn(*planted[:2], data_source_params=DataSourceParams(**HDFS))
    assert made._url("/a/b") == "hdfs://node:1/a/b"
    assert dcn(*planted[:2])._url("a/b") == "a/b"


def test_the_files_of_a_job_are_copied_to_the_disk(tmp_path, url):
    files = fsspec.filesystem("memory")
    for name, content in (("train/0.data", b"0"), ("train/1.data", b"1"), ("list.txt", b"2"), ("m0/key", b"3")):
        files.pipe_file(f"/models/{tmp_path.name}/{name}", content)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine").write_text("4")
    local = {"local_train_source": f"{tmp_path}/train/", "local_train_filelist": f"{tmp_path}/list.txt"}
    remote = {"hdfs_train_source": f"{url}/train/", "hdfs_train_filelist": f"{url}/list.txt"}
    rows = {"hdfs_sparse_model": [f"{url}/m0"], "local_sparse_model": [f"{tmp_path}/m0"]}
    DataSource(DataSourceParams(use_hdfs=True, **local, **remote, **rows)).move_to_local()
    found = {str(path): content for path, content in contents(tmp_path).items()}
    assert found == {"train/0.data": b"0", "train/1.data": b"1", "train/mine": b"4", "list.txt": b"2", "m0/key": b"3"}
    with pytest.raises(FileCannotOpenError, check=at(f"move_to_local: {url}/none")):
        DataSource(
            DataSourceParams(use_hdfs=True, hdfs_dense_model=f"{url}/none", local_dense_model="x")
        ).move_to_local()
    with pytest.raises(WrongInputError, check=at("DataSource", "expected use_hdfs and paths")):
        DataSource(DataSourceParams(**HDFS))
    with pytest.raises(WrongInputError, check=at("DataSource", "got 1 hdfs_sparse_model and 2 local_sparse_model")):
        DataSource(DataSourceParams(use_hdfs=True, hdfs_sparse_model=["a"], local_sparse_model=["b", "c"]))


def test_release_3_4_has_the_paths_of_each_call(planted, tmp_path):
    made = dcn(*planted[:2])
    made.fit(max_iter=2, display=0, eval_interval=0)
    home = DataSourceParams(use_hdfs=False, local_model_home=f"{tmp_path}/home/")
    made.save_params_to_files("dcn", 2, home)
    assert {path.name for path in (tmp_path / "home").iterdir()} == {
        "dcn_dense_2.model",
        "dcn_opt_dense_2.model",
        "dcn0_sparse_2.model",
        "dcn0_opt_sparse_2.model",
    }
    other = dcn(*planted[:2], seed=9)
    other.load_dense_weights(f"{tmp_path}/home/dcn_dense_2.model", home)
    other.load_sparse_weights(
        sparse_embedding_files_map={"embedding": f"{tmp_path}/home/dcn0_sparse_2.model"}, data_source_params=home
    )
    other.start_data_reading()
    assert auc_of(other) == auc_of(made)
    there = DataSourceParams(use_hdfs=True, namenode="node", port=1, hdfs_dense_model="/m/dense.model")
    assert stored_path(there, "dense_model", "") == "/m/dense.model"
    assert stored_path(there, "sparse_model", ["/m/sparse"]) == ["/m/sparse"]
    assert stored_path(home, "dense_model", "mine") == "mine"
