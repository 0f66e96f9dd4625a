# SPDX-License-Identifier: Apache-2.0
"""Finding M3: rows in memory that processes share. Two servers of one process share it as two processes do."""

import contextlib
import gc
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.closer import wait_closed
from terarec.errors import NoSpaceError, StorageError
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.io.removal import remove_tree
from terarec.kernels.slots import RowBatch
from terarec.memory import shared
from terarec.memory.batch_parts import batch_of
from terarec.memory.cache import Cache
from terarec.memory.guarded import STATE, Guarded
from terarec.memory.shared import MEMORY, SharedStores
from terarec.memory.table_stores import TableStores
from terarec.ps import ParameterServer
from terarec.ps.levels import shared_level
from terarec.ps.loading import source_identity
from terarec.spec import HostMemorySpec, ParameterServerSpec, ServedModelSpec, ServedTableSpec, SharedMemorySpec
from tests.processes import Python
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(not MEMORY.is_dir(), reason="the system holds no files in memory")
KEYS = torch.arange(100) * 3
VECTORS = dict(zip("ab", np.random.default_rng(0).standard_normal((2, 100, 4)).astype(np.float32), strict=True))
LOADER = """
import sys, threading
from tests.ps.test_shared import serve
server = serve(sys.argv[1], sys.argv[2])
print("loaded", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def name() -> Iterator[str]:
    held = f"terarec-test-{uuid.uuid4().hex}"
    yield held
    for entry in (MEMORY / held).glob("*/"):
        remove_tree(entry)
    with contextlib.suppress(FileNotFoundError):
        (MEMORY / held).rmdir()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for table, vectors in VECTORS.items():
        write_sparse_folder(tmp_path / table, [SparseRows(KEYS.numpy(), vectors)])
    return tmp_path


def serve(
    name: str, source: Path | str, share: float = 1.0, *faster: HostMemorySpec, **options: bool | int
) -> ParameterServer:
    tables = tuple(ServedTableSpec(name=table, width=4, source=str(Path(source) / table)) for table in VECTORS)
    tiers = (*faster, SharedMemorySpec(name=name, load_share=share, **options))  # type: ignore[arg-type]
    return ParameterServer(ParameterServerSpec(tiers=tiers, models=(ServedModelSpec(name="m", tables=tables),)))


def looked_up(server: ParameterServer, table: str = "a") -> np.ndarray:
    return server.lookup("m", table, KEYS).numpy()


def inserted(server: ParameterServer) -> int:
    return server.statistics()["m"]["a"].tiers[0].counted.inserted


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_one_process_loads_and_all_read(name: str, source: Path, share: float) -> None:
    with serve(name, source) as first, serve(name, source, share) as second:
        for table, vectors in VECTORS.items():
            assert np.array_equal(looked_up(second, table), vectors)
        assert (inserted(first), inserted(second)) == (100, 0)
        first.update("m", "a", KEYS[:10], KEYS[10:20], torch.ones(10, 4))
        expected = np.concatenate([np.zeros((10, 4)), np.ones((10, 4)), VECTORS["a"][20:]])
        assert np.array_equal(looked_up(first), expected)
        wait_for(lambda: np.array_equal(looked_up(second), expected))
        # Lookups have moved on to it, which others than those who call them have to know.
        assert second.version_of(replace(second.model("m"), version=0)) is None
        assert (second.refresh(), second.refresh()) == (True, False)
        second.update("m", "b", KEYS[:1], KEYS[1:2], torch.ones(1, 4))  # which is the other one's to do
        assert np.array_equal(looked_up(second, "b"), VECTORS["b"])
    assert not (MEMORY / name).exists()


def test_a_process_without_lookups_moves_on(name: str, source: Path) -> None:
    """It kept the files of the commit that it had loaded, whatever other processes removed."""
    with serve(name, source) as first, serve(name, source, 0.0) as second:
        model = replace(second.model("m"), version=0)
        assert second.version_of(model) == 0
        first.update("m", "a", KEYS[:0], KEYS[:1], torch.ones(1, 4))
        wait_for(lambda: second.version_of(model) is None)  # its rows are those of the update
        threads = [thread.name for thread in threading.enumerate()]
        assert threads.count("terarec-watch-rows") == 2
    assert "terarec-watch-rows" not in [thread.name for thread in threading.enumerate()]


def test_nobody_has_to_close_what_moves_on(name: str, source: Path) -> None:
    server = serve(name, source)
    del server
    gc.collect()
    wait_for(lambda: "terarec-watch-rows" not in [thread.name for thread in threading.enumerate()])
    wait_closed()


def test_host_memory_in_front_sees_updates(name: str, source: Path) -> None:
    """It kept what it had found, and lookups that found all there never looked for a commit."""
    host = HostMemorySpec(load_share=0.0, keeps_found=True)
    with serve(name, source) as first, serve(name, source, 0.0, host) as second:
        assert np.array_equal(looked_up(second), VECTORS["a"])
        assert inserted(second) == 100
        first.update("m", "a", KEYS[:10], KEYS[10:20], torch.ones(10, 4))
        expected = np.concatenate([np.zeros((10, 4)), np.ones((10, 4)), VECTORS["a"][20:]])
        wait_for(lambda: np.array_equal(looked_up(second), expected))


def test_rows_that_cannot_be_forgotten_are_passed_over(
    name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory had rows of the commit before for good where forgetting them failed once."""
    host = HostMemorySpec(load_share=0.0, keeps_found=True)
    with serve(name, source) as first, serve(name, source, 0.0, host) as second:
        looked_up(second)
        failing = [StorageError("rows", "cannot be removed")]

        def fail_once(cache: Cache, table: int) -> None:
            if failing:
                raise failing.pop()
            clear(cache, table)

        clear = Cache.clear
        monkeypatch.setattr(Cache, "clear", fail_once)
        first.update("m", "a", KEYS[:0], KEYS[:100], torch.ones(100, 4))
        wait_for(lambda: bool((looked_up(second) == 1).all()))
        assert not failing
        wait_for(lambda: second.refresh() or second.statistics()["m"]["a"].tiers[0].is_available)


def test_one_lookup_looks_for_commits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came before it had begun to look did so too, one after the other."""
    level = shared_level(SharedMemorySpec(name=name), "m", ["t"], [""], 4)
    assert level.is_due is not None
    monkeypatch.setattr(shared, "_LOOK_SECONDS", 60)
    assert isinstance(level.level, SharedStores)
    level.level._looked -= 60
    assert (level.is_due(), level.is_due()) == (True, False)
    level.level.close()


def test_nobody_gets_default_vectors_for_rows_that_nobody_loads(name: str, source: Path) -> None:
    with pytest.raises(StorageError):
        serve(name, source, share=0.0)


def test_rows_stay_for_the_next_process(name: str, source: Path) -> None:
    serve(name, source, removes=False).close()
    with serve(name, source, share=0.0, removes=False) as reader, serve(name, source, removes=False) as writer:
        assert np.array_equal(looked_up(reader), VECTORS["a"])
        assert inserted(writer) == 0  # they are there
        writer.update("m", "a", KEYS[:0], KEYS[:1], torch.ones(1, 4))
        wait_for(lambda: bool((looked_up(reader)[0] == 1).all()))


def test_a_killed_writer_leaves_its_last_update(name: str, source: Path) -> None:
    loader = Python(LOADER, name, str(source))
    try:
        assert loader.read_line() == "loaded"
        reader = serve(name, source)
    finally:
        loader.close()
    with reader:
        assert inserted(reader) == 0
        assert np.array_equal(looked_up(reader), VECTORS["a"])
        with serve(name, source) as writer:
            writer.update("m", "a", KEYS[:0], KEYS[:1], torch.ones(1, 4))
            wait_for(lambda: bool((looked_up(reader)[0] == 1).all()))
    assert not (MEMORY / name).exists()


def test_what_killed_processes_left_is_removed_by_the_next(name: str, source: Path) -> None:
    loader = Python(LOADER, name, str(source))
    assert loader.read_line() == "loaded"
    loader.close()
    assert (MEMORY / name).exists()
    with serve(name, source) as server:
        assert inserted(server) == 100


def test_rows_are_waited_for(name: str) -> None:
    def level(state: str) -> Guarded:
        return shared_level(SharedMemorySpec(name=name), "m", ["t"], [state], 4)

    writer, reader = level("state"), level("state")
    ends: list[str] = []
    looks = threading.Event()
    waiting = threading.Thread(target=lambda: (reader.wait(looks.set), ends.append("there")))
    waiting.start()
    writer.write(batch_of(KEYS[:3], 0), torch.ones(3, 16, dtype=torch.uint8))
    writer.level.commit({}, 0)  # part of a load has no state
    waiting.join(0.2)
    assert not ends
    writer.level.commit({STATE: "state"}, 0)
    waiting.join()
    assert looks.is_set()
    writer.level.commit({STATE: "later"}, 0)
    late = level("state")  # after the first change
    late.wait(looks.set)
    assert late.fences[0].state == "later"
    assert (ends, reader.level.count(0), reader.fences[0].state) == (["there"], 3, "state")
    ended, left = level("other"), level("other")
    ended.level.close()
    with pytest.raises(StorageError):
        left.wait(looks.set)
    for each in (writer, reader, left, late):
        each.level.close()


def test_a_read_beside_one_that_moves_on_is_tried_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised what the former commit lacked: another thread had just moved on."""
    spec = SharedMemorySpec(name=name)
    writer, reader = (shared_level(spec, "m", ["t"], [""], 4) for _ in range(2))
    wanted, read, failed = batch_of(KEYS[:1], 0), TableStores.read, list[StorageError]()
    writer.write(wanted, torch.ones(1, 16, dtype=torch.uint8))
    writer.level.commit({}, 0)
    reader.refresh()

    def fail_once(stores: TableStores, batch: RowBatch, out: torch.Tensor) -> torch.Tensor:
        if failed:
            return read(stores, batch, out)
        writer.level.commit({}, 0)
        failed.append(StorageError("rows", "cannot open"))
        assert isinstance(stores, SharedStores)
        assert stores._look()  # as another thread does
        raise failed[0]

    monkeypatch.setattr(TableStores, "read", fail_once)
    assert reader.level.read(wanted, torch.zeros(1, 16, dtype=torch.uint8)).tolist() == [True]
    assert reader.refresh()
    for each in (writer, reader):
        each.level.close()


def test_loading_that_waits_for_another_process_can_be_stopped(name: str, source: Path) -> None:
    """`close` waited for the other process."""
    tables = tuple(ServedTableSpec(name=table, width=4, source=str(source / table)) for table in VECTORS)
    states = [source_identity(source / table) for table in VECTORS]
    with contextlib.closing(shared_level(SharedMemorySpec(name=name), "m", list(VECTORS), states, 4).level):
        server = ParameterServer(ParameterServerSpec(tiers=(SharedMemorySpec(name=name),)))
        loading = server.load(ServedModelSpec(name="m", tables=tables))
        wait_for(lambda: loading.progress.rows == 200)  # all rows of its source, none of which it keeps
        server.close()
        assert isinstance(loading.error, StorageError)


def test_another_source_has_rows_of_its_own(name: str, source: Path, tmp_path: Path) -> None:
    with serve(name, source) as first:
        for table in VECTORS:
            write_sparse_folder(tmp_path / "new" / table, [SparseRows(KEYS.numpy(), 2 * VECTORS[table])])
        with serve(name, tmp_path / "new") as second:
            assert np.array_equal(looked_up(second), 2 * VECTORS["a"])
            assert np.array_equal(looked_up(first), VECTORS["a"])


def test_memory_has_a_bound(name: str, source: Path) -> None:
    with pytest.raises(NoSpaceError):
        serve(name, source, max_bytes=1)
    assert not (MEMORY / name).exists()


def test_a_directory_of_others_is_not_used(name: str, source: Path, tmp_path: Path) -> None:
    (MEMORY / name).symlink_to(tmp_path)
    try:
        with pytest.raises(StorageError):
            serve(name, source)
    finally:
        (MEMORY / name).unlink()
