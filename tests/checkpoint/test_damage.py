# SPDX-License-Identifier: Apache-2.0
"""Every file of a checkpoint cut short or changed is found out, and named."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terarec.checkpoint import load, save
from terarec.checkpoint.directory import read_manifest
from terarec.checkpoint.table_files import TableFiles, keyed_of
from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.container import read_tensors, write_tensors
from tests.checkpoint.small_state import make_state, make_tables
from tests.errors import at
from tests.params import examples

STATE = make_state(7)
FILES = (
    "manifest.json",
    "dense.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tables/movie-00000.safetensors",
    "tables/user id-00001-00000.safetensors",
)


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("whole"), STATE)


def read_everything(path):
    checkpoint = load(path)
    checkpoint.dense()
    checkpoint.optimizer()
    checkpoint.load_tables(make_tables(), with_state=True)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(whole_checkpoint, file):
    content = (whole_checkpoint / file).read_bytes()
    (whole_checkpoint / file).unlink()
    try:
        is_manifest = file == "manifest.json"
        where = at(whole_checkpoint if is_manifest else whole_checkpoint / file)
        with pytest.raises(DataNotFoundError if is_manifest else FormatError, check=where):
            read_everything(whole_checkpoint)
    finally:
        (whole_checkpoint / file).write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_named(whole_checkpoint, file, data):
    path = whole_checkpoint / file
    content = path.read_bytes()
    end = len(content.rstrip())  # blank space at the end of JSON carries nothing
    place = data.draw(st.integers(0, end - 1))
    cut = data.draw(st.booleans())
    bit = 1 << data.draw(st.integers(0, 7))
    damaged = content[:place] if cut else content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    path.write_bytes(damaged)
    try:
        with pytest.raises(FormatError) as caught:
            read_everything(whole_checkpoint)
    finally:
        path.write_bytes(content)
    # A manifest that changed a file's size or checksum makes that file the suspect.
    assert file.split("/")[-1] in str(caught.value) or file == "manifest.json"
    assert str(whole_checkpoint) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_untouched_checkpoint_reads(whole_checkpoint):
    read_everything(whole_checkpoint)


@pytest.mark.parametrize("name", ["rows", "seed"])
def test_numbers_that_python_does_not_read_are_damage(tmp_path, name):
    """More digits than `int` takes; whoever asks for the sizes alone compares no checksums."""
    path = save(tmp_path, STATE)
    file, tables = path / "tables/movie-00000.safetensors", TableFiles(path, read_manifest(path))
    arrays, metadata = read_tensors(file)
    write_tensors(file, arrays, {**metadata, name: "9" * 5000})
    with pytest.raises(FormatError, check=at(file)):
        tables.shape("movie")


def test_keys_for_a_static_table_are_damage():
    path, table = Path("there"), make_tables()["movie"]
    with pytest.raises(FormatError, check=at("there", "table 'movie'")):
        keyed_of(table, path)
