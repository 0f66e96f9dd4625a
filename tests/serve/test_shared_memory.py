# SPDX-License-Identifier: Apache-2.0
"""Regions of shared memory: no name leads elsewhere, and what a client does to a region harms nobody else."""

import json
import os
from pathlib import Path

import pytest

from terarec.errors import ConfigError
from terarec.serve.binary_codec import RegionsTooLargeError, decode_binary_request
from terarec.serve.protocol import InferRequest, NotFoundError, RequestTooLargeError, UnsupportedError
from terarec.serve.shared_memory import Region, SharedMemory
from tests.errors import at


@pytest.fixture
def memory(tmp_path: Path) -> SharedMemory:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "a").write_bytes(bytes(range(100)))
    return SharedMemory(2**25, tmp_path / "shm")


def test_bytes_are_read_and_written(memory: SharedMemory, tmp_path: Path) -> None:
    memory.register(Region("r", "/a", 10, 20))
    assert memory.read("r", 5, 3, "inputs[0]") == bytes([15, 16, 17])
    memory.write("r", 0, b"xyz", 20, "outputs[0]")
    assert (tmp_path / "shm" / "a").read_bytes()[9:14] == b"\x09xyz\x0d"
    assert memory.status() == memory.status("r") == (Region("r", "/a", 10, 20),)
    memory.unregister("r")
    memory.unregister("r")
    with pytest.raises(NotFoundError):
        memory.read("r", 0, 1, "inputs[0]")


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/..", "/../secret", "a/b", "/a\0b", ".", "/none", "/link", "/folder", "/pipe"]
)
def test_no_key_leads_elsewhere(memory: SharedMemory, tmp_path: Path, key: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "shm" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "shm" / "folder").mkdir()
    os.mkfifo(tmp_path / "shm" / "pipe")
    with pytest.raises(ConfigError, check=at("shared memory region 'r'")):
        memory.register(Region("r", key, 0, 1))
    assert memory.status() == ()


def test_a_region_is_inside_its_memory(memory: SharedMemory) -> None:
    with pytest.raises(ConfigError, check=at("shared memory region 'r'", "got 101 bytes at 0")):
        memory.register(Region("r", "/a", 0, 101))
    memory.register(Region("r", "/a", 90, 10))
    for offset, size in ((0, 11), (10, 1), (-1, 1)):
        with pytest.raises(ConfigError, check=at("inputs[0]")):
            memory.read("r", offset, size, "inputs[0]")
        with pytest.raises(ConfigError, check=at("outputs[0]")):
            memory.write("r", offset, b"x" * size, size, "outputs[0]")
    with pytest.raises(ConfigError, check=at("outputs[0]", "expected 4")):
        memory.write("r", 0, b"1234", 3, "outputs[0]")


def test_a_region_may_be_shortened_by_its_client(memory: SharedMemory, tmp_path: Path) -> None:
    memory.register(Region("r", "/a", 0, 100))
    os.truncate(tmp_path / "shm" / "a", 10)
    with pytest.raises(ConfigError, check=at("inputs[0]", "was shortened")):
        memory.read("r", 0, 100, "inputs[0]")
    with pytest.raises(ConfigError, check=at("outputs[0]", "was shortened")):
        memory.write("r", 50, b"x", 1, "outputs[0]")
    assert (tmp_path / "shm" / "a").stat().st_size == 10


def test_names_are_not_taken_twice_and_files_are_closed(memory: SharedMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory.register(Region("r", "/a", 0, 1))
    with pytest.raises(ConfigError, check=at("shared memory region 'r'", "already in manager")):
        memory.register(Region("r", "/a", 0, 1))
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_are_read_only_if_they_fit_their_shape_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**31 - 4096)  # without a block on the disk
    memory = SharedMemory(200, tmp_path)
    memory.register(Region("r", "/large", 0, 2**31 - 4096))
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: read.append(size) or pread(file, size, at))

    def tensor(datatype: str, count: int, size: int) -> dict[str, object]:
        place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
        return {"name": "x", "datatype": datatype, "shape": [count], "parameters": place}

    def decode(*tensors: dict[str, object], most: int | None = None) -> InferRequest:
        body = json.dumps({"inputs": list(tensors)}).encode()
        body = body + b" " * (500 - len(body))
        memory.max_request_bytes = 500 + 200
        return decode_binary_request(body, None, memory, most_bytes=most)

    with pytest.raises(ConfigError, check=at("inputs[0].data", "got 2147479552 bytes, expected 1 for 1 elements")):
        decode(tensor("INT8", 1, 2**31 - 4096))
    for datatype in ("INT8", "BYTES"):
        with pytest.raises(RequestTooLargeError, check=at("inputs[0].data")):
            decode(tensor(datatype, 2**31 - 4096, 2**31 - 4096))
    assert read == []
    with pytest.raises(RequestTooLargeError, check=at("inputs[2].data", "got 701 bytes up to here")):
        decode(tensor("INT8", 100, 100), tensor("INT8", 100, 100), tensor("INT8", 1, 1))
    with pytest.raises(RegionsTooLargeError):
        decode(tensor("INT8", 101, 101), most=600)
    with pytest.raises(RegionsTooLargeError):  # the limit of all requests holds as well
        decode(tensor("INT8", 201, 201), most=2**16)
    assert read == [100, 100]
    assert list(decode(tensor("INT8", 200, 200)).inputs[0].data) == [0] * 200


def test_a_system_without_files_of_shared_memory_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, check=at("shared memory region 'r'")):
        SharedMemory(2**25, tmp_path / "none").register(Region("r", "/a", 0, 1))
