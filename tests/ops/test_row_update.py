# SPDX-License-Identifier: Apache-2.0
"""`row_update_`: every implementation against the plain one, torch's optimizers and the contract."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.row_rules import RULE_KINDS
from terarec.ops import BagLayout
from terarec.ops.row_update import BagGradient, row_rule, row_update_, state_shapes
from tests.errors import at
from tests.ops.bags import IMPLEMENTATIONS, make_layout, make_lookup, one_feature
from tests.ops.hosts import SETS, on_every_host
from tests.ops.rules import make_gradients, make_rule, make_state
from tests.params import in_every_run, paired

POOLINGS = ["sum", "none", ("mean", "sum", "sqrtn", "max")]


def updated(weights, gradients, kind, implementation, mode="local"):
    rule = make_rule(kind, mode)
    weights = weights.clone()
    state = make_state(rule, weights)
    for step in (1, 4):
        row_update_(weights, state, gradients, rule, step=step, implementation=implementation)
    return weights, state


RARE = list(product([3, 8, 16, 17, 32, 128, 130, 256], RULE_KINDS, POOLINGS))


@pytest.mark.parametrize(
    ("width", "kind", "pooling"), [*paired([1, 64, 127], RULE_KINDS, POOLINGS), *in_every_run([], RARE)]
)
def test_equals_the_plain_kernel(select, width, pooling, kind):
    for batch, hotness in [(0, 1), (1, 3), (7, 4), (65, 1)]:
        weights, gradients = make_gradients(width, pooling, batch, hotness)
        expected = updated(weights, gradients, kind, "ref")
        for name in SETS:
            select(name)
            torch.testing.assert_close(updated(weights, gradients, kind, "cpu"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "kind", "pooling"), paired([1, 17, 64, 128], RULE_KINDS, POOLINGS))
def test_the_same_bits_on_every_instruction_set_and_thread_count(width, pooling, kind):
    weights, gradients = make_gradients(width, pooling, 900, 4)
    results = on_every_host(lambda: updated(weights, gradients, kind, "cpu"), threads=(1, 2, 5))
    assert not torch.equal(results[0][0], weights)
    for moved, state in results[1:]:
        assert torch.equal(moved, results[0][0])
        assert all(torch.equal(one, other) for one, other in zip(state, results[0][1], strict=True))


@pytest.mark.parametrize("rows", [50, 3000, 100_000])
@pytest.mark.parametrize("hotness", [1, 7])
def test_large_and_small_tables_take_every_way_of_grouping(rows, hotness):
    layout = copy.copy(make_layout(64))
    object.__setattr__(layout, "table_rows", (rows, 13, 1))
    object.__setattr__(layout, "table_base", (0, rows, rows + 13))
    held = make_lookup(layout, 300, hotness)
    gradient = BagGradient(held.keys, held.offsets, torch.randn(300, 256), layout)
    moved, _ = updated(held.weights, [gradient], "adagrad", "cpu")
    expected, _ = updated(held.weights, [gradient], "adagrad", "ref")
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)
    untouched = torch.ones(held.weights.shape[0], dtype=torch.bool)
    features = torch.arange(4 * 300).repeat_interleave(held.offsets.diff()) // 300
    untouched[layout.array[features, 0] + held.keys] = False
    assert torch.equal(moved[untouched], held.weights[untouched])


@pytest.mark.parametrize("rows", [50, 3000, 100_000])
def test_gradients_of_a_row_are_added_in_the_order_of_the_batch(set_threads, rows):
    """A third number is lost when added to either of two large ones, unless these have met before."""
    batch, width = 600, 16
    layout = one_feature(rows, width)
    keys = (torch.arange(batch) // 3 % 40 + 8) * (rows // 50)
    keys[:6] = torch.tensor([7, 1, 7, 2, 7, 3])
    grad = torch.ones(batch, width)
    grad[0], grad[2] = 2.0**30, -(2.0**30)
    for count in (1, 2):
        set_threads(count)
        weights = torch.zeros(rows, width)
        gradient = BagGradient(keys, torch.arange(batch + 1), grad, layout)
        row_update_(weights, [], [gradient], row_rule("sgd", lr=1.0), step=1, implementation="cpu")
        assert torch.equal(weights[7], torch.full((width,), -1.0))
        assert weights.sum() == -width * float((keys != 7).sum() + 1)


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.05)),
        ("adagrad", lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-3)),
        ("adam", lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05, betas=(0.9, 0.99), eps=1e-12)),
    ],
)
def test_equals_torch_with_its_optimizer(implementation, mode, kind, optimizer):
    layout = make_layout(16, mode)
    batch = 21
    held = make_lookup(layout, batch, 3)
    bags = nn.EmbeddingBag.from_pretrained(
        held.weights.clone(), mode=mode, sparse=True, freeze=False, include_last_offset=True
    )
    theirs = optimizer(bags.parameters())
    rule = make_rule(kind, eps=1e-12 if kind == "adam" else 1e-3)
    weights = held.weights.clone()
    state = tuple(torch.zeros(shape) for _, shape in state_shapes(kind, *weights.shape))
    for step in range(1, 4):
        one = make_lookup(layout, batch, 3, seed=step)
        grad = torch.randn(batch, 4 * 16, generator=torch.Generator().manual_seed(step))
        base = layout.array[:, 0].repeat_interleave(one.offsets[::batch].diff())
        pooled = bags(one.keys + base, one.offsets).reshape(4, batch, 16).transpose(0, 1).reshape(batch, -1)
        theirs.zero_grad()
        pooled.backward(grad)
        theirs.step()
        gradient = BagGradient(one.keys, one.offsets, grad, layout)
        row_update_(weights, state, [gradient], rule, step=step, implementation=implementation)
        torch.testing.assert_close(weights, bags.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_adam_equals_dense_adam_where_all_rows_are_touched(implementation):
    layout = make_layout(8)
    weights = torch.randn(layout.num_rows, 8)
    keys = torch.cat(
        [torch.arange(1000), torch.arange(13).repeat(77)[:1000], torch.arange(1000), torch.zeros(1000).long()]
    )
    offsets = torch.arange(4001)
    dense = nn.Parameter(weights.clone())
    theirs = torch.optim.Adam([dense], lr=0.05, betas=(0.9, 0.99), eps=1e-3)
    state = tuple(torch.zeros(shape) for _, shape in state_shapes("adam", *weights.shape))
    for step in (1, 2, 3):
        grad = torch.randn(1000, 32)
        dense.grad = torch.zeros_like(dense)
        per_key = grad.reshape(1000, 4, 8).transpose(0, 1).reshape(-1, 8)
        dense.grad.index_add_(0, keys + layout.array[:, 0].repeat_interleave(1000), per_key)
        theirs.step()
        gradient = BagGradient(keys, offsets, grad, layout)
        row_update_(weights, state, [gradient], make_rule("adam"), step=step, implementation=implementation)
        torch.testing.assert_close(weights, dense.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_key_changes_nothing(implementation, which):
    weights, gradients = make_gradients(16, "sum", 40, 1)
    gradients[which].keys[57 if which else 3] = 5000
    before = weights.clone()
    state = (torch.ones_like(weights),)
    with pytest.raises(KeyOutOfRangeError, check=at(f"feature '{'ab'[which]}'", "got key 5000")):
        row_update_(weights, state, gradients, make_rule("adagrad"), step=1, implementation=implementation)
    assert torch.equal(weights, before)
    assert torch.equal(state[0], torch.ones_like(weights))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_not_a_number_passes_through_to_its_row_alone(implementation):
    weights, gradients = make_gradients(16, "sum", 40, 1)
    gradients[0].grad[5, 3] = float("nan")
    moved, _ = updated(weights, gradients, "sgd", implementation)
    key = int(gradients[0].keys[5])
    assert moved[key].isnan().nonzero().tolist() == [[3]]
    assert int(moved.isnan().sum()) == 1


@pytest.mark.parametrize(
    "implementation", in_every_run([name for name in IMPLEMENTATIONS if name != "triton"], IMPLEMENTATIONS)
)
def test_gradients_with_gaps_are_read_right(implementation):
    weights, gradients = make_gradients(16, "sum", 40, 2)
    expected, _ = updated(weights, gradients, "sgd", "ref")
    padded = [torch.nn.functional.pad(held.grad, (3, 5))[:, 3:-5] for held in gradients]
    strided = [held.grad.t().contiguous().t() for held in gradients]
    for grads in (padded, strided):
        held = [
            BagGradient(one.keys, one.offsets, grad, one.layout) for one, grad in zip(gradients, grads, strict=True)
        ]
        moved, _ = updated(weights, held, "sgd", implementation)
        torch.testing.assert_close(moved, expected)
    ones = [
        BagGradient(held.keys, held.offsets, torch.ones(()).expand_as(held.grad), held.layout) for held in gradients
    ]
    solid = [BagGradient(held.keys, held.offsets, torch.ones_like(held.grad), held.layout) for held in gradients]
    torch.testing.assert_close(
        updated(weights, ones, "sgd", implementation)[0], updated(weights, solid, "sgd", "ref")[0]
    )


def test_what_does_not_fit_is_rejected():
    weights, gradients = make_gradients(16, "sum", 4, 1)
    state = (torch.zeros_like(weights),)
    rule = make_rule("adagrad")
    with pytest.raises(ConfigError, check=at("state")):
        row_update_(weights, (), gradients, rule, step=1)
    with pytest.raises(ConfigError, check=at("step")):
        row_update_(weights, state, gradients, rule, step=0)
    short = BagGradient(gradients[0].keys, gradients[0].offsets, gradients[0].grad[:3], gradients[0].layout)
    with pytest.raises(ConfigError, check=at("grad")):
        row_update_(weights, state, [short], rule, step=1)
    with pytest.raises(ConfigError, check=at("RowRule.kind")):
        state_shapes("adadelta", 1, 1)


def test_no_gradient_changes_nothing():
    weights = torch.randn(1014, 16)
    before = weights.clone()
    row_update_(weights, (), [], make_rule("sgd"), step=1)
    assert torch.equal(weights, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [2, 3])
def test_an_empty_table_is_not_confused_with_the_table_at_its_row(implementation, rows):
    layout = BagLayout(
        table_names=("s", "t"),
        table_base=(0, 0),
        table_rows=(0, rows),
        feature_names=("f", "g"),
        feature_table=(0, 1),
        pooling=("sum", "sum"),
        width=4,
    )
    weights = torch.ones(rows, 4)
    nothing = BagGradient(
        torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.ones(1, 8), layout
    )
    rule = row_rule("sgd", lr=0.5, mode="global", l2=1.0)
    row_update_(weights, (), [nothing], rule, step=1, implementation=implementation)
    assert torch.equal(weights, torch.full((rows, 4), 0.5))


def test_autograd_sees_that_the_rows_changed():
    weights, gradients = make_gradients(16, "sum", 4, 1)
    held = weights.requires_grad_() * 1.0
    product = held * held
    row_update_(held, (), gradients, make_rule("sgd"), step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
