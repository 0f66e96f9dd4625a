# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: sources, versions, loading in the background."""

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError, DataNotFoundError, FormatError, StorageError
from terarec.formats.hugectr.weights import SparseFileLayout, SparseRows, write_sparse_file, write_sparse_folder
from terarec.kernels.slots import RowBatch
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.shared import MEMORY
from terarec.ps import ParameterServer
from terarec.ps import loading as loading_module
from terarec.ps import server as server_module
from terarec.ps.loading import RowChunk, TableSource
from terarec.ps.server import TableChange
from terarec.spec import (
    CacheSpec,
    HostMemorySpec,
    ParameterServerSpec,
    RocksDBSpec,
    RowFileSpec,
    ServedModelSpec,
    ServedTableSpec,
    SharedMemorySpec,
)
from terarec.spec.parameter_server import TierSpec
from tests.errors import at
from tests.ps.redis_processes import RedisProcess, needs_redis, running
from tests.ps.tiers import KINDS
from tests.waiting import PATIENCE, wait_for

KEYS = np.arange(100, 1100) * 3
VECTORS = np.random.default_rng(0).standard_normal((1000, 8)).astype(np.float32)


def model(source: Path, version: int = 0, **table: object) -> ServedModelSpec:
    options = {"name": "user", "width": 8, "source": str(source), **table}
    return ServedModelSpec(name="dcn", version=version, tables=(ServedTableSpec(**options),))  # type: ignore[arg-type]


def folder(path: Path, factor: float = 1.0) -> Path:
    write_sparse_folder(path, [SparseRows(KEYS, VECTORS * np.float32(factor))])
    return path


def serve(*models: ServedModelSpec, tiers: tuple[TierSpec, ...] = (HostMemorySpec(),)) -> ParameterServer:
    return ParameterServer(ParameterServerSpec(tiers=tiers, models=models))


def looked_up(server: ParameterServer, version: int | None = None) -> np.ndarray:
    return server.lookup("dcn", "user", torch.from_numpy(KEYS), version).numpy()


def test_a_folder_of_hugectr_is_served(tmp_path: Path) -> None:
    with serve(model(folder(tmp_path / "0"), default=0.5)) as server:
        assert np.array_equal(looked_up(server), VECTORS)
        assert server.lookup("dcn", "user", torch.tensor([5])).tolist() == [[0.5] * 8]
        assert server.statistics()["dcn"]["user"].defaults == 1


@pytest.mark.parametrize(("key_bytes", "has_slots"), [(4, False), (8, True)])
def test_a_file_of_hugectr_is_served(tmp_path: Path, key_bytes: int, has_slots: bool) -> None:
    layout = SparseFileLayout(8, key_bytes, has_slots)  # type: ignore[arg-type]
    slots = np.zeros(1000, np.uint64) if has_slots else None
    write_sparse_file(tmp_path / "sparse.model", layout, [SparseRows(KEYS, VECTORS, slots)])
    with serve(model(tmp_path / "sparse.model", key_bytes=key_bytes, has_slots=has_slots)) as server:
        assert np.array_equal(looked_up(server), VECTORS)


def test_versions_are_side_by_side_and_the_last_is_active(tmp_path: Path) -> None:
    with serve(model(folder(tmp_path / "1"), 1), tiers=(RowFileSpec(path=str(tmp_path / "rows")),)) as server:
        server.load(model(folder(tmp_path / "2", 2.0), 2)).wait()
        assert server.versions == {"dcn": (1, 2)}
        assert server.active("dcn") == 2
        assert np.array_equal(looked_up(server), 2 * VECTORS)
        assert np.array_equal(looked_up(server, 1), VECTORS)
        server.activate("dcn", 1)
        assert np.array_equal(looked_up(server), VECTORS)
        server.unload("dcn", 2)
        assert server.versions == {"dcn": (1,)}
        with pytest.raises(ConfigError, check=at("version")):
            server.unload("dcn", 1)
        with pytest.raises(ConfigError, check=at("version")):
            server.lookup("dcn", "user", torch.tensor([1]), 2)
        server.load(model(folder(tmp_path / "3", 3.0), 3)).wait()
        server.unload("dcn", 3, also_active=True)
        assert np.array_equal(looked_up(server), VECTORS)
        server.unload("dcn", 1, also_active=True)
        assert server.versions == {}
        with pytest.raises(ConfigError, check=at("model")):
            server.active("dcn")


def test_a_damaged_version_is_rejected_and_the_old_one_stays(tmp_path: Path) -> None:
    damaged = VECTORS.copy()
    damaged[700, 3] = np.nan
    write_sparse_folder(tmp_path / "2", [SparseRows(KEYS, damaged)])
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "key").write_bytes(KEYS.tobytes())
    (tmp_path / "3" / "emb_vector").write_bytes(VECTORS.tobytes()[:-4])
    tiers = (HostMemorySpec(), RowFileSpec(path=str(tmp_path / "rows")))
    with serve(model(folder(tmp_path / "1"), 1), tiers=tiers) as server:
        loading = server.load(model(tmp_path / "2", 2))
        with pytest.raises(FormatError, check=at(str(tmp_path / "2"))):
            loading.wait()
        assert isinstance(loading.error, FormatError)
        with pytest.raises(FormatError):
            server.load(model(tmp_path / "3", 2))
        with pytest.raises(DataNotFoundError):
            server.load(model(tmp_path / "4", 2))
        assert server.versions == {"dcn": (1,)}
        assert np.array_equal(looked_up(server), VECTORS)
        server.load(model(folder(tmp_path / "5", 3.0), 2)).wait()
        assert np.array_equal(looked_up(server), 3 * VECTORS)


def test_a_version_is_not_found_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def read() -> Iterator[RowChunk]:
        for begin in (0, 500):
            yield RowChunk(torch.from_numpy(KEYS[begin : begin + 500]), torch.zeros(500, 8))
            go_on.wait()

    source = TableSource(path=tmp_path, num_rows=1000, read=read)
    with serve(model(folder(tmp_path / "1"), 1)) as server:
        monkeypatch.setattr(server_module, "open_table_source", lambda spec: source)
        loading = server.load(model(tmp_path, 2))
        with pytest.raises(TimeoutError):
            loading.wait(0.05)
        assert loading.progress.total == 1000
        assert np.array_equal(looked_up(server), VECTORS)
        with pytest.raises(ConfigError, check=at("version")):
            server.load(model(tmp_path, 2))
        go_on.set()
        loading.wait()
        assert loading.progress.rows == 1000
        assert not looked_up(server).any()


def test_closing_stops_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Iterator[RowChunk]:
        while True:
            yield RowChunk(torch.arange(10), torch.zeros(10, 8))

    monkeypatch.setattr(
        server_module, "open_table_source", lambda spec: TableSource(path=tmp_path, num_rows=1, read=read)
    )
    server = serve()
    loading = server.load(model(tmp_path))
    server.close()
    with pytest.raises(StorageError):
        loading.wait()


def test_a_row_file_is_not_loaded_again_unless_its_source_changed(tmp_path: Path) -> None:
    spec, tiers = model(folder(tmp_path / "0")), (RowFileSpec(path=str(tmp_path / "rows")),)
    with serve(spec, tiers=tiers) as server:
        table = server.table("dcn", "user")
        table.insert(torch.tensor([5]), torch.ones(1, 8))
        table.flush()
    opened = TableSource(path=tmp_path / "0", num_rows=1000, read=mock.Mock(side_effect=AssertionError))
    with serve(tiers=tiers) as server, mock.patch.object(server_module, "open_table_source", return_value=opened):
        loading = server.load(spec)
        loading.wait()
        assert loading.progress.rows == loading.progress.total == 1000
        assert server.table("dcn", "user").statistics().tiers[0].counted.inserted == 0
        assert server.lookup("dcn", "user", torch.tensor([5])).tolist() == [[1.0] * 8]
        assert np.array_equal(looked_up(server), VECTORS)
    folder(tmp_path / "0", 4.0)
    with serve(spec, tiers=tiers) as server:
        assert np.array_equal(looked_up(server), 4 * VECTORS)


def test_a_replica_reads_the_files_of_a_writer(tmp_path: Path) -> None:
    spec, path = model(folder(tmp_path / "0")), str(tmp_path / "rows")
    with (
        serve(spec, tiers=(RowFileSpec(path=path),)) as writer,
        serve(spec, tiers=(RowFileSpec(path=path, read_only=True),)) as replica,
    ):
        assert np.array_equal(looked_up(replica), VECTORS)
        writer.table("dcn", "user").insert(torch.tensor([5]), torch.ones(1, 8))
        writer.table("dcn", "user").flush()
        assert replica.refresh()
        assert replica.lookup("dcn", "user", torch.tensor([5])).tolist() == [[1.0] * 8]
        assert not replica.refresh()


def test_host_memory_before_files_of_another_process_forgets_what_that_changed(tmp_path: Path) -> None:
    """A reader kept rows of the files in host memory, and never saw what the writer committed over them."""
    spec, path = model(folder(tmp_path / "0")), str(tmp_path / "rows")
    reads = (HostMemorySpec(load_share=0.0, keeps_found=True), RowFileSpec(path=path, read_only=True))
    with serve(spec, tiers=(RowFileSpec(path=path),)) as writer, serve(spec, tiers=reads) as replica:
        assert np.array_equal(looked_up(replica), VECTORS)
        writer.update("dcn", "user", torch.from_numpy(KEYS[:10]), torch.from_numpy(KEYS[10:20]), torch.ones(10, 8))
        writer.flush("dcn")
        assert replica.refresh()
        expected = VECTORS.copy()
        expected[:10], expected[10:20] = 0.0, 1.0
        for _ in range(2):
            assert np.array_equal(looked_up(replica), expected)


@pytest.mark.parametrize("kind", [RowFileSpec, RocksDBSpec])
def test_rows_that_are_not_there_cannot_be_read(tmp_path: Path, kind: type[RowFileSpec | RocksDBSpec]) -> None:
    """A missing database of RocksDB gave default vectors."""
    with pytest.raises(FormatError):
        serve(model(folder(tmp_path / "0")), tiers=(kind(path=str(tmp_path / "rows"), read_only=True),))


@pytest.mark.skipif("rocksdb" not in KINDS, reason="no rocksdict")
def test_a_database_is_opened_for_reading_alone(tmp_path: Path) -> None:
    """Finding Q: it was opened for writing, which its writer did not let happen, nor a directory of somebody else."""
    spec, path = model(folder(tmp_path / "0")), str(tmp_path / "rows")
    with serve(spec, tiers=(RocksDBSpec(path=path),)) as writer:
        writer.flush("dcn")
        before = {file: file.stat() for file in (tmp_path / "rows").rglob("*")}
        with serve(spec, tiers=(RocksDBSpec(path=path, read_only=True),)) as replica:
            assert np.array_equal(looked_up(replica), VECTORS)
        after = {file: file.stat() for file in (tmp_path / "rows").rglob("*")}
        assert {file: (status.st_ino, status.st_mtime_ns) for file, status in after.items()} == {
            file: (status.st_ino, status.st_mtime_ns) for file, status in before.items()
        }
        assert np.array_equal(looked_up(writer), VECTORS)
    (directory,) = {file.parent for file in (tmp_path / "rows").rglob("CURRENT")}
    store = RocksDBStore.open(directory, read_only=True)
    for change in (lambda: store.erase(KEYS[:1]), store.commit):
        with pytest.raises(StorageError, check=at(directory, "for reading alone")):
            change()
    store.close()


@pytest.mark.parametrize("by", ["update", "another process"])
def test_a_cache_that_is_made_after_an_update_has_the_new_rows(tmp_path: Path, by: str) -> None:
    """It was filled from the source, whose rows the update had replaced and removed."""
    spec, path = model(folder(tmp_path / "0")), str(tmp_path / "rows")
    with (
        serve(spec, tiers=(RowFileSpec(path=path),)) as writer,
        serve(spec, tiers=(RowFileSpec(path=path, read_only=True),)) as replica,
    ):
        writer.update("dcn", "user", torch.from_numpy(KEYS[:10]), torch.from_numpy(KEYS[10:20]), torch.ones(10, 8))
        writer.flush("dcn")
        assert replica.refresh()
        expected = VECTORS.copy()
        expected[:10], expected[10:20] = 0.0, 1.0
        server = writer if by == "update" else replica
        cache = server.cache("dcn", "user", spec=CacheSpec(share=1.0, hit_rate_threshold=1.0))
        assert cache.statistics().rows == 990
        assert np.array_equal(cache.lookup(torch.from_numpy(KEYS)).numpy(), expected)


def test_a_file_that_changed_to_another_state_is_not_taken_for_its_source(tmp_path: Path) -> None:
    """Its metadata kept the name of the source, whose rows it then seemed to have."""
    spec, tiers = model(folder(tmp_path / "0")), (RowFileSpec(path=str(tmp_path / "rows")),)
    change = TableChange(torch.from_numpy(KEYS[:10]), torch.tensor([5]), torch.ones(1, 8))
    with serve(spec, tiers=tiers) as server:
        server.apply("dcn", {"user": [change]}, "step-2")
        server.flush("dcn")
    with serve(spec, tiers=tiers) as server:
        assert np.array_equal(looked_up(server), VECTORS)
        assert server.lookup("dcn", "user", torch.tensor([5])).count_nonzero() == 0


@pytest.mark.parametrize(
    "tier",
    [
        RowFileSpec(path="rows"),
        pytest.param(RocksDBSpec(path="rows"), marks=pytest.mark.skipif("rocksdb" not in KINDS, reason="no rocksdict")),
        pytest.param(
            SharedMemorySpec(name="unused", removes=False),
            marks=pytest.mark.skipif(not MEMORY.is_dir(), reason="the system holds no files in memory"),
        ),
    ],
    ids=lambda tier: tier.kind,
)
def test_loading_that_fails_removes_no_rows_that_were_there(
    tmp_path: Path, tier: RowFileSpec | RocksDBSpec | SharedMemorySpec
) -> None:
    """Files that loading did not touch were emptied, with what updates had set since."""
    if isinstance(tier, SharedMemorySpec):
        tier = replace(tier, name=f"terarec-test-{uuid.uuid4().hex}")
    else:
        tier = replace(tier, path=str(tmp_path / "rows"))
    tables = [ServedTableSpec(name=name, width=8, source=str(folder(tmp_path / name))) for name in "ab"]
    spec = ServedModelSpec(name="dcn", tables=tuple(tables))
    with ExitStack() as removed:
        if isinstance(tier, SharedMemorySpec):
            removed.callback(shutil.rmtree, MEMORY / tier.name)
        with serve(spec, tiers=(tier,)) as server:
            server.update("dcn", "a", torch.zeros(0, dtype=torch.int64), torch.tensor([5]), torch.ones(1, 8))
            server.flush("dcn")
        write_sparse_folder(tmp_path / "b", [SparseRows(KEYS, np.full_like(VECTORS, np.nan))])
        with pytest.raises(FormatError):
            serve(spec, tiers=(tier,))
        folder(tmp_path / "b")
        with serve(spec, tiers=(tier,)) as server:
            assert server.lookup("dcn", "a", torch.tensor([5])).tolist() == [[1.0] * 8]
            assert np.array_equal(server.lookup("dcn", "b", torch.from_numpy(KEYS)).numpy(), VECTORS)
            server.unload("dcn", 0, also_active=True, keeps_earlier=True)  # as after an error behind loading
        with serve(spec, tiers=(tier,)) as server:
            assert server.lookup("dcn", "a", torch.tensor([5])).tolist() == [[1.0] * 8]


@needs_redis
def test_a_model_is_loaded_although_a_tier_is_dead(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as redis:
        redis.kill()
        tiers = (redis.spec(), RowFileSpec(path=str(tmp_path / "rows")))
        with serve(model(folder(tmp_path / "0")), tiers=tiers) as server:
            assert np.array_equal(looked_up(server), VECTORS)
            assert server.statistics()["dcn"]["user"].tiers[0].is_stale
            redis.start()

            def is_renewed() -> bool:
                return server.renew("dcn") == 1

            wait_for(is_renewed)
            assert np.array_equal(looked_up(server), VECTORS)
            assert server.statistics()["dcn"]["user"].tiers[0].counted.hits == 1000
        redis.kill()
        with pytest.raises(StorageError):
            serve(model(folder(tmp_path / "0")), tiers=(redis.spec(),))
        redis.start()


@needs_redis
def test_rows_in_redis_that_another_server_looks_up_stay(redis_server: RedisProcess, tmp_path: Path) -> None:
    """A second server that failed to load, was stopped or removed the version left the first with default vectors."""
    client = pytest.importorskip("redis").Redis(redis_server.host, redis_server.port)
    tiers = (redis_server.spec(num_partitions=2),)
    folder(tmp_path / "1")
    damaged = VECTORS.copy()
    damaged[-1] = np.nan
    write_sparse_folder(tmp_path / "2", [SparseRows(KEYS, damaged)])
    with serve(model(tmp_path / "1", 71), tiers=tiers) as first, serve(tiers=tiers) as second:
        with pytest.raises(FormatError):
            second.load(model(tmp_path / "2", 71)).wait()
        assert np.array_equal(looked_up(first), VECTORS)
        second.load(model(tmp_path / "1", 71)).wait()
        assert client.zcard("hps_et{hps_et.dcn@71.user/p0}u") == 2  # before their first lookup
        with pytest.raises(FormatError):
            second.load(model(tmp_path / "2", 72)).wait()
        assert not client.keys("*@72*")  # where nobody had rows before, none stay
        second.load(model(tmp_path / "1", 72)).wait()
        second.unload("dcn", 71)
        assert np.array_equal(looked_up(first), VECTORS)
        first.load(model(tmp_path / "1", 72)).wait()
        first.unload("dcn", 71)
        assert not client.keys("*@71*")
        first.load(model(tmp_path / "1", 73)).wait()
        first.unload("dcn", 72)
        assert np.array_equal(looked_up(second), VECTORS)  # its first lookup


@needs_redis
def test_a_part_of_a_source_without_a_name_is_not_called_whole(redis_server: RedisProcess, tmp_path: Path) -> None:
    """A retrained folder whose loading failed behind its first rows left a mixture that was marked as whole."""
    client = pytest.importorskip("redis").Redis(redis_server.host, redis_server.port)
    damaged = 2 * VECTORS
    damaged[-1] = np.nan
    write_sparse_folder(tmp_path / "2", [SparseRows(KEYS, damaged)])
    tiers = (redis_server.spec(),)
    with (
        mock.patch.object(loading_module, "CHUNK_ROWS", 500),
        serve(model(folder(tmp_path / "1"), 75), tiers=tiers) as first,
        serve(tiers=tiers) as second,
    ):
        with pytest.raises(FormatError):
            second.load(model(tmp_path / "2", 75)).wait()
        assert client.get("hps_et{hps_et.dcn@75.user/p0}s") == b"2 >"
        assert np.array_equal(looked_up(first), np.concatenate([2 * VECTORS[:500], VECTORS[500:]]))
        # Nothing but these rows is there, so that updates go on with them.
        first.update("dcn", "user", torch.from_numpy(KEYS[:10]), torch.tensor([5]), torch.ones(1, 8))
        assert np.array_equal(looked_up(first)[500:], VECTORS[500:])
        assert not first.statistics()["dcn"]["user"].tiers[0].is_stale


def test_a_share_of_the_rows_in_host_memory_the_rest_on_disk(tmp_path: Path) -> None:
    tiers = (HostMemorySpec(load_share=0.25), RowFileSpec(path=str(tmp_path / "rows")))
    with serve(model(folder(tmp_path / "0")), tiers=tiers) as server:
        assert np.array_equal(looked_up(server), VECTORS)
        host, disk = server.statistics()["dcn"]["user"].tiers
        assert (host.counted.hits, disk.counted.hits) == (250, 750)


@pytest.mark.parametrize("by", ["unload", "close"])
def test_a_table_of_a_version_that_is_gone_raises(tmp_path: Path, by: str) -> None:
    """It answered with default vectors, as if no key had a row."""
    with serve(model(folder(tmp_path / "1"), 1), model(folder(tmp_path / "2", 2.0), 2)) as server:
        table = server.table("dcn", "user", 1)
        cache = server.cache("dcn", "user", 1, spec=CacheSpec(share=0.5, hit_rate_threshold=0.1))
        if by == "unload":
            server.activate("dcn", 2)
            server.unload("dcn", 1)
            assert np.array_equal(looked_up(server), 2 * VECTORS)
        else:
            server.close()
        for lookup in (table.lookup, cache.lookup):
            with pytest.raises(StorageError, check=at("tables user")):
                lookup(torch.from_numpy(KEYS))


def test_a_version_that_goes_during_a_lookup_gives_no_default_vectors(tmp_path: Path) -> None:
    with serve(model(folder(tmp_path / "1"), 1)) as server:
        table = server.table("dcn", "user")
        stack = table.group.stack
        read = stack.read

        def read_after(batch: RowBatch, out: torch.Tensor) -> torch.Tensor:
            server.unload("dcn", 1, also_active=True)
            return read(batch, out)

        with mock.patch.object(stack, "read", read_after), pytest.raises(StorageError, check=at("tables user")):
            table.lookup(torch.from_numpy(KEYS))


def source_of(path: Path, then: Callable[[], None]) -> TableSource:
    """Return a source that is read by loading, and then by the making of caches, at which something else happens."""
    reads = iter([lambda: None, then])

    def read() -> Iterator[RowChunk]:
        next(reads)()
        yield RowChunk(torch.from_numpy(KEYS), torch.from_numpy(VECTORS))

    return TableSource(path=path, num_rows=1000, read=read)


def test_caches_of_one_model_are_used_while_those_of_another_are_made(tmp_path: Path) -> None:
    is_making, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_making.set()
        assert go_on.wait(PATIENCE)

    one, other = [replace(model(tmp_path), name=name, cache=CacheSpec(share=0.5)) for name in ("one", "other")]
    with serve() as server, ThreadPoolExecutor() as pool:
        for spec, then in ((one, lambda: None), (other, wait)):
            with mock.patch.object(server_module, "open_table_source", return_value=source_of(tmp_path, then)):
                server.load(spec).wait()
        server.caches("one")
        making = pool.submit(server.caches, "other")
        try:
            assert is_making.wait(PATIENCE)
            key = torch.from_numpy(KEYS[:1])
            pool.submit(server.update, "one", "user", key, key, torch.ones(1, 8)).result(PATIENCE)
            row = pool.submit(lambda: server.cache("one", "user").lookup(key)).result(PATIENCE)
            assert row.tolist() == [[1.0] * 8]
        finally:
            go_on.set()
        assert making.result(PATIENCE).caches["user"].statistics().rows == 500


def test_caches_of_a_version_that_goes_while_they_are_made_end(tmp_path: Path) -> None:
    """Their thread went on for good."""

    def unload() -> None:
        unloading.start()
        wait_for(lambda: version.groups[0].stack.is_retired)
        unloading.join(0.2)  # it ended before the caches were there, which nobody closed then

    source = source_of(tmp_path, unload)
    with serve() as server, mock.patch.object(server_module, "open_table_source", return_value=source):
        unloading = threading.Thread(target=server.unload, args=("dcn", 0), kwargs={"also_active": True})
        server.load(model(tmp_path)).wait()
        version = server._version("dcn", 0)
        before = set(threading.enumerate())
        # As of any version that is not there, and not as lookups in its tables, which end the making.
        with pytest.raises(ConfigError, check=at("version")):
            server.caches("dcn", spec=CacheSpec(share=0.5, refresh_seconds=60.0))
        unloading.join()
        assert set(threading.enumerate()) <= before


def test_unknown_names_are_rejected(tmp_path: Path) -> None:
    with serve(model(folder(tmp_path / "0"))) as server:
        for arguments, where in (
            (("dnn", "user"), "model"),
            (("dcn", "item"), "table"),
            (("dcn", "user", 7), "version"),
        ):
            with pytest.raises(ConfigError, check=at(where)):
                server.table(*arguments)  # type: ignore[arg-type]


def test_another_width_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        serve(model(folder(tmp_path / "0"), width=9))
    serve(model(folder(tmp_path / "0")), tiers=(RowFileSpec(path=str(tmp_path / "rows")),)).close()
    other = ServedModelSpec(name="dcn", tables=(ServedTableSpec(name="user", width=4),))
    with pytest.raises(FormatError):
        serve(other, tiers=(RowFileSpec(path=str(tmp_path / "rows")),))
