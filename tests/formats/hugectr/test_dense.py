# SPDX-License-Identifier: Apache-2.0
"""Float files and BatchNorm statistics: golden bytes, round trips, damage."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.weights import (
    BatchNormStatistics,
    read_floats,
    read_statistics,
    write_floats,
    write_statistics,
)
from tests.errors import at
from tests.params import examples

shapes = st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple), max_size=5)
floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6)


def test_golden_bytes(tmp_path):
    path = tmp_path / "_dense_0.model"
    write_floats(path, [np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([0.5, -0.5], np.float32)])
    assert path.read_bytes() == struct.pack("<6f", 1, 2, 3, 4, 0.5, -0.5)


def test_columns_are_written_row_by_row(tmp_path):
    path = tmp_path / "x.model"
    write_floats(path, [np.arange(6, dtype=np.float32).reshape(2, 3).T])
    assert path.read_bytes() == struct.pack("<6f", 0, 3, 1, 4, 2, 5)


@given(shapes=shapes, seed=st.integers(0, 9))
@settings(max_examples=examples(40))
def test_arrays_come_back(tmp_path_factory, shapes, seed):
    path = tmp_path_factory.mktemp("floats") / "x.model"
    generator = np.random.default_rng(seed)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    write_floats(path, arrays)
    found = read_floats(path, [(f"array {index}", shape) for index, shape in enumerate(shapes)])
    assert len(found) == len(arrays)
    for mine, theirs in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_an_optimizer_without_states_has_an_empty_file(tmp_path):
    write_floats(tmp_path / "x.model", [])
    assert (tmp_path / "x.model").read_bytes() == b""
    assert read_floats(tmp_path / "x.model", []) == []


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (20, "holds 20 bytes"),
        (8, "holds 8 bytes"),
        (28, "holds 28 bytes"),
        (22, "holds 22 bytes"),
    ],
)
def test_a_wrong_size_is_rejected(tmp_path, size, problem):
    path = tmp_path / "x.model"
    path.write_bytes(bytes(size))
    with pytest.raises(FormatError, check=at(path, problem)):
        read_floats(path, [("fc1.kernel", (2, 2)), ("fc2.bias", (2,))])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent.model")):
        read_floats(tmp_path / "absent.model", [])
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent.ntp.json")):
        read_statistics(tmp_path / "absent.ntp.json")


@given(mean=floats)
@settings(max_examples=examples(40))
def test_statistics_come_back_exactly(tmp_path_factory, mean):
    path = tmp_path_factory.mktemp("ntp") / "x.ntp.json"
    written = BatchNormStatistics(np.array(mean, np.float32), np.array(mean[::-1], np.float32))
    write_statistics(path, [written, written])
    for found in read_statistics(path):
        np.testing.assert_array_equal(found.mean, written.mean)
        np.testing.assert_array_equal(found.var, written.var)


def test_statistics_are_plain_json(tmp_path):
    path = tmp_path / "x.ntp.json"
    write_statistics(path, [BatchNormStatistics(np.array([0.1], np.float32), np.array([2.0], np.float32))])
    assert json.loads(path.read_text()) == {"layers": [{"type": "BatchNorm", "mean": [0.1], "var": [2.0]}]}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", ("", "not JSON")),
        ("[]", ("", 'expected an object with a list "layers"')),
        ('{"layers": 3}', ("", 'expected an object with a list "layers"')),
        ('{"layers": [{"type": "GRU"}]}', (": layers[0]", 'expected an object with "type": "BatchNorm"')),
        ('{"layers": [{"type": "BatchNorm", "mean": [1], "var": ["a"]}]}', (": layers[0].var",)),
        ('{"layers": [{"type": "BatchNorm", "mean": [1], "var": []}]}', (": layers[0]", "got 1 means and 0 variances")),
    ],
)
def test_damaged_statistics_are_rejected(tmp_path, text, place):
    path = tmp_path / "x.ntp.json"
    path.write_text(text)
    with pytest.raises(FormatError, check=at(f"{path}{place[0]}", *place[1:])):
        read_statistics(path)
