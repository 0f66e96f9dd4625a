# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, also on a disk that runs full."""

import resource
import signal
from contextlib import contextmanager

import numpy as np
import pytest

from terarec.errors import StorageError
from terarec.formats import write_dataset
from terarec.formats.container import write_tensors
from terarec.formats.shard import create_shard, shard_path
from terarec.io.files import AtomicFile, atomic_file, write_bytes
from terarec.io.remote import final_name
from terarec.io.removal import work_directory
from tests.errors import at
from tests.formats.samples import make_block, make_spec
from tests.processes import run_python

KILLED = """
import os, signal, sys
from pathlib import Path
from terarec.io.files import atomic_file
with atomic_file(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def full_after(num_bytes):
    """The system rejects to let a file grow beyond `num_bytes`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_below(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def test_content_replaces_content(tmp_path):
    path = tmp_path / "deep" / "x"
    write_bytes(path, b"old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert files_below(tmp_path) == [path]


def test_a_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_bytes(path, b"old")
    with full_after(4096), pytest.raises(StorageError, check=at(path)):
        write_bytes(path, bytes(10_000))
    assert path.read_bytes() == b"old"
    assert files_below(tmp_path) == [path]


def test_a_full_disk_and_a_container(tmp_path):
    with full_after(4096), pytest.raises(StorageError, check=at(f"{tmp_path}/x.safetensors")):
        write_tensors(tmp_path / "x.safetensors", {"w": np.zeros(10_000)})
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("storage", ["parquet", "raw"])
def test_a_full_disk_and_a_shard(tmp_path, storage):
    spec = make_spec(storage, hotness=(1,))
    block = make_block(spec, 70_000)
    path = shard_path(tmp_path, spec, "train", 0)
    with (
        full_after(4096),
        create_shard(spec, path) as writer,
        pytest.raises(StorageError, check=at(path, "; nothing was left behind")),
    ):
        writer.write(block.label, block.dense, block.keys)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("storage", ["parquet", "raw"])
def test_a_disk_that_is_full_before_the_first_byte(tmp_path, storage):
    spec = make_spec(storage)
    block = make_block(spec, 10)

    def write():
        with create_shard(spec, shard_path(tmp_path, spec, "train", 0)) as writer:
            writer.write(block.label, block.dense, block.keys)
            writer.close()

    with full_after(0), pytest.raises(StorageError, check=at(shard_path(tmp_path, spec, "train", 0))):
        write()
    with full_after(0), pytest.raises(StorageError, check=at(tmp_path / "dataset.json", "File too large")):
        write_dataset(spec, tmp_path)
    assert files_below(tmp_path) == []


def test_other_errors_of_the_system_pass_through(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        write_bytes(tmp_path / "x", b"content")
    assert files_below(tmp_path) == []


def test_a_file_of_the_user_may_have_any_name(tmp_path):
    """Finding Q1: ``<name>.partial`` of a user was overwritten and removed."""
    (tmp_path / "x.partial").write_bytes(b"ten years")
    write_bytes(tmp_path / "x", b"content")
    with full_after(0), pytest.raises(StorageError):
        write_bytes(tmp_path / "x", b"content")
    assert (tmp_path / "x.partial").read_bytes() == b"ten years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.partial"]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with atomic_file(tmp_path / "x") as first, atomic_file(tmp_path / "x") as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert {final_name(path.name) for path in (first, second)} == {"x"}
    assert (tmp_path / "x").read_bytes() == b"first"
    assert files_below(tmp_path) == [tmp_path / "x"]


def test_what_a_kill_leaves_in_a_work_directory_is_overwritten(tmp_path):
    work = work_directory(tmp_path / "work") / "inner"
    for _ in range(2):  # without a commit
        AtomicFile(work / "x").partial.write_bytes(b"half")
    write_bytes(work / "x", b"whole")
    assert [path.name for path in work.iterdir()] == ["x"]


def test_what_a_kill_leaves_goes_with_the_next_file_of_the_name(tmp_path):
    """Finding Q36: it stayed beside the file for ever."""
    others = ["x.0123abcd.partial.csv", "x.0123ABCD.partial", "x.csv.0123abcd.partial", "y.0123abcd.partial"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "x.00000000.partial").mkdir()
    (tmp_path / "x.00000001.partial").symlink_to(tmp_path / "y.0123abcd.partial")
    before = sorted(tmp_path.iterdir())
    ended = run_python(KILLED, tmp_path / "x")
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == len(before) + 1
    with atomic_file(tmp_path / "x") as first:
        first.write_text("first")
        write_bytes(tmp_path / "x", b"second")
        assert first.read_text() == "first"  # of a writer that lives
    assert (tmp_path / "x").read_text() == "first"
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "x"])
