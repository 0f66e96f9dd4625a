# SPDX-License-Identifier: Apache-2.0
"""`HPS` and `hps_torch.LookupLayer`, as HugeCTR's own tests of them call them."""

import importlib
import json
import socket
import sys
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.errors import StorageError, UnreachableError
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.hugectr.command_line import provide_modules
from terarec.hugectr.errors import ServerUnreachableError, WrongInputError
from terarec.hugectr.hps_torch import LookupLayer
from terarec.hugectr.inference import HPS, InferenceParams, ParameterServerConfig, VolatileDatabaseParams
from terarec.memory.shared import MEMORY

ROWS, WIDTH = 50, 4
VECTORS = np.random.default_rng(0).standard_normal((2 * ROWS, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def server_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ps.json of two tables, whose keys do not overlap, with the keys of HugeCTR's test of `hps_torch`."""
    folder = tmp_path_factory.mktemp("hps")
    for number in range(2):
        keys = np.arange(number * ROWS, (number + 1) * ROWS)
        write_sparse_folder(folder / f"table{number}", [SparseRows(keys, VECTORS[keys])])
    model: dict[str, Any] = {
        "model": "2_table",
        "sparse_files": [str(folder / f"table{number}") for number in range(2)],
        "num_of_worker_buffer_in_pool": 2,
        "embedding_table_names": ["table0", "table1"],
        "embedding_vecsize_per_table": [WIDTH, WIDTH],
        "maxnum_catfeature_query_per_table_per_sample": [10, 10],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": 256,
        "cache_refresh_percentage_per_iteration": 1.0,
        "hit_rate_threshold": 1.0,
        "gpucacheper": 1.0,
        "gpucache": True,
        "embedding_cache_type": "static",
        "use_context_stream": True,
    }
    (folder / "ps.json").write_text(
        json.dumps({"supportlonglong": False, "fuse_embedding_table": True, "models": [model]})
    )
    return str(folder / "ps.json")


@pytest.fixture(scope="module")
def hps(server_file: str) -> HPS:
    return HPS(server_file)


@pytest.mark.parametrize("keys", [[3, 49, 3], np.array([7], np.uint32), (1, 2), [np.int64(4), np.int64(0)], [1.0, 2.0]])
def test_vectors_have_two_dimensions(hps: HPS, keys: Any) -> None:
    """Finding M2: `hps.lookup(keys, model, table)` is [n, D]."""
    found = hps.lookup(keys, "2_table", 0)
    assert found.shape == (len(keys), WIDTH)
    assert np.array_equal(found, VECTORS[np.asarray(keys, np.int64)])


def test_no_keys_have_no_vectors(hps: HPS) -> None:
    """Finding M13: `lookup([])`."""
    assert hps.lookup([], "2_table", 1).shape == (0, WIDTH)


@pytest.mark.parametrize(
    "keys",
    [[1.5], np.full(2, 2**24, np.float32), [np.nan], [True], ["a"], [[1, 2]], [[1], [2, 3]], 3, "12"],
)
def test_other_keys_than_integers_are_one_line(hps: HPS, keys: Any) -> None:
    """Finding M13: keys of floats that are no integers, or beyond their type's precision."""
    with pytest.raises(WrongInputError) as caught:
        hps.lookup(keys, "2_table", 0)
    assert caught.value.field == "h_keys"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [3, 5])
def test_a_capsule_of_results_stays_usable(hps: HPS, size: int) -> None:
    """Finding M5: a script reads its results from the capsule, which may have room for more."""
    keys = torch.tensor([49, 0, 7])
    out = torch.full((size, WIDTH), -1.0)
    key_capsule, out_capsule = torch.utils.dlpack.to_dlpack(keys), torch.utils.dlpack.to_dlpack(out)
    for _ in range(2):
        hps.lookup_fromdlpack(key_capsule, out_capsule, "2_table", 0)
    found = torch.utils.dlpack.from_dlpack(out_capsule)
    assert torch.equal(torch.utils.dlpack.from_dlpack(key_capsule), keys)
    assert np.array_equal(found[:3].numpy(), VECTORS[keys])
    assert (found[3:] == -1).all()
    assert found.data_ptr() == out.data_ptr()


def test_tensors_in_place_of_capsules(hps: HPS) -> None:
    """Finding M5: the first parameter is `h_keys` in 3.8 to 4.0; keys and results may have any shape."""
    out = torch.empty(1, 4 * WIDTH)
    hps.lookup_fromdlpack(h_keys=torch.tensor([[1, 2], [3, 4]]), out_tensor=out, model_name="2_table", table_id=0)
    assert np.array_equal(out.reshape(4, WIDTH).numpy(), VECTORS[1:5])
    hps.lookup_fromdlpack(np.array([5]), out, "2_table", 0)
    assert np.array_equal(out[0, :WIDTH].numpy(), VECTORS[5])


def test_tensors_that_do_not_fit(hps: HPS) -> None:
    keys, out = torch.arange(3), torch.empty(3, WIDTH)
    used = torch.utils.dlpack.to_dlpack(out)
    torch.utils.dlpack.from_dlpack(used)
    for arguments, field in (
        ((out, out), "keys"),
        ((keys, out[:2]), "out_tensor"),
        ((keys, out.double()), "out_tensor"),
        ((keys, torch.empty(WIDTH, 3).t()), "out_tensor"),
        ((keys, used), "out_tensor"),
        ((keys, torch.utils.dlpack.to_dlpack(out.bfloat16())), "out_tensor"),
        ((keys, [0.0]), "out_tensor"),
    ):
        with pytest.raises(WrongInputError) as caught:
            hps.lookup_fromdlpack(*arguments, "2_table", 0)
        assert caught.value.field == field


def test_another_number_of_defaults_than_files_is_the_first(tmp_path: Path) -> None:
    """As HugeCTR fills `default_value_for_each_table`, here of files that have no row of the key."""
    write_sparse_folder(tmp_path / "rows", [SparseRows(np.arange(2), VECTORS[:2])])
    files = [str(tmp_path / "rows")] * 3
    params = InferenceParams("m", 8, 1.0, "", files, 0, False, 0.5, True, default_value_for_each_table=[0.5, 2.0])
    widths = [WIDTH] * 3
    hps = HPS(ParameterServerConfig({"m": ["a", "b", "c"]}, {"m": widths}, {"m": [1, 1, 1]}, [params]))
    assert [hps.lookup([9], "m", table).tolist() for table in range(3)] == [[[0.5] * WIDTH]] * 3
    hps.server.close()


@pytest.mark.parametrize("loads", [True, False])
def test_a_server_that_is_not_there_is_named(tmp_path: Path, loads: bool) -> None:
    """Finding M13: not as memory that is full."""
    pytest.importorskip("redis")
    write_sparse_folder(tmp_path / "rows", [SparseRows(np.arange(2), VECTORS[:2])])
    with socket.socket() as held:  # bound, and nobody listens: no other process gets the port
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        database = VolatileDatabaseParams(hugectr.DatabaseType_t.redis_cluster, address, initialize_after_startup=loads)
        params = InferenceParams("m", 8, 1.0, "", [str(tmp_path / "rows")], 0, False, 0.5, True)
        config = ParameterServerConfig({"m": ["a"]}, {"m": [WIDTH]}, {"m": [1]}, [params], database)
        with pytest.raises(ServerUnreachableError, match=address) as caught:
            HPS(config)
    assert isinstance(caught.value, UnreachableError | ConnectionError | RuntimeError)
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="the system holds no files in memory")
def test_memory_of_several_processes(server_file: str, tmp_path: Path) -> None:
    """Finding M3: as in hps_demo, the second process loads nothing; it got default vectors, with no word."""
    content = json.loads(Path(server_file).read_text())
    name = f"terarec-test-{uuid.uuid4().hex}"
    shared = {"type": "multi_process_hash_map", "shared_memory_name": name, "shared_memory_size": 2**20}
    opened = []
    for loads in (True, False):
        content["volatile_db"] = {**shared, "initialize_after_startup": loads}
        (tmp_path / "ps.json").write_text(json.dumps(content))
        opened.append(HPS(str(tmp_path / "ps.json")))
        assert np.array_equal(opened[-1].lookup([3, 49, 0], "2_table", 0), VECTORS[[3, 49, 0]])
    for each in opened:
        each.server.close()
    with pytest.raises(StorageError):
        HPS(str(tmp_path / "ps.json"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_layer_looks_keys_up(server_file: str, dtype: torch.dtype) -> None:
    """Finding M14: `hps_torch.LookupLayer` of keys [B, n]."""
    keys = torch.randint(ROWS, 2 * ROWS, (6, 10), dtype=dtype)
    vectors = LookupLayer(server_file, "2_table", 1, WIDTH)(keys)
    assert vectors.shape == (6, 10, WIDTH)
    assert np.array_equal(vectors.numpy(), VECTORS[keys.numpy()])


class Tables(torch.nn.Module):
    """The model of HugeCTR's test: each table is looked up in a task of its own."""

    def __init__(self, server_file: str) -> None:
        super().__init__()
        layers = [LookupLayer(server_file, "2_table", number, WIDTH) for number in range(2)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, keys_list: torch.Tensor) -> torch.Tensor:
        futures = torch.jit.annotate(list[torch.jit.Future[torch.Tensor]], [])
        for i, layer in enumerate(self.layers):
            futures.append(torch.jit.fork(layer, keys_list[i]))
        vectors = torch.jit.annotate(list[torch.Tensor], [])
        for future in futures:
            vectors.append(torch.jit.wait(future))
        return torch.cat(vectors)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_layers_in_a_script(server_file: str, tmp_path: Path) -> None:
    """Finding M14: TorchScript with tasks, saved and loaded."""
    torch.jit.script(Tables(server_file)).save(tmp_path / "model.pt")
    keys = torch.stack([torch.arange(8).reshape(2, 4) + number * ROWS for number in range(2)]).int()
    found = torch.jit.load(tmp_path / "model.pt")(keys)
    assert np.array_equal(found.numpy(), np.concatenate(VECTORS[keys.numpy()]))


def test_an_exported_layer(server_file: str) -> None:
    keys = torch.arange(4).reshape(2, 2)
    program = torch.export.export(LookupLayer(server_file, "2_table", 0, WIDTH), (keys,))
    assert np.array_equal(program.module()(keys).numpy(), VECTORS[keys])


def test_layers_that_do_not_fit(server_file: str) -> None:
    keys = torch.zeros(1, 1, dtype=torch.int64)
    for layer, wrong, field in (
        (LookupLayer(server_file, "2_table", 0, 3), keys, "emb_vec_size"),
        (LookupLayer(server_file, "2_table", 0, WIDTH), keys.float(), "keys"),
        (LookupLayer(server_file, "2_table", 2, WIDTH), keys, "table_id"),
    ):
        with pytest.raises(WrongInputError) as caught:
            layer(wrong)
        assert caught.value.field == field


def test_scripts_import_the_package_by_its_name() -> None:
    """Finding M14: ``import hps_torch`` under ``python -m terarec.hugectr``, and its module."""
    with mock.patch.dict(sys.modules):
        provide_modules()
        assert importlib.import_module("hps_torch").LookupLayer is LookupLayer
        assert importlib.import_module("hps_torch.lookup_layer").LookupLayer is LookupLayer
