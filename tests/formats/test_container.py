# SPDX-License-Identifier: Apache-2.0
"""Tensor containers: valid safetensors, round trips, and one error per way to be wrong."""

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.container import BFLOAT16, read_tensors, widen_bfloat16, write_tensors
from tests.errors import at
from tests.params import examples

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
tensors_of = st.dictionaries(
    st.text(max_size=9).filter(lambda name: name != "__metadata__" and name.encode("utf-8", "ignore").decode() == name),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays_of.arrays(
            np.dtype(dtype), arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
        )
    ),
    max_size=4,
)


@given(tensors=tensors_of, metadata=st.dictionaries(st.sampled_from("abc"), st.just("text"), max_size=2))
@settings(max_examples=examples(50))
def test_tensors_come_back_and_safetensors_agrees(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("container") / "x.safetensors"
    digest = write_tensors(path, tensors, metadata)
    found, found_metadata = read_tensors(path, sha256=digest)
    theirs = safetensors.numpy.load_file(path)
    assert found_metadata == metadata
    assert found.keys() == theirs.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape == theirs[name].shape
        assert found[name].tobytes() == array.tobytes() == theirs[name].tobytes()


def test_golden_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    digest = write_tensors(path, {"w": np.array([[1.0, 2.0]], dtype=np.float32)}, {"k": "v"})
    header = b'{"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + np.array([1, 2], "<f4").tobytes()
    assert path.read_bytes() == expected
    assert digest == hashlib.sha256(expected).hexdigest()


def test_bfloat16_is_what_torch_writes_and_reads(tmp_path):
    path = tmp_path / "x.safetensors"
    numbers = torch.tensor([[1.0, -2.5], [float("inf"), 3.0e-39]]).bfloat16()
    write_tensors(path, {"w": numbers.view(torch.int16).numpy().view(BFLOAT16)})
    assert torch.equal(safetensors.torch.load_file(path)["w"], numbers)
    safetensors.torch.save_file({"w": numbers}, path)
    found = read_tensors(path)[0]["w"]
    assert found.dtype == BFLOAT16
    np.testing.assert_array_equal(widen_bfloat16(found), numbers.float().numpy())
    np.testing.assert_array_equal(widen_bfloat16(np.arange(3)), np.arange(3))


def test_files_of_the_library_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"b": np.arange(3), "a": np.ones((2, 2), np.float32)}
    safetensors.numpy.save_file(tensors, path, {"from": "there"})
    found, metadata = read_tensors(path)
    assert metadata == {"from": "there"}
    np.testing.assert_array_equal(found["a"], tensors["a"])
    np.testing.assert_array_equal(found["b"], tensors["b"])


def test_big_endian_and_strided_arrays_are_stored_plainly(tmp_path):
    path = tmp_path / "x.safetensors"
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    write_tensors(path, {"big": np.arange(3, dtype=">i4"), "strided": strided})
    found, _ = read_tensors(path)
    assert found["big"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found["strided"], strided)


def test_tensors_larger_than_a_piece(tmp_path):
    path = tmp_path / "x.safetensors"
    big = np.arange(5 * 2**20, dtype=np.int64)
    digest = write_tensors(path, {"big": big, "after": np.ones(1)})
    found, _ = read_tensors(path, sha256=digest)
    np.testing.assert_array_equal(found["big"], big)
    found["big"][0] = 1  # writable


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([1j]), np.array([None])])
def test_types_that_cannot_be_stored(tmp_path, array):
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.safetensors")):
        write_tensors(tmp_path / "x.safetensors", {"x": array})
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "x.safetensors"
    digest = write_tensors(path, {"w": np.arange(4, dtype=np.int32)}, {"k": "v"})
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(FormatError, check=at(path)):
            read_tensors(path, sha256=digest)


def test_every_truncation_is_found_without_a_checksum(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": np.arange(4, dtype=np.int32)})
    content = path.read_bytes()
    for length in [*range(len(content)), len(content) + 1]:
        path.write_bytes((content + b"x")[:length])
        with pytest.raises(FormatError, check=at(path)):
            read_tensors(path)


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MALFORMED = {
    "not JSON": (b"{{", "the header is not JSON"),
    "nested deeply": (b"[" * 10**5, "the header is not JSON"),
    "a list": ([], "the header is not an object"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "holds something else than strings"),
    "a tensor of nothing": ({"w": None}, "tensor 'w' is described by None"),
    "unknown type": ({"w": {**W, "dtype": "F31"}}, "tensor 'w' is described by"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "tensor 'w' is described by"),
    "negative shape": ({"w": {**W, "shape": [-1, -2]}}, "tensor 'w' is described by"),
    "boolean shape": ({"w": {**W, "shape": [True, 2]}}, "tensor 'w' is described by"),
    "one offset": ({"w": {**W, "data_offsets": [0]}}, "tensor 'w' is described by"),
    "other size": ({"w": {**W, "shape": [3]}}, "tensor 'w' has bytes 0 to 8"),
    "vast shape": ({"w": {**W, "shape": [2**60, 2**60]}}, "tensor 'w' has bytes 0 to 8"),
    "vast shape of nothing": (
        {"w": {**W, "shape": [2**62, 0], "data_offsets": [0, 0]}},
        "tensor 'w' is described by",
    ),
    "too many dimensions": ({"w": {**W, "shape": [1] * 99 + [2]}}, "tensor 'w' is described by"),
    "a hole": ({"w": {**W, "data_offsets": [4, 12]}}, "tensor 'w' starts at byte 4"),
    "an overlap": ({"v": W, "w": W}, "tensor 'w' starts at byte 0"),
    "beyond the end": ({"v": W, "w": {**W, "data_offsets": [8, 16]}}, "holds 139 bytes"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers(tmp_path, case):
    header, problem = MALFORMED[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(FormatError, check=at(path, problem)) as caught:
        read_tensors(path)
    assert str(caught.value).startswith(str(path))


def test_a_vast_header_length_allocates_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, check=at(path, "header of 4611686018427387904 bytes in a file of 10")):
        read_tensors(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent")):
        read_tensors(tmp_path / "absent")
