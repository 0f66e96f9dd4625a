"""Collections of 8-bit rows: the same forward, within half a code of each row."""

import pytest
import torch

from terarec.batch import one_hot
from terarec.embedding import EmbeddingCollection, QuantizedCollection
from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.ref.quantized import dequantize_rows
from terarec.ops import quantize_rows
from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec
from tests.embedding.plain import random_jagged
from tests.embedding.test_poolings import FEATURES, NAMES, ROWS, TABLES, weighted


def test_looks_up_the_values_that_the_codes_stand_for() -> None:
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
    with pytest.raises(KeyOutOfRangeError, match="feature 'f': got key 70"):
        packed(one_hot(["f"], torch.tensor([[70]])))


def test_what_cannot_be_quantized_is_refused() -> None:
    dynamic = EmbeddingCollection([DynamicTableSpec(name="d", width=4)], [FeatureSpec(name="f", table="d")])
    with pytest.raises(ConfigError, match="quantized: got the dynamic tables d, expected static"):
        dynamic.quantized()
    mine = EmbeddingCollection(TABLES, FEATURES)
    mine.table("b")[3, 1] = float("nan")
    with pytest.raises(ConfigError, match=r"weights\[3\]: got values that are not finite"):
        mine.quantized()
    assert issubclass(QuantizedCollection, torch.nn.Module)
