# SPDX-License-Identifier: Apache-2.0
"""File lists and keysets, also behind URLs."""

import struct

import fsspec
import numpy as np
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.hugectr import read_file_list, write_file_list
from terarec.formats.hugectr.norm import NormFile
from terarec.formats.hugectr.split_writer import read_keyset, write_keyset
from terarec.io.remote import locate
from tests.errors import at
from tests.formats.hugectr.samples import assert_same_rows, make_layout, make_rows, norm_bytes


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/terarec", recursive=True)


def test_a_list_round_trips(tmp_path):
    write_file_list(tmp_path / "list.txt", ["a/gen_0.data", "/b/gen_1.data"])
    assert (tmp_path / "list.txt").read_text() == "2\na/gen_0.data\n/b/gen_1.data\n"
    assert read_file_list(tmp_path / "list.txt") == ("a/gen_0.data", "/b/gen_1.data")


def test_blanks_around_lines_do_not_count(tmp_path):
    (tmp_path / "list.txt").write_text(" 2 \r\n  a.data\t\n b c.data\n\n")
    assert read_file_list(tmp_path / "list.txt") == ("a.data", "b c.data")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", (1, "got ''")),
        ("a.data\n", (1, "got 'a.data'")),
        ("-1\n", (1, "got '-1'")),
        ("9" * 5000, (1, "expected the number of files")),
        ("2\na.data\n", (1, "got 2 files, 1 paths follow")),
        ("1\na.data\nb.data\n", (1, "got 1 files, 2 paths follow")),
        ("2\n\na.data\n", (2, "empty")),
    ],
)
def test_a_wrong_list(tmp_path, text, fault):
    line, problem = fault
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/list.txt: line {line}", problem)):
        read_file_list(tmp_path / "list.txt")


def test_a_list_that_is_not_text(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"1\n\xff\xfe")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/list.txt")):
        read_file_list(tmp_path / "list.txt")


@pytest.mark.parametrize(("key_bytes", "code"), [(4, "I"), (8, "q")])
def test_a_keyset_round_trips(tmp_path, key_bytes, code):
    write_keyset(tmp_path / "x.keyset", np.array([3, 1, 70000]), key_bytes)
    assert (tmp_path / "x.keyset").read_bytes() == struct.pack(f"<3{code}", 3, 1, 70000)
    keys = read_keyset(tmp_path / "x.keyset", key_bytes)
    assert keys.dtype == np.int64
    assert keys.tolist() == [3, 1, 70000]


def test_wrong_keysets(tmp_path):
    (tmp_path / "x.keyset").write_bytes(bytes(12))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.keyset")):
        read_keyset(tmp_path / "x.keyset", 8)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/y.keyset")):
        write_keyset(tmp_path / "y.keyset", np.array([1, -1]), 4)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/nowhere")):
        read_keyset(tmp_path / "nowhere", 4)


def test_files_behind_urls(memory):
    layout = make_layout()
    rows = make_rows(layout, 20)
    memory.pipe("/terarec/a.data", norm_bytes(layout, *rows, checksum=True))
    memory.pipe("/terarec/list.txt", b"2\n/terarec/a.data\nmemory://terarec/a.data\n")
    names = read_file_list("memory://terarec/list.txt")
    assert names == ("memory:///terarec/a.data", "memory://terarec/a.data")
    for name in names:
        block, _ = NormFile(name, layout, checksum=True).read()
        assert_same_rows(block, *rows)


def test_urls_that_lead_nowhere(memory):
    memory.pipe("/terarec/short", b"abc")
    with pytest.raises(DataNotFoundError, check=at("memory://terarec/nothing")):
        locate("memory://terarec/nothing")
    with pytest.raises(ConfigError, check=at("nosuch://x")):
        locate("nosuch://x")
    file = locate("memory://terarec/short")
    memory.pipe("/terarec/short", b"a")
    with pytest.raises(FormatError, check=at("memory://terarec/short")):
        file.read(0, 3)
