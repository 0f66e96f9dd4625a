# SPDX-License-Identifier: Apache-2.0
"""Runs that train part by part: equal to those in memory that read by parts, and what keysets must hold."""

import dataclasses
import itertools
import json
import shutil
from bisect import bisect_left
from types import SimpleNamespace

import numpy as np
import pytest

from terarec.data import open_reader
from terarec.data.reader import DatasetSource
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, DataNotFoundError, KeysetError
from terarec.formats import read_dataset
from terarec.formats.block import bags_of
from terarec.formats.container import read_tensors, write_tensors
from terarec.formats.parts import PARTS_FILE, read_part_keys, read_parts, write_parts
from terarec.spec import (
    AdaGradSpec,
    DLRMSpec,
    DynamicTablesSpec,
    FeatureSpec,
    TableSpec,
    Tiers,
    TrainingSpec,
    freq,
)
from terarec.train import build
from terarec.train.devices import collections_in_tiers
from terarec.train.passes import _keys
from tests.params import in_every_run
from tests.train.small_run import assert_same, changed, weights
from tests.train.test_tiers import with_tiers

MODELS = {
    "static": (DLRMSpec(width=4, bottom=(8, 4), top=(8,)), 30),
    "dynamic": (DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=DynamicTablesSpec(admit=freq(2))), 27),
}
"""Each with KiB that hold hardly more than a batch."""


@pytest.fixture(scope="module")
def parted(planted, tmp_path_factory):
    """Return the planted data set in parts of 300, 400 and 300 samples."""
    directory = tmp_path_factory.mktemp("parted") / "data"
    shutil.copytree(planted, directory)
    write_parts(read_dataset(directory), directory, "train", 3)
    return directory


@pytest.fixture
def data(parted, tmp_path):
    """Return a copy to spoil."""
    shutil.copytree(parted, tmp_path / "data")
    return tmp_path / "data"


def in_passes(spec, data, **training):
    return dataclasses.replace(changed(spec, passes=True, **training), data=str(data))


@pytest.mark.slow
@pytest.mark.parametrize("model", in_every_run(["static"], MODELS))
def test_passes_equal_reading_by_parts_in_memory(tmp_path, spec, parted, model):
    described, kib = MODELS[model]
    spec = in_passes(dataclasses.replace(spec, model=described), parted, batch_size=100)
    plain = build(spec, tmp_path / "plain")
    plain.fit()
    assert [part.rows for part in read_parts(parted, "train")] == [300, 400, 300]
    tiers = Tiers(host=f"{kib}KiB", file=str(tmp_path / "rows"))
    straight = build(with_tiers(spec, tiers), tmp_path / "straight")
    straight.fit()
    assert_same(weights(straight.model), weights(plain.model))
    del straight
    build(with_tiers(changed(spec, max_steps=15), tiers), tmp_path / "resumed").fit()  # within the second part
    resumed = build(with_tiers(spec, tiers), tmp_path / "resumed")
    resumed.fit(resume=True)
    assert_same(weights(resumed.model), weights(plain.model))


def test_a_part_is_loaded_before_its_first_step(tmp_path, spec, parted):
    loaded, ahead = [], []
    run = build(
        with_tiers(in_passes(spec, parted, batch_size=100), Tiers(file=str(tmp_path / "rows"))), tmp_path / "RUN"
    )
    (collection,) = collections_in_tiers(run.model)
    preload = collection.preload

    def noted(keys):
        loaded.append((run.trainer.step, keys))
        preload(keys)
        used = run.trainer.tier_use()
        loaded[-1] += (used.lookups - used.hits,)

    def noted_ahead(present, keys, goes_on):
        ahead.append((present, keys))
        preload_next(present, keys, goes_on)

    preload_next = collection.preload_next
    collection.preload, collection.preload_next = noted, noted_ahead
    report = run.fit()
    assert [step for step, _, _ in loaded] == [0, 3, 7, 10, 13, 17]
    parts = read_parts(parted, "train")
    for number, (_, keys, _) in enumerate(loaded):
        expected = read_part_keys(parted, "train", parts[number % 3])
        assert {name: values.tolist() for name, values in keys.items()} == {
            name: values.tolist() for name, values in expected.items()
        }
    for number, (present, keys) in enumerate(ahead):
        assert present is loaded[number][1]
        following = read_part_keys(parted, "train", parts[(number + 1) % 3])
        assert {name: values.tolist() for name, values in keys.items()} == {
            name: values.tolist() for name, values in following.items()
        }
    assert len(ahead) == 5  # after the last part there is none
    assert report.tiers.hits > 0.9 * report.tiers.lookups  # but for keys of the valid split alone


def test_keys_of_a_column_are_those_of_the_features_that_read_it():
    """Rows of features with other names than columns were loaded when a step looked them up."""
    tables = [TableSpec(name="t", rows=9, width=4)]
    collection = EmbeddingCollection(tables, [FeatureSpec(name=name, table="t") for name in "fgh"])
    collection.columns = {"f": "c", "h": "c"}
    keysets = SimpleNamespace(keys=lambda part: {"c": np.array([1, part]), "g": np.array([2]), "h": np.array([3])})
    (keys,) = _keys(keysets, 5, [collection])
    assert {name: values.tolist() for name, values in keys.items()} == {"f": [1, 5], "g": [2], "h": [1, 5]}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [100, 128, 350])
def test_the_part_of_the_next_batch(parted, drop_last, batch_size):
    """A rest that is left out is none of the next step."""
    reader = open_reader(parted, "train", batch_size=batch_size, by_parts=True, drop_last=drop_last)
    parts = [reader.part_after(reader.state_dict())]
    numbers = []
    for _ in reader:
        state = reader.state_dict()
        numbers.append(bisect_left([300, 700, 1000], state["rows_read"] or 1000))
        parts.append(reader.part_after(state))
    assert parts[:-1] == numbers
    assert parts[-1] == parts[0]


@pytest.mark.parametrize("tiers", [False, True])
def test_a_keyset_that_lacks_a_key_is_rejected(tmp_path, spec, data, tiers):
    parts = read_parts(data, "train")
    keys = read_part_keys(data, "train", parts[1])
    name = list(keys)[-1]
    source = DatasetSource(data, "train")
    bags = [bags_of(source.read(group).keys[-1]) for group in range(len(source.group_rows))]
    samples = [values[start:stop] for values, offsets in bags for start, stop in itertools.pairwise(offsets)]
    key = int(samples[512][0])
    first = next(row for row in range(300, 700) if key in samples[row])
    file = data / "train" / parts[1].keyset
    keys[name] = keys[name][keys[name] != key]
    digest = write_tensors(file, keys)
    description = json.loads((data / "train" / PARTS_FILE).read_text())
    description["parts"][1]["sha256"] = digest
    (data / "train" / PARTS_FILE).write_text(json.dumps(description))
    assert list(read_tensors(file)[0]) == list(keys)

    spec = in_passes(spec, data, batch_size=100, shuffle=False)
    run = build(with_tiers(spec, Tiers(file=str(tmp_path / "rows"))) if tiers else spec, tmp_path / "RUN")
    with pytest.raises(KeysetError) as raised:
        run.fit()
    error = raised.value
    assert (error.part, error.column, error.key, error.row) == (1, name, key, first)
    assert str(file) in str(error)
    assert run.trainer.step >= 3  # the first part was trained


def test_passes_need_parts_with_keysets(tmp_path, spec, planted, data):
    with pytest.raises(ConfigError):
        TrainingSpec(passes=True, repeat=True, max_steps=1)
    with pytest.raises(DataNotFoundError):
        build(in_passes(spec, planted), tmp_path / "RUN").fit()
    write_parts(read_dataset(data), data, "train", 2, keysets=False)
    with pytest.raises(DataNotFoundError):
        build(in_passes(spec, data), tmp_path / "RUN").fit()
    assert not (tmp_path / "RUN").exists()
    assert len(list(open_reader(data, batch_size=100, by_parts=True))) == 10


def test_a_resumed_run_cannot_change_to_passes(tmp_path, spec, parted):
    spec = dataclasses.replace(spec, data=str(parted), sparse_optimizer=AdaGradSpec())
    build(changed(spec, max_steps=2), tmp_path / "RUN").fit()
    with pytest.raises(ConfigError):
        build(changed(spec, passes=True), tmp_path / "RUN").fit(resume=True)
