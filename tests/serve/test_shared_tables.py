# SPDX-License-Identifier: Apache-2.0
"""Files of rows that the workers of a server map: who holds them, and when they go."""

import os
import shutil
import signal
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.io.opening import open_file
from terarec.memory import files as files_module
from terarec.serve.shared_tables import SharedTables
from terarec.spec import FeatureSpec, TableSpec

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at files that are mapped")


def model_of(seed: int) -> nn.Module:
    """Two collections, of which one has arenas of two widths."""
    tables = [TableSpec(name="a", rows=11, width=4), TableSpec(name="b", rows=5, width=8)]
    features = [FeatureSpec(name=name, table=name) for name in "ab"]
    return nn.ModuleList(
        [
            EmbeddingCollection(tables, features, seed=seed),
            EmbeddingCollection(tables[:1], features[:1], seed=seed + 1),
        ]
    )


def rows_of(model: nn.Module) -> list[torch.Tensor]:
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    return [store.weights.clone() for collection in collections for store in collection.tables.values()]


def files(shared: SharedTables) -> list[Path]:
    return sorted(path for path in (shared.path / "files").iterdir() if not path.name.startswith("."))


def test_a_process_that_is_killed_while_it_loads_leaves_nothing() -> None:
    reader, writer = os.pipe()
    with SharedTables() as shared:
        pid = os.fork()
        if not pid:
            with shared.turn():
                os.write(writer, b"loads")
                signal.pause()
        assert os.read(reader, 5) == b"loads"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not shared.path.exists()
    os.close(reader)
    os.close(writer)


def test_models_of_one_identity_have_the_same_rows() -> None:
    first, other, different = model_of(1), model_of(2), model_of(3)
    expected, kept = rows_of(first), rows_of(different)
    with SharedTables() as shared:
        with shared.turn():
            shared.share(first, ("shop", 1))
        shared.share(other, ("shop", 1))  # a second process would have loaded the same ones
        shared.share(different, ("shop", 2))
        assert len(files(shared)) == 6
        for mine, its in ((first, expected), (other, expected), (different, kept)):
            assert all(map(torch.equal, rows_of(mine), its))
        shared.forget(("shop", 2))
        assert len(files(shared)) == 3
        assert all(map(torch.equal, rows_of(different), kept))
        shared.forget("unknown")
    assert not shared.path.exists()
    assert all(map(torch.equal, rows_of(first), expected))


def test_files_stay_while_another_process_holds_them() -> None:
    with SharedTables() as shared:
        shared.share(model_of(1), "v1")
        first, *_ = files(shared)
        with open_file(first) as file:  # a lock is of an open file, whoever has opened it
            fcntl.flock(file, fcntl.LOCK_SH)
            shared.forget("v1")
            assert files(shared) == [first]
        shared.share(model_of(1), "v1")
        shared.forget("v1")
        assert files(shared) == []


def test_what_a_killed_process_holds_goes_with_the_next_version() -> None:
    """Another process had let go of it before, and it stayed in memory until the server ended."""
    model, same, other = model_of(1), model_of(1), model_of(3)
    reader, writer = os.pipe()
    with SharedTables() as shared:
        child = os.fork()
        if not child:
            shared.share(model, "v1")
            (files(shared)[0].with_name("half-0.partial")).write_bytes(b"rows")
            os.write(writer, b"holds")
            signal.pause()
        assert os.read(reader, 5) == b"holds"
        shared.share(same, "v1")
        shared.forget("v1")
        former = files(shared)
        assert len(former) >= 3
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert files(shared) == former
        shared.share(other, "v2")
        assert len(files(shared)) == 3
        assert not set(former) & set(files(shared))
    os.close(reader)
    os.close(writer)


def test_what_a_killed_server_leaves_is_removed_by_the_next_one() -> None:
    model = model_of(1)  # here: threads of others are not there in a fork
    child = os.fork()
    if not child:
        with SharedTables() as shared:
            shared.share(model, "v1")
            os._exit(0)
    os.waitpid(child, 0)
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    assert len(list(parent.glob(f"terarec-tables-{child}-*/files/*-0"))) == 2
    with SharedTables() as shared:
        assert shared.path.parent == parent
        assert list(parent.glob(f"terarec-tables-{child}-*")) == []


@pytest.mark.parametrize("has_lock", [False, True])
def test_servers_that_start_at_once_do_not_remove_each_others_files(
    has_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server looks for abandoned directories between the steps of this one."""
    shared = SharedTables()
    locking = files_module.file_lock

    def late(path: Path) -> AbstractContextManager[bool]:
        monkeypatch.setattr(files_module, "file_lock", locking)  # once
        if has_lock:
            path.touch()
        SharedTables()
        return locking(path)

    monkeypatch.setattr(files_module, "file_lock", late)
    with shared:
        SharedTables()
        assert shared.path.is_dir()
        shared.share(model_of(3), "a")
        assert files(shared)
    assert not shared.path.exists()


def test_a_server_ends_quietly_whose_directory_the_next_one_has_removed() -> None:
    with SharedTables() as shared:
        shutil.rmtree(shared.path)
    assert not shared.path.exists()
