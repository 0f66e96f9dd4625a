# SPDX-License-Identifier: Apache-2.0
"""Collections of 8-bit rows: the same forward, within half a code of each row."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from terarec.batch import one_hot
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.ref.bag_lookup import dequantize_rows
from terarec.ops import quantize_rows
from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec, lru
from tests.embedding.plain import random_jagged
from tests.embedding.test_poolings import FEATURES, NAMES, ROWS, TABLES, weighted
from tests.errors import at


def test_looks_up_the_values_that_the_codes_represent() -> None:
    mine = EmbeddingCollection(TABLES, FEATURES, seed=2)
    packed = mine.quantized()
    for arena in mine.arenas:
        arena.weights.copy_(dequantize_rows(quantize_rows(arena.weights)))
    for jagged in (
        random_jagged(NAMES, ROWS, 9, most=5),
        weighted(random_jagged(NAMES, ROWS, 9)),
        random_jagged(NAMES, ROWS, 0),
    ):
        expected, found = mine(jagged), packed(jagged)
        torch.testing.assert_close(found.pooled, expected.pooled)
        assert not found.pooled.requires_grad
        torch.testing.assert_close(found.sequences["f2"].values, expected.sequences["f2"].values)
        assert torch.equal(found.sequences["f2"].offsets, expected.sequences["f2"].offsets)


def test_it_is_a_copy_in_a_third_of_the_memory_that_loads_and_saves() -> None:
    tables = [TableSpec(name="a", rows=70, width=16)]
    mine = EmbeddingCollection(tables, [FeatureSpec(name="f", table="a")])
    packed, jagged = mine.quantized(), one_hot(["f"], torch.arange(70)[None])
    before = packed(jagged).pooled
    assert packed.memory_bytes() == 70 * 24
    mine.table("a").zero_()
    assert torch.equal(packed(jagged).pooled, before)
    twin = EmbeddingCollection(tables, mine.features, seed=9).quantized()
    twin.half().load_state_dict(packed.state_dict())
    assert torch.equal(twin(jagged).pooled, before)
    with pytest.raises(KeyOutOfRangeError, check=at("feature 'f'")):
        packed(one_hot(["f"], torch.tensor([[70]])))


DYNAMIC = [
    DynamicTableSpec(name="x.y", width=8, default=0.5, evict=lru(), max_rows=9),
    TableSpec(name="a", rows=9, width=8),
    DynamicTableSpec(name="z", width=8, dtype="bfloat16"),
    DynamicTableSpec(name="w", width=8),
]
READERS = [
    FeatureSpec(name="fz", table="z", pooling="max"),
    FeatureSpec(name="fx", table="x.y"),
    FeatureSpec(name="fa", table="a"),
    FeatureSpec(name="fw", table="w", pooling="none"),
    FeatureSpec(name="fv", table="w", pooling="mean"),
]
BATCH = one_hot(
    [feature.name for feature in READERS],
    torch.tensor([[-1, 2**62, 5], [7, 7, -(2**63)], [1, 2, 3], [4, 5, 6], [9, 8, 4]]),
)


def trained() -> EmbeddingCollection:
    """Dynamic tables with some keys, of which others went."""
    mine = EmbeddingCollection(DYNAMIC, READERS)
    for shift in (1, 0):
        mine(replace(BATCH, keys=BATCH.keys + shift))
    mine.tables["x.y"].evict(lru(), keep_at_least=2)
    return mine


def test_dynamic_tables_keep_their_keys_and_defaults() -> None:
    mine = trained()
    packed = mine.quantized()
    stranger = one_hot([feature.name for feature in READERS], torch.tensor([[77], [78], [8], [79], [80]]))
    for batch in (BATCH, stranger, replace(BATCH, keys=BATCH.keys + 1)):
        expected, found = mine.eval()(batch), packed.train()(batch)
        torch.testing.assert_close(found.pooled, expected.pooled, rtol=0.0, atol=2e-3)
        assert (found.sequences["fw"].values - expected.sequences["fw"].values).abs().max() < 2e-3
    assert packed(stranger).pooled[0, 8:16].tolist() == [0.5] * 8
    rows = [len(mine.tables[name]) + 1 for name in ("x.y", "z", "w")]
    assert [held.shape[0] for name, held in packed.named_buffers() if "rows" in name] == [rows[0] + rows[2], 9, rows[1]]
    wrong = replace(BATCH, offsets=BATCH.offsets.flip(0))
    with pytest.raises(ConfigError, check=at("offsets")):
        packed(wrong)


def test_a_quantized_collection_of_dynamic_tables_is_loaded_copied_and_compiled() -> None:
    packed = trained().quantized()
    expected = packed(BATCH).pooled
    empty = EmbeddingCollection(DYNAMIC, READERS).quantized()
    size = empty.memory_bytes()
    empty.load_state_dict(packed.state_dict())
    assert empty.memory_bytes() > size
    assert torch.equal(empty(BATCH).pooled, expected)
    for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), torch.compile(packed, backend="eager")):
        assert torch.equal(twin(BATCH).pooled, expected)
    state = packed.state_dict()
    state["keys_0_1"] = state["keys_0_1"][:-1]
    with pytest.raises(RuntimeError, match=r"rows_0: got \d+ rows, expected \d+, one a key and table"):
        empty.load_state_dict(state)
    assert torch.equal(empty(BATCH).pooled, expected)


def test_what_cannot_be_quantized_is_rejected() -> None:
    mine = EmbeddingCollection(TABLES, FEATURES)
    mine.table("b")[3, 1] = float("nan")
    with pytest.raises(ConfigError, check=at("weights[3]")):
        mine.quantized()
