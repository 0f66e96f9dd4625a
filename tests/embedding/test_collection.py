# SPDX-License-Identifier: Apache-2.0

import copy
import gc
import weakref

import pytest
import torch

from terarec.batch import Jagged, one_hot
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.spec import FeatureSpec, TableSpec
from tests.embedding.plain import PlainCollection, random_jagged
from tests.errors import at

NAMES, ROWS = ("f0", "f1", "f2", "f3", "f4"), (7, 11, 7, 5, 11)
TABLES = [
    TableSpec(name="a", rows=7, width=4),
    TableSpec(name="b", rows=11, width=6),
    TableSpec(name="c", rows=5, width=4),
]
FEATURES = [
    FeatureSpec(name="f0", table="a"),
    FeatureSpec(name="f1", table="b", pooling="mean"),
    FeatureSpec(name="f2", table="a", pooling="none"),
    FeatureSpec(name="f3", table="c", pooling="mean"),
    FeatureSpec(name="f4", table="b"),
]


def collection(seed: int = 0) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, FEATURES, seed=seed)


@pytest.mark.parametrize("batch_size", [0, 1, 13])
def test_equals_one_bag_a_table_over_mixed_widths(batch_size: int) -> None:
    mine = collection()
    jagged = random_jagged(NAMES, ROWS, batch_size)
    out = mine(jagged)
    pooled, sequences = PlainCollection(mine)(jagged)
    assert out.pooled.shape == (batch_size, mine.output_width)
    torch.testing.assert_close(out.pooled, pooled)
    torch.testing.assert_close(out.sequences["f2"].values, sequences["f2"])
    assert out.sequences["f2"].offsets.shape == (batch_size + 1,)
    assert out.sequences["f2"].offsets[-1] == out.sequences["f2"].values.shape[0]


def test_sequences_of_several_features_are_cut_apart() -> None:
    features = [FeatureSpec(name=name, table="b", pooling="none") for name in ("x", "y")]
    mine = EmbeddingCollection([TABLES[1]], features)
    jagged = Jagged(names=("x", "y"), keys=torch.tensor([3, 4, 5, 6, 7]), offsets=torch.tensor([0, 2, 2, 3, 5]))
    out = mine(jagged)
    assert out.pooled.shape == (2, 0)
    assert torch.equal(out.sequences["x"].values, mine.table("b")[[3, 4]])
    assert torch.equal(out.sequences["y"].values, mine.table("b")[[5, 6, 7]])
    assert out.sequences["x"].offsets.tolist() == [0, 2, 2]
    assert out.sequences["y"].offsets.tolist() == [0, 1, 3]


def test_features_are_found_by_name_in_any_batch() -> None:
    mine = collection()
    jagged = random_jagged(NAMES, ROWS, 6)
    names = ("f4", "extra", "f2", "f0", "f3", "f1")
    parts, lengths = [], []
    for name in names:
        position = NAMES.index("f1" if name == "extra" else name)
        offsets = jagged.offsets[position * 6 : position * 6 + 7]
        parts.append(jagged.keys[int(offsets[0]) : int(offsets[-1])])
        lengths.append(offsets.diff())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    shuffled = Jagged(names=names, keys=torch.cat(parts), offsets=offsets)
    assert torch.equal(mine(shuffled).pooled, mine(jagged).pooled)
    with pytest.raises(ConfigError, check=at("feature 'f3'")):
        mine(one_hot(["f0"], torch.zeros(1, 3, dtype=torch.int64)))


def test_backward_deposits_gradients_and_nothing_else_does() -> None:
    mine = collection()
    jagged = random_jagged(NAMES, ROWS, 6)
    mine(jagged)
    with torch.no_grad():
        assert not mine(jagged).pooled.requires_grad
    assert not any(mine.pending.gradients())
    for training in (True, False):  # as in torch, evaluation mode does not stop gradients
        out = mine.train(training)(jagged)
        (out.pooled.sum() + out.sequences["f2"].values.sum()).backward()
        taken, factor = mine.take_gradients()
        assert [len(gradients) for gradients in taken] == [2, 1]
        assert factor == 1.0
        assert not any(mine.pending.gradients())


def test_gradients_that_no_optimizer_takes_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    tables = [TableSpec(name=name, rows=9, width=4) for name in ("a", "b")]
    mine = EmbeddingCollection(tables, [FeatureSpec(name="f", table="a"), FeatureSpec(name="g", table="b")])
    jagged = one_hot(["f", "g"], torch.tensor([[1, 2, 3], [4, 5, 6]]))

    def train(times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            mine(jagged).pooled.sum().backward()
        return [record.getMessage() for record in caplog.records]

    assert not train(99)
    mine.take_gradients()
    assert not train(99)
    (logged,) = train(2)
    held = 100 * 3 * 2 * 4 * 4
    assert logged.startswith(f"tables a, b: 100 gradients, {held:,} bytes, are stored without a row optimizer's step()")
    mine.take_gradients()
    assert not train(101)


def test_a_forward_without_backward_leaks_nothing() -> None:
    mine = collection()
    pooled = mine(random_jagged(NAMES, ROWS, 6)).pooled
    alive = weakref.ref(pooled)
    del pooled
    gc.collect()
    assert alive() is None


def test_a_key_outside_names_the_feature() -> None:
    mine = EmbeddingCollection([TABLES[0]], [FeatureSpec(name="city", table="a"), FeatureSpec(name="town", table="a")])
    with pytest.raises(KeyOutOfRangeError, check=at("feature 'town'")):
        mine(one_hot(["city", "town"], torch.tensor([[0, 6], [6, 7]])))


def test_state_dict_shares_memory_and_round_trips() -> None:
    mine, other = collection(seed=1), collection(seed=2)
    state = mine.state_dict()
    assert list(state) == ["tables.a", "tables.b", "tables.c"]
    assert state["tables.c"].data_ptr() == mine.table("c").data_ptr()
    assert not torch.equal(other.table("b"), mine.table("b"))
    other.load_state_dict(state)
    assert all(torch.equal(other.table(name), mine.table(name)) for name in "abc")
    mine.table("a").zero_()
    assert other.table("a").abs().sum() > 0


def test_a_state_dict_that_does_not_fit_is_rejected() -> None:
    model = torch.nn.ModuleDict({"inner": collection()})
    state = dict(model.state_dict())
    state["inner.tables.b"] = torch.zeros(11, 4)
    with pytest.raises(RuntimeError, match=r"inner.tables.b: got shape \[11, 4\], expected \[11, 6\]"):
        model.load_state_dict(state)
    state = dict(model.state_dict())
    state["inner.tables.d"] = state.pop("inner.tables.a")
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"inner.tables.a".*Unexpected key.*"inner.tables.d"'):
        model.load_state_dict(state)


def test_one_empty_parameter_represents_the_weights_which_stay_float32() -> None:
    mine = collection()
    assert [(name, p.numel()) for name, p in mine.named_parameters()] == [("rows", 0)]
    assert mine.half().table("a").dtype == torch.float32
    assert mine.bfloat16().to(torch.float64).arenas[0].weights.dtype == torch.float32
    with pytest.raises(ConfigError, check=at("arena")):
        mine.to("meta")


def test_a_deep_copy_is_independent_and_alike() -> None:
    mine = collection()
    twin = copy.deepcopy(mine)
    jagged = random_jagged(NAMES, ROWS, 6)
    assert torch.equal(twin(jagged).pooled, mine(jagged).pooled)
    twin.table("a").zero_()
    assert mine.table("a").abs().sum() > 0
    twin(jagged).pooled.sum().backward()
    assert any(twin.pending.gradients())
    assert not any(mine.pending.gradients())


def test_memory_and_description() -> None:
    mine = collection()
    assert mine.memory_bytes() == 4 * (12 * 4 + 11 * 6)
    assert "b: 11 x 6 <- f1 (mean), f4 (sum)" in repr(mine)


@pytest.mark.parametrize(
    ("tables", "features", "place"),
    [
        ([TABLES[0], TABLES[0]], FEATURES[:1], ("tables", "the name 'a'")),
        (TABLES, [FEATURES[0], FEATURES[0]], ("features",)),
        (TABLES[:1], FEATURES[:2], ("feature 'f1'",)),
        ([], [], ("tables", "got none")),
    ],
)
def test_wrong_names_are_rejected(tables: list[TableSpec], features: list[FeatureSpec], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        EmbeddingCollection(tables, features)


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(ConfigError, check=at("table")):
        collection().table("d")
