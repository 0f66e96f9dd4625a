# SPDX-License-Identifier: Apache-2.0
"""Collections without rows give what collections with rows give."""

import copy

import pytest
import torch

from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import LookupCollection, RowLookup
from terarec.errors import ConfigError
from terarec.models.artifact import without_tables
from terarec.models.registry import build_model
from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec
from terarec.storage.kinds import AnyTable
from tests.errors import at
from tests.models.every import ALLOWED, MODELS, dataset, random_batch

TABLES = [
    TableSpec(name="users", rows=11, width=4),
    DynamicTableSpec(name="items", width=4, default=0.5),
    TableSpec(name="shops", rows=5, width=3),
]
FEATURES = [
    FeatureSpec(name="bought", table="items", pooling="mean"),
    FeatureSpec(name="user", table="users"),
    FeatureSpec(name="seen", table="items", pooling="none", max_keys=2),
    FeatureSpec(name="item", table="items"),
    FeatureSpec(name="shop", table="shops", pooling="max"),
    FeatureSpec(name="friend", table="users", pooling="sqrtn", max_keys=3),
]


def rows_of(table: AnyTable) -> RowLookup:
    """The rows of a table, and the default vector of other keys, read row by row."""
    held = table.export(table.keys())
    rows = dict(zip(held.keys.tolist(), held.weights, strict=True))
    default = torch.full((table.width,), 0.5)

    def lookup(keys: torch.Tensor) -> torch.Tensor:
        found = [rows.get(key, default) for key in keys.tolist()]
        return torch.stack(found) if found else torch.empty(0, table.width)

    return lookup


def bags(batch_size: int, *, has_weights: bool, seed: int = 0) -> Jagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (6 * batch_size,), generator=generator)
    num_keys = int(lengths.sum())
    return Jagged(
        names=("item", "seen", "user", "shop", "bought", "friend"),
        keys=torch.randint(0, 5, (num_keys,), generator=generator),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        weights=torch.rand(num_keys, generator=generator) if has_weights else None,
    )


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("batch_size", [0, 1, 7])
def test_every_pooling(batch_size: int, has_weights: bool) -> None:
    collection = EmbeddingCollection(TABLES, FEATURES).eval()
    with torch.no_grad():
        collection.train()
        with torch.enable_grad():
            collection(bags(7, has_weights=False, seed=1))  # inserts some keys of the dynamic table
        collection.eval()
        jagged = bags(batch_size, has_weights=has_weights)
        made = LookupCollection(TABLES, FEATURES, {name: rows_of(table) for name, table in collection.tables.items()})
        got, expected = made(jagged), collection(jagged)
    assert made.output_width == collection.output_width
    assert torch.equal(got.pooled, expected.pooled)
    assert got.sequences.keys() == expected.sequences.keys()
    for name, sequences in got.sequences.items():
        assert torch.equal(sequences.values, expected.sequences[name].values)
        assert torch.equal(sequences.offsets, expected.sequences[name].offsets)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "python"])
def test_every_model(name: str) -> None:
    model = build_model(MODELS[name], dataset(), seed=1, allow_import=ALLOWED).eval()
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    lookups = {name: rows_of(table) for collection in collections for name, table in collection.tables.items()}
    other = without_tables(copy.deepcopy(model))
    for module in other.modules():
        assert not isinstance(module, EmbeddingCollection)
        if isinstance(module, LookupCollection):
            module.connect(lookups)
    batch = random_batch(dataset())
    with torch.no_grad():
        got, expected = other(batch), model(batch)
    if isinstance(expected, dict):
        assert all(torch.equal(got[tensor], expected[tensor]) for tensor in expected)
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_every_table_needs_rows() -> None:
    with pytest.raises(ConfigError, check=at("lookups")):
        LookupCollection(TABLES, FEATURES, {"users": lambda keys: torch.zeros(keys.numel(), 4)})
