# SPDX-License-Identifier: Apache-2.0
"""Row files: their bytes, what damage and faults do, readers beside a writer, compaction."""

import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from terarec.errors import ConfigError, DamagedFileError, FormatError, NoSpaceError, StorageError
from terarec.kernels.cpu import _rowfile
from terarec.memory.row_file import PageReader, RowFile, read_files
from terarec.memory.row_format import RowColumn, RowFileOptions, read_description
from tests.errors import at
from tests.memory.test_row_store import content, expected, read, rows_of
from tests.processes import run_python
from tests.waiting import wait_for

QUIET = RowFileOptions(space_ratio=0)


def filled(directory: Path, num_rows: int = 500, *, row_bytes: int = 64, segment_bytes: int = 2**14) -> RowFile:
    store = RowFile.create(directory, row_bytes, table="users", segment_bytes=segment_bytes, options=QUIET)
    keys = np.arange(num_rows, dtype=np.int64)
    store.write(keys, rows_of(keys, row_bytes))
    store.commit()
    return store


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.rows"))


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_compaction_ends_while_others_seal(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows", 20_000)
    keys = np.arange(20_000, dtype=np.int64)
    store.erase(keys[keys % 3 > 0])
    has_ended = threading.Event()

    def seal() -> None:
        while not has_ended.is_set():
            store.seal()  # each segment with the few rows that compaction has moved by then

    sealing = threading.Thread(target=seal)
    sealing.start()
    compaction = threading.Thread(target=store.compact, daemon=True)
    compaction.start()
    compaction.join(60)
    is_over = not compaction.is_alive()
    has_ended.set()
    sealing.join()
    compaction.join()
    assert is_over
    left = keys[keys % 3 == 0]
    assert content(store) == expected(left, rows_of(left, 64))
    store.close()


def test_checksums_are_crc32c() -> None:
    assert _rowfile.crc32c(b"123456789") == _rowfile.crc32c_by_tables(b"123456789") == 0xE3069283
    data = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    for size in (0, 1, 7, 8, 63, 1344, 4031, 4032, 4033, 4088, 8064, 20_000):
        assert _rowfile.crc32c(data[:size]) == _rowfile.crc32c_by_tables(data[:size])
    assert _rowfile.crc32c(data[:999]) == crc32c(data[:999])


def test_golden_bytes(tmp_path: Path) -> None:
    columns = (RowColumn(name="weights", dtype="float32", shape=(16,)),)
    store = RowFile.create(tmp_path / "rows", 64, table="users", columns=columns, segment_bytes=2 * 4096)
    keys = np.array([7, -2], dtype=np.int64)
    rows = rows_of(keys, 64)
    store.write(keys, rows)
    store.erase(keys[1:])
    store.commit({"step": "3"})
    store.close()

    def page(sequence: int, kind: int, number: int, page_keys: list[int], page_rows: bytes) -> bytes:
        body = struct.pack("<QHHIQ", sequence, len(page_keys), kind, number, 0)
        body += struct.pack(f"<{len(page_keys)}q", *page_keys)
        if kind == 0:  # 56 rows fit in
            body = body.ljust(32 - 8 + 8 * 56, b"\0") + page_rows
        body = body.ljust(4096 - 8, b"\0")
        return b"TRRP" + struct.pack("<I", crc32c(body)) + body

    pages = page(1, 0, 0, [7], rows[0].tobytes()) + page(2, 1, 1, [-2], b"")
    assert [path.name for path in segments(tmp_path / "rows")] == ["segment-000000000000.rows"]
    assert segments(tmp_path / "rows")[0].read_bytes() == pages
    metadata = b'{"step": "3"}'
    body = struct.pack("<QQQQQQ", 1, 3, 1, 1, 1, len(metadata))
    body += struct.pack("<QQQIIQ", 0, 1, 2, 2, 0, 0) + metadata
    manifest = b"TRROWSMF" + struct.pack("<II", 1, crc32c(body)) + body
    assert (tmp_path / "rows" / "manifest").read_bytes() == manifest
    description = {
        "table": "users",
        "row_bytes": 64,
        "columns": [{"name": "weights", "dtype": "float32", "shape": [16]}],
        "page_bytes": 4096,
        "segment_pages": 2,
    }
    assert json.loads((tmp_path / "rows" / "row_file.json").read_text()) == {
        "format": "terarec.row_file",
        "version": 1,
        **description,
        "sha256": hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest(),
    }
    assert read_description(tmp_path / "rows").columns == columns

    store = RowFile.open(tmp_path / "rows", options=QUIET)  # a former segment gets its footer
    store.commit()
    store.close()
    body = struct.pack("<QQQ", 0, 2, 2) + struct.pack("<QHHIQHHI", 1, 1, 0, 0, 2, 1, 1, 0) + struct.pack("<qq", 7, -2)
    body = body.ljust(4096 - 8, b"\0")
    footer = b"TRRF" + struct.pack("<I", crc32c(body)) + body
    assert segments(tmp_path / "rows")[0].read_bytes() == pages + footer


@pytest.mark.parametrize(("row_bytes", "page_bytes"), [(16, 4096), (512, 4096), (1024, 8192), (4096, 32768)])
def test_pages_waste_less_than_a_sixth(tmp_path: Path, row_bytes: int, page_bytes: int) -> None:
    store = RowFile.create(tmp_path / "rows", row_bytes)
    assert store.layout.page_bytes == page_bytes
    store.close()


def test_the_index_takes_at_most_16_bytes_a_row(tmp_path: Path) -> None:
    store = RowFile.create(tmp_path / "rows", 16, options=QUIET)
    sizes = [*range(100_000, 200_000, 9_000)]
    for first, end in zip([0, *sizes], sizes, strict=False):
        keys = np.arange(first, end, dtype=np.int64) * 977
        store.write(keys, np.zeros((len(keys), 16), dtype=np.uint8))
        assert store.index_bytes <= 16 * len(store) + 2**14 * 5
    store.close()


@pytest.mark.parametrize("where", ["page", "footer", "manifest"])
def test_a_flipped_bit_is_found(tmp_path: Path, where: str) -> None:
    filled(tmp_path / "rows").close()
    file = tmp_path / "rows" / "manifest" if where == "manifest" else segments(tmp_path / "rows")[1]
    data = bytearray(file.read_bytes())
    data[{"page": 4096 + 1000, "footer": 4 * 4096 + 100, "manifest": 50}[where]] ^= 16
    file.write_bytes(data)
    if where == "page":
        store = RowFile.open(tmp_path / "rows", read_only=True)
        keys = np.arange(500, dtype=np.int64)
        with pytest.raises(DamagedFileError, check=at("table 'users'")) as error:
            read(store, keys)
        with pytest.raises(DamagedFileError):
            content(store)
        assert read(store, keys[:50])[0].all()
        store.close()
    else:
        with pytest.raises(DamagedFileError, check=at("table 'users'")) as error:
            RowFile.open(tmp_path / "rows")
    assert error.value.file == file
    assert error.value.table == "users"
    assert error.value.page == (1 if where == "page" else None)


def test_files_that_are_read_together(tmp_path: Path) -> None:
    reader, keys = PageReader(QUIET, 64), np.arange(0, 300, 3)
    stores = []
    for number in range(3):
        path = tmp_path / f"{number}"
        store = RowFile.create(path, 64, table=f"t{number}", segment_bytes=2**14, options=QUIET, reader=reader)
        held = np.arange(100 * number, 500)
        store.write(held, rows_of(held, 64, number))
        store.commit()
        stores.append(store)
    requested, ends = np.concatenate([keys[:40], keys[:0], keys]), [40, 40, 140]
    out = np.zeros((2 * 140, 64), dtype=np.uint8)[::2]
    found = read_files(stores, requested, ends, out)
    assert found.tolist() == [True] * 40 + (keys >= 200).tolist()
    assert (out[:40] == rows_of(keys[:40], 64, 0)).all()
    assert (out[40:][keys >= 200] == rows_of(keys[keys >= 200], 64, 2)).all()
    assert not out[40:][keys < 200].any()
    assert stores[0].memory_bytes - stores[0].own_memory_bytes == reader.memory_bytes > 0
    file = segments(tmp_path / "2")[0]
    data = bytearray(file.read_bytes())
    data[1000] ^= 16
    file.write_bytes(data)
    with pytest.raises(DamagedFileError, check=at("table 't2'")) as error:
        read_files(stores, requested, ends, out)
    assert (error.value.file, error.value.table, error.value.page) == (file, "t2", 0)
    stores.append(RowFile.open(tmp_path / "0", read_only=True))
    with pytest.raises(StorageError):
        read_files(stores, requested, [*ends, 140], out)
    for store in stores:
        store.close()


@pytest.mark.parametrize("rest", [0, 1, 4096, 4 * 4096 - 1])
def test_a_segment_that_was_cut_short_is_found(tmp_path: Path, rest: int) -> None:
    filled(tmp_path / "rows").close()
    os.truncate(segments(tmp_path / "rows")[0], rest)
    with pytest.raises(DamagedFileError):
        RowFile.open(tmp_path / "rows")


def test_a_missing_segment_or_manifest_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path / "rows").close()
    segments(tmp_path / "rows")[0].unlink()
    with pytest.raises(StorageError, check=at("table 'users'", "segment-0")):
        RowFile.open(tmp_path / "rows")
    (tmp_path / "rows" / "manifest").unlink()
    with pytest.raises(StorageError, check=at("table 'users'", "manifest")):
        RowFile.open(tmp_path / "rows", read_only=True)


def test_uncommitted_data_of_a_crash_is_removed(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows")
    before = content(store)
    store.close()
    sizes = [path.stat().st_size for path in segments(tmp_path / "rows")]
    with segments(tmp_path / "rows")[-1].open("ab") as file:
        file.write(b"torn" * 3000)
    (tmp_path / "rows" / "segment-0000000000ff.rows").write_bytes(b"not listed")
    (tmp_path / "rows" / "manifest.partial").write_bytes(b"half")
    copy = RowFile.open(tmp_path / "rows", read_only=True)
    assert content(copy) == before
    copy.close()
    store = RowFile.open(tmp_path / "rows", options=QUIET)
    assert content(store) == before
    store.commit()
    store.close()
    left = segments(tmp_path / "rows")
    assert [path.stat().st_size for path in left[:-1]] == sizes[:-1]
    assert left[-1].stat().st_size == sizes[-1] + 4096  # its footer
    assert not (tmp_path / "rows" / "manifest.partial").exists()


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_of_each_change_and_keeps_the_last_commit(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows", segment_bytes=2**20)
    before = content(store)
    keys = np.arange(5000, dtype=np.int64)
    with files_at_most(2**17):
        store.write(keys, rows_of(keys, 64, version=1))
        for change in (
            store.commit,
            store.commit,
            lambda: store.erase(keys),
            lambda: store.write(keys, rows_of(keys, 64)),
        ):
            with pytest.raises(NoSpaceError, check=at("table 'users'")):
                change()
        found, out = read(store, keys)
        assert found.all(), "rows in memory are still read"
        assert np.array_equal(out, rows_of(keys, 64, version=1))
    store.close()
    store = RowFile.open(tmp_path / "rows")
    assert content(store) == before
    store.write(keys, rows_of(keys, 64, version=2))
    assert store.commit() == 2
    store.close()


def test_a_full_disk_is_not_final(tmp_path: Path) -> None:
    """Finding L8: after one error of writing a store took no rows for as long as the process lived."""
    store = filled(tmp_path / "rows", segment_bytes=2**20)
    keys = np.arange(5000, dtype=np.int64)
    for version in (1, 2):
        with files_at_most(2**17 + 2**18 * (version - 1)):
            store.write(keys, rows_of(keys, 64, version))
            with pytest.raises(NoSpaceError):
                store.commit()
        store.write(keys[:7], rows_of(keys[:7], 64, version=9))
        store.erase(keys[7:9])
        assert store.commit() == 1 + version
        assert content(store) == content_of(keys, version)
    store.close()
    store = RowFile.open(tmp_path / "rows")
    assert content(store) == content_of(keys, 2)
    store.close()


def content_of(keys: NDArray[np.int64], version: int) -> dict[int, bytes]:
    """Return the rows of one version, of which seven are newer and two erased."""
    rows = expected(keys, rows_of(keys, 64, version)) | expected(keys[:7], rows_of(keys[:7], 64, version=9))
    return {key: row for key, row in rows.items() if key not in (7, 8)}


def test_a_commit_that_fails_can_be_repeated(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows")
    with files_at_most(10), pytest.raises(StorageError):
        store.commit({"a": "b"})
    assert store.last_commit == 1
    assert store.commit({"a": "c"}) == 2
    store.close()


def test_two_writers_are_rejected(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows")
    with pytest.raises(StorageError, check=at(f"{tmp_path}/rows")):
        RowFile.open(tmp_path / "rows")
    store.close()
    RowFile.open(tmp_path / "rows").close()


def open_in_turn(directory: Path, results: Connection) -> None:
    """Report what opening for writing gives, then the content for reading after each commit that is reported."""
    try:
        RowFile.open(directory)
    except StorageError as error:
        results.send(error.where)
    reader = RowFile.open(directory, read_only=True)
    while results.recv():
        reader.refresh()
        results.send(content(reader))


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
def test_processes_read_while_a_single_one_writes(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows")
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for _ in range(2):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=open_in_turn, args=(tmp_path / "rows", theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    assert [pipe.recv() for pipe in pipes] == [f"{tmp_path}/rows"] * 2
    for version in range(2):
        keys = np.arange(300, dtype=np.int64)
        store.write(keys, rows_of(keys, 64, version))
        store.commit()
        for pipe in pipes:
            pipe.send(True)
        expected = content(store)
        assert all(pipe.recv() == expected for pipe in pipes)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join(60)
        assert process.exitcode == 0
    store.close()


def test_readers_move_on_when_they_refresh(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows")
    keys = np.arange(500, dtype=np.int64)
    reader = RowFile.open(tmp_path / "rows", read_only=True)
    assert not reader.refresh()
    before = content(reader)
    for version in range(1, 4):
        store.write(keys[:400], rows_of(keys[:400], 64, version))
        store.erase(keys[-version:])
        assert content(reader) == before
        store.compact()
        store.commit({"version": str(version)})
        assert reader.refresh()
        before = content(reader)
        assert before == content(store)
        assert dict(reader.metadata) == {"version": str(version)}
    for change in (reader.commit, reader.compact, lambda: reader.erase(keys), lambda: reader.snapshot(tmp_path / "x")):
        with pytest.raises(StorageError, check=at("table 'users'", "reading")):
            change()
    with pytest.raises(StorageError, check=at("table 'users'", "writing")):
        store.refresh()
    reader.close()
    store.close()
    for call in (reader.refresh, reader.commit, lambda: len(reader), lambda: read(reader, keys)):
        with pytest.raises(StorageError):
            call()


def test_readers_keep_the_files_of_their_commit(tmp_path: Path) -> None:
    """Lookups, and scans of all rows, opened a file when they first read of it, when the writer may have removed it."""
    store, keys = filled(tmp_path / "rows", 4000), np.arange(4000, dtype=np.int64)
    reader = RowFile.open(tmp_path / "rows", read_only=True)
    for version in (1, 2):  # whose files are those of the opening, and of a refresh
        before = content(store)
        store.write(keys[::2], rows_of(keys[::2], 64, version))
        store.compact()
        store.commit()
        found, rows = read(reader, keys)
        assert found.all()
        assert expected(keys, rows) == content(reader) == before
        assert reader.refresh()
    store.close()
    reader.close()


OPEN_FEW = """
import resource, sys
from pathlib import Path
import numpy as np
from terarec.memory.row_file import RowFile
from terarec.memory.row_format import RowFileOptions

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
keys = np.arange(10_000)
options = RowFileOptions(io="threads", io_threads=2, space_ratio=0)
paths = [Path(sys.argv[1]) / str(number) for number in range(2)]
stores = [RowFile.create(path, 512, segment_bytes=2**14, options=options) for path in paths]
for number, store in enumerate(stores):
    store.write(keys, np.full((10_000, 512), number + 1, np.uint8))
    store.commit()
others = []
for number, store in enumerate(stores):
    out = np.zeros((10_000, 512), np.uint8)
    assert store.read(keys, out).all() and (out == number + 1).all() and store.num_segments > 256
    while True:  # of which others have the rest
        try:
            others.append(open("/dev/null"))
        except OSError:
            break
# Files of a store that was closed are none that can be closed.
for other in others:
    other.close()
assert stores[0].read(keys, out).all()
stores[0].close()
assert stores[1].read(keys[:1], out[:1]).all()
others = []
while True:
    try:
        others.append(open("/dev/null"))
    except OSError:
        break
assert stores[1].read(keys[5000:5001], out[:1]).all()
"""


def test_files_stay_within_what_the_system_allows(tmp_path: Path) -> None:
    """512 of each row file were open, and all of a read together: containers may allow 1,024 of a process."""
    ended = run_python(OPEN_FEW, str(tmp_path))
    assert ended.returncode == 0, ended.stderr


def test_a_refresh_reads_only_new_rows(tmp_path: Path) -> None:
    store = RowFile.create(tmp_path / "rows", 64, segment_bytes=2**14)
    keys = np.arange(4000, dtype=np.int64)
    store.write(keys, rows_of(keys, 64))
    store.commit()
    reader = RowFile.open(tmp_path / "rows", read_only=True)
    oldest = segments(tmp_path / "rows")[0]
    text = oldest.read_bytes()
    oldest.write_bytes(b"")  # which opening from scratch would find
    generator = np.random.default_rng(3)
    for version in range(1, 30):
        some = generator.choice(np.arange(300, 4200), 60 if version % 7 else 2)
        store.write(np.unique(some), rows_of(np.unique(some), 64, version))
        store.erase(generator.integers(300, 4000, 20))
        store.commit()
        assert reader.refresh()
        assert not reader.refresh()
        assert len(reader) == len(store)
        some = generator.integers(300, 4500, 200)
        for mine, theirs in zip(read(reader, some), read(store, some), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(StorageError):
        RowFile.open(tmp_path / "rows", read_only=True)
    oldest.write_bytes(text)
    assert content(reader) == content(store)
    reader.close()
    store.close()


def test_a_refresh_forgets_keys_whose_removal_compaction_dropped(tmp_path: Path) -> None:
    store = RowFile.create(tmp_path / "rows", 64, segment_bytes=2**14, options=RowFileOptions(space_ratio=0))
    keys = np.arange(4000, dtype=np.int64)
    store.write(keys, rows_of(keys, 64))
    store.commit()
    reader = RowFile.open(tmp_path / "rows", read_only=True)
    files = segments(tmp_path / "rows")
    unchanged = files[len(files) // 2]
    text = unchanged.read_bytes()
    store.erase(keys[:900])
    for _ in range(3):  # the rows go, then what says that they are erased
        store.compact()
    store.commit()
    unchanged.write_bytes(b"")  # which opening from scratch would find
    assert reader.refresh()
    unchanged.write_bytes(text)
    assert len(reader) == 3100
    assert content(reader) == content(store)
    store.write(keys[:5], rows_of(keys[:5], 64, 1))  # to slots of segments that are gone
    store.commit()
    assert reader.refresh()
    assert content(reader) == content(store)
    reader.close()
    store.close()


def test_a_snapshot_shares_the_segments_that_no_longer_change(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows", 1000)
    store.snapshot(tmp_path / "copy")
    shared = [path.stat().st_nlink for path in segments(tmp_path / "copy")]
    assert shared[:-1] == [2] * (len(shared) - 1)
    assert shared[-1] == 1
    before = content(store)
    keys = np.arange(1000, dtype=np.int64)
    store.write(keys, rows_of(keys, 64, version=1))
    store.commit()
    copy = RowFile.open(tmp_path / "copy")
    copy.erase(keys[:990])
    copy.compact()
    copy.commit()
    assert content(copy) == {key: row for key, row in before.items() if key >= 990}
    assert content(store) == expected(keys, rows_of(keys, 64, version=1))
    copy.close()
    store.close()


def assert_compacted(store: RowFile, more: int) -> None:
    """Wait until a store takes 1.5 times the bytes of its rows, and `more`; files go at commits."""

    def is_small() -> bool:
        store.commit()
        return store.file_bytes <= 1.5 * store.live_bytes + more

    wait_for(is_small)


def test_compaction_bounds_the_space(tmp_path: Path) -> None:
    segment_bytes = 2**14
    store = RowFile.create(tmp_path / "rows", 64, segment_bytes=segment_bytes)
    generator, keys = np.random.default_rng(5), np.arange(4000, dtype=np.int64)
    versions = np.zeros(4000, dtype=np.int64)
    for step in range(40):
        chosen = np.unique(generator.integers(0, 4000, 700))
        versions[chosen] = step
        store.write(chosen, rows_of(chosen, 64, step))
        if step % 8 == 7:
            store.commit()
    assert_compacted(store, 8 * segment_bytes)
    for step in np.unique(versions):
        chosen = keys[(versions == step) & (keys < len(store) + 4000)]
        found, out = read(store, chosen)
        assert (out[found] == rows_of(chosen, 64, int(step))[found]).all()
    store.erase(keys)
    store.compact()
    store.commit()
    assert len(store) == 0
    assert store.file_bytes < 8 * segment_bytes
    store.close()


def test_working_files_need_no_commit_to_go(tmp_path: Path) -> None:
    store = RowFile.create(tmp_path / "rows", 64, segment_bytes=2**14, options=RowFileOptions(is_working=True))
    keys = np.arange(4000, dtype=np.int64)
    for step in range(12):
        store.write(keys, rows_of(keys, 64, step))
    most = 1.5 * store.live_bytes + 2**20
    wait_for(lambda: store.file_bytes <= most)
    assert store.last_commit == 0
    store.snapshot(tmp_path / "copy")
    with_copy = RowFile.open(tmp_path / "copy", read_only=True)
    assert content(with_copy) == content(store) == expected(keys, rows_of(keys, 64, 11))
    with_copy.close()
    store.close()


def test_writers_wait_while_files_have_no_room(tmp_path: Path) -> None:
    segment_bytes, generator = 2**18, np.random.default_rng(6)
    options = RowFileOptions(is_working=True, queue_bytes=2**20)
    store = RowFile.create(tmp_path / "rows", 512, segment_bytes=segment_bytes, options=options)
    keys, rows = np.arange(2**14, dtype=np.int64), np.zeros((2**14, 512), dtype=np.uint8)
    store.write(keys, rows)
    for _ in range(60):  # faster than the disk
        chosen = np.unique(generator.integers(0, len(keys), 1024))
        store.write(chosen, rows[: len(chosen)])
        assert store.file_bytes <= 1.5 * store.live_bytes + 4 * segment_bytes
    store.close()


def test_erased_keys_do_not_take_space_for_ever(tmp_path: Path) -> None:
    store = RowFile.create(tmp_path / "rows", 16, segment_bytes=2**13)
    old = np.arange(1000, dtype=np.int64)
    store.write(old, rows_of(old, 16))
    for step in range(1, 40):
        keys = np.arange(1000 * step, 1000 * step + 1000, dtype=np.int64)
        store.write(keys, rows_of(keys, 16))
        if step % 8 == 7:
            store.commit()
        store.erase(keys)
    store.commit()
    assert_compacted(store, 16 * 2**13)
    store.close()
    store = RowFile.open(tmp_path / "rows")
    assert content(store) == expected(old, rows_of(old, 16))
    store.close()


def test_rows_that_lie_side_by_side_are_read_at_once(tmp_path: Path) -> None:
    for io in ("threads", "auto"):
        store = filled(tmp_path / io, 20_000)
        store.close()
        store = RowFile.open(tmp_path / io, options=RowFileOptions(io=io))
        keys = np.random.default_rng(1).permutation(20_000).astype(np.int64)
        found, out = read(store, keys)
        assert found.all()
        assert (out == rows_of(keys, 64)).all()
        store.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"io": "mmap"},
        {"io_threads": 0},
        {"io_threads": 100_000},
        {"run_bytes": 2**63},
        {"queue_bytes": 0},
        {"open_files": 1},
        {"space_ratio": 1.1},
        {"space_ratio": float("nan")},
    ],
)
def test_options_out_of_range_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RowFileOptions(**wrong)  # type: ignore[arg-type]


def test_descriptions_that_make_no_sense_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=at("columns")):
        RowFile.create(tmp_path / "rows", 16, columns=(RowColumn(name="w", dtype="float32", shape=(5,)),))
    with pytest.raises(ConfigError, check=at("columns", "dtype")):
        RowFile.create(tmp_path / "rows", 16, columns=(RowColumn(name="w", dtype="floaty"),))
    assert not (tmp_path / "rows").exists()
    filled(tmp_path / "rows").close()
    path = tmp_path / "rows" / "row_file.json"
    good = json.loads(path.read_text())
    for field, value in (("row_bytes", 8), ("page_bytes", 5000), ("segment_pages", 0), ("columns", 3), ("version", 2)):
        path.write_text(json.dumps({**good, field: value}))
        with pytest.raises(FormatError):
            RowFile.open(tmp_path / "rows")
    path.unlink()
    with pytest.raises(FormatError):
        RowFile.open(tmp_path / "rows")
    filled(tmp_path / "other").close()
    with pytest.raises(ConfigError):
        RowFile.create(tmp_path / "other", 16)


KILL_KEYS = 3000


def changes_of(step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keys that a step writes, and those that it then erases."""
    generator = np.random.default_rng(step)
    return np.unique(generator.integers(0, KILL_KEYS, 400)), generator.integers(0, KILL_KEYS, 30)


def write_until_killed(directory: Path, committed: Connection) -> None:
    """Write step after step, each with a commit, and tell of the commits."""
    store = RowFile.open(directory)
    step = int(store.metadata.get("step", "0"))
    while True:
        step += 1
        written, erased = changes_of(step)
        store.write(written, rows_of(written, 64, step))
        store.erase(erased)
        if step % 3 == 0:
            store.commit({"step": str(step)})
            committed.send(step)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_kill_loses_nothing_that_was_committed(tmp_path: Path, kills: int) -> None:
    RowFile.create(tmp_path / "rows", 64, table="users", segment_bytes=2**15).close()
    context, moments = multiprocessing.get_context("fork"), random.Random(7)
    versions = np.zeros(KILL_KEYS, dtype=np.int64)
    done = 0
    for _ in range(kills):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=write_until_killed, args=(tmp_path / "rows", sender))
        process.start()
        sender.close()
        assert receiver.poll(60), "the process committed nothing within 60 s"
        reported = [receiver.recv()]
        time.sleep(moments.uniform(0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        try:
            while True:
                reported.append(receiver.recv())
        except EOFError:
            pass
        store = RowFile.open(tmp_path / "rows", read_only=True)
        step = int(store.metadata["step"])
        assert step >= max(reported)
        for each in range(done + 1, step + 1):
            written, erased = changes_of(each)
            versions[written], versions[erased] = each, 0
        done = step
        keys = np.arange(KILL_KEYS, dtype=np.int64)
        found, out = read(store, keys)
        assert (found == (versions > 0)).all()
        for version in np.unique(versions[versions > 0]):
            chosen = keys[versions == version]
            assert (out[chosen] == rows_of(chosen, 64, int(version))).all()
        assert len(content(store)) == len(store) == found.sum()
        store.close()


@pytest.mark.parametrize("file", ["segment", "manifest", "row_file.json"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "directory", "device"]
)
def test_what_is_no_file_in_its_place_is_rejected(file, make, tmp_path):
    """Finding Q4: a pipe hung."""
    filled(tmp_path / "rows").close()
    path = segments(tmp_path / "rows")[0] if file == "segment" else tmp_path / "rows" / file
    path.unlink()
    make(path)
    for read_only in (False, True):
        with pytest.raises((DamagedFileError, FormatError, StorageError)):
            RowFile.open(tmp_path / "rows", read_only=read_only)


@pytest.mark.parametrize(("old", "new"), [('"users"', '"items"'), ('"sha256"', '"sha257"'), ("4096", "8192")])
def test_a_changed_description_is_found(old, new, tmp_path):
    """Finding Q14: it had no checksum outside of checkpoints."""
    filled(tmp_path / "rows").close()
    path = tmp_path / "rows" / "row_file.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FormatError, check=at(path)):
        RowFile.open(tmp_path / "rows")
