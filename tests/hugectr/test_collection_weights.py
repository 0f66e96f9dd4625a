# SPDX-License-Identifier: Apache-2.0
"""Tables of embedding collections through HugeCTR's dumps."""

import numpy as np
import pytest
import torch

from terarec.embedding import EmbeddingCollection
from terarec.errors import FormatError
from terarec.formats.hugectr.collection import DumpedTable, open_collection, write_collection
from terarec.formats.hugectr.weights import SparseRows
from terarec.hugectr.collection_weights import dump_collection, dump_folder, load_collection
from terarec.hugectr.errors import BrokenFileError, OutOfBoundError, WrongInputError
from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec
from tests.errors import at

SPECS = [
    TableSpec(name="user", rows=4, width=2),
    DynamicTableSpec(name="item", width=3),
    TableSpec(name="shop", rows=2, width=2),
]


def make(seed: int) -> EmbeddingCollection:
    collection = EmbeddingCollection(
        SPECS, [FeatureSpec(name=spec.name, table=spec.name, pooling="sum") for spec in SPECS], seed=seed
    )
    collection.tables["item"].rows(torch.tensor([9, -4, 30]), train=True)
    return collection


def contents(collection: EmbeddingCollection) -> dict[str, tuple[list[int], list[list[float]]]]:
    return {
        name: (table.keys().tolist(), table.export(table.keys()).weights.tolist())
        for name, table in collection.tables.items()
    }


def test_a_dump_holds_the_tables_in_order(tmp_path):
    collection = make(1)
    folder = dump_folder(tmp_path, 0)
    dump_collection(collection.tables, folder)
    assert folder.name == "embedding_collection_0"
    dump = open_collection(folder)
    assert dump.tables == (DumpedTable(0, 4, 2), DumpedTable(1, 3, 3), DumpedTable(2, 2, 2))
    (item,) = dump.chunks(dump.tables[1])
    assert item.keys.tolist() == [-4, 9, 30]
    np.testing.assert_array_equal(item.vectors, collection.tables["item"].export(torch.tensor([-4, 9, 30])).weights)


@pytest.mark.parametrize("names", [[], ["user", "item"], ["item"]])
def test_tables_resume_elsewhere(tmp_path, names):
    first, second = make(1), make(2)
    second.tables["item"].rows(torch.tensor([77]), train=True)
    untouched = contents(second)
    dump_collection(first.tables, tmp_path / "x")
    load_collection(second.tables, tmp_path / "x", names=names)
    expected = {name: contents(first)[name] if name in (names or untouched) else untouched[name] for name in untouched}
    assert contents(second) == expected


def test_a_part_of_the_tables_is_dumped_and_loaded(tmp_path):
    first, second = make(1), make(2)
    dump_collection(first.tables, tmp_path / "x", names=["item", "shop"])
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "key1",
        "key2",
        "meta_data",
        "weight1",
        "weight2",
    ]
    before = contents(second)["user"]
    load_collection(second.tables, tmp_path / "x")
    assert contents(second) == {**contents(first), "user": before}


def test_what_does_not_fit_changes_nothing(tmp_path):
    collection = make(1)
    before = contents(collection)

    def dump(table_id: int, rows: SparseRows) -> None:
        described = DumpedTable(table_id, *rows.vectors.shape)
        write_collection(tmp_path / "x", [described], lambda _: iter([rows]), key_bytes=8)

    with pytest.raises(WrongInputError, check=at("table_names")):
        load_collection(collection.tables, tmp_path / "x", names=["shops"])
    dump(2, SparseRows(np.array([0, 2]), np.ones((2, 2), np.float32)))
    with pytest.raises(OutOfBoundError, check=at(f"{tmp_path}/x, table 2 ('shop')")):
        load_collection(collection.tables, tmp_path / "x")
    with pytest.raises(BrokenFileError, check=at(f"{tmp_path}/x")):
        load_collection(collection.tables, tmp_path / "x", names=["item"])
    dump(2, SparseRows(np.array([0]), np.ones((1, 3), np.float32)))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x, table 2 ('shop')")):
        load_collection(collection.tables, tmp_path / "x")
    dump(1, SparseRows(np.array([5, 5]), np.ones((2, 3), np.float32)))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x, table 1 ('item')")):
        load_collection(collection.tables, tmp_path / "x")
    assert contents(collection) == before
