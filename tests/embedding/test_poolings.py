# SPDX-License-Identifier: Apache-2.0
"""Every pooling, first keys, key weights and narrow rows through a collection, against torch's own layers."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from terarec.batch import Jagged, first_keys
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec
from terarec.spec.tables import RowType
from tests.embedding.plain import PlainCollection, random_jagged

NAMES, ROWS = ("f0", "f1", "f2", "f3", "f4"), (7, 11, 7, 11, 7)
TABLES = [TableSpec(name="a", rows=7, width=4), TableSpec(name="b", rows=11, width=6)]
FEATURES = [
    FeatureSpec(name="f0", table="a", pooling="max"),
    FeatureSpec(name="f1", table="b", pooling="sqrtn", max_keys=2),
    FeatureSpec(name="f2", table="a", pooling="none", max_keys=1),
    FeatureSpec(name="f3", table="b", pooling="mean"),
    FeatureSpec(name="f4", table="a", pooling="sum", max_keys=3),
]
LIMITS = (None, 2, 1, None, 3)


def test_equals_torch_forward_and_after_a_step() -> None:
    mine = EmbeddingCollection(TABLES, FEATURES)
    plain = PlainCollection(mine)
    jagged = random_jagged(NAMES, ROWS, 13, most=5)
    cut = first_keys(jagged, LIMITS)
    out, (pooled, sequences) = mine(jagged), plain(cut)
    torch.testing.assert_close(out.pooled, pooled)
    torch.testing.assert_close(out.sequences["f2"].values, sequences["f2"])
    assert out.sequences["f2"].offsets.diff().max() == 1
    grad, of_sequence = torch.randn_like(pooled), torch.randn_like(sequences["f2"])
    torch.autograd.backward([out.pooled, out.sequences["f2"].values], [grad, of_sequence])
    torch.autograd.backward([pooled, sequences["f2"]], [grad, of_sequence])
    RowOptimizer(mine, SGDSpec(lr=0.5)).step()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for name in "ab":
        torch.testing.assert_close(mine.table(name), plain.weights[name].detach())


def weighted(jagged: Jagged, learned: bool = False) -> Jagged:
    weights = torch.rand(jagged.keys.numel(), generator=torch.Generator().manual_seed(3)) + 0.5
    return replace(jagged, weights=weights.requires_grad_(learned))


def by_hand(mine: EmbeddingCollection, jagged: Jagged, rows: Mapping[str, Tensor]) -> Tensor:
    """The pooled columns of a batch whose weights count for all but the maximum."""
    assert jagged.weights is not None
    size, columns = jagged.batch_size, []
    for position, feature in enumerate(mine.features):
        bags = []
        for bag in range(position * size, (position + 1) * size):
            part = slice(int(jagged.offsets[bag]), int(jagged.offsets[bag + 1]))
            vectors, factors = rows[feature.table][jagged.keys[part]], jagged.weights[part]
            total = (factors[:, None] * vectors).sum(dim=0)
            if vectors.shape[0] == 0 or feature.pooling == "none":
                bags.append(torch.zeros(vectors.shape[1]))
            elif feature.pooling == "max":
                bags.append(vectors.amax(dim=0))
            else:
                divisor = {"sum": 1.0, "mean": factors.sum(), "sqrtn": factors.square().sum().sqrt()}
                bags.append(total / divisor[feature.pooling])
        if feature.pooling != "none":
            columns.append(torch.stack(bags))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_key_weights_count_learn_and_reach_the_rows(training: bool, learned: bool) -> None:
    mine = EmbeddingCollection(TABLES, FEATURES).train(training)
    jagged = random_jagged(NAMES, ROWS, 9, most=5)
    given, theirs = weighted(jagged, learned), weighted(jagged, learned=True)
    rows = {name: nn.Parameter(mine.table(name).clone()) for name in "ab"}
    expected = by_hand(mine, first_keys(theirs, LIMITS), rows)
    pooled = mine(given).pooled
    torch.testing.assert_close(pooled, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    pooled.backward(grad)
    if learned:
        assert given.weights is not None
        assert theirs.weights is not None
        torch.testing.assert_close(given.weights.grad, theirs.weights.grad)
    RowOptimizer(mine, SGDSpec(lr=1.0)).step()
    for name, row in rows.items():
        assert row.grad is not None
        torch.testing.assert_close(mine.table(name).detach(), row.detach() - row.grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_tables_give_float32_and_share_no_arena_with_wide_ones(dtype: RowType) -> None:
    tables = [TABLES[0], replace(TABLES[1], dtype=dtype), TableSpec(name="c", rows=7, width=6)]
    mine = EmbeddingCollection(tables, [*FEATURES, FeatureSpec(name="f5", table="c")])
    assert [(arena.width, arena.dtype) for arena in mine.arenas] == [
        (4, torch.float32),
        (6, getattr(torch, dtype)),
        (6, torch.float32),
    ]
    jagged = random_jagged((*NAMES, "f5"), (*ROWS, 7), 5)
    pooled = mine(jagged).pooled
    wide = EmbeddingCollection([replace(table, dtype="float32") for table in tables], mine.features)
    wide.load_state_dict({name: rows.float() for name, rows in mine.state_dict().items()})
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, wide(jagged).pooled)
    assert mine.half().table("b").dtype == getattr(torch, dtype)
    assert mine(jagged).pooled.dtype == torch.float16
    mine.float().load_state_dict(wide.state_dict())
    assert torch.equal(mine(jagged).pooled, pooled)
