# SPDX-License-Identifier: Apache-2.0
"""Rows that do not lie in their order give the same bits as rows that do."""

import itertools

import pytest
import torch

from terarec.errors import ConfigError
from terarec.kernels.row_rules import RULE_KINDS
from terarec.ops.layout import found_rows, placed
from terarec.ops.row_update import row_gradient_norm, row_update_
from tests.errors import at
from tests.ops.bags import IMPLEMENTATIONS, make_layout
from tests.ops.rules import make_gradients, make_rule, make_state
from tests.params import in_every_run


def scattered(gradients, num_rows):
    """`gradients` with places in weights that hold some of the rows twice apart, and where each row lies."""
    place_of = torch.randperm(2 * num_rows, generator=torch.Generator().manual_seed(5))[:num_rows]
    moved = []
    for held in gradients:
        base = held.layout.array[:, 0].repeat_interleave(held.offsets[:: (len(held.offsets) - 1) // 4].diff())
        moved.append(held._replace(places=place_of[held.keys + base]))
    return moved, place_of


def apart(tensor, place_of):
    moved = torch.full((2 * len(tensor), *tensor.shape[1:]), 9, dtype=tensor.dtype)
    return moved.index_copy_(0, place_of, tensor)


FAST = [name for name in IMPLEMENTATIONS if name != "triton"]
MIXED = ("mean", "sum", "sqrtn", "max")
CASES = [
    (name, pooling, kind, mode)
    for name in FAST
    for pooling in ("sum", "none", MIXED)
    for kind, mode in [*((kind, "local") for kind in RULE_KINDS), ("adam", "lazy_global")]
]
# Triton's kernels are interpreted here, a second a case.
CASES += (
    [("triton", MIXED, "rowwise_adagrad", "local"), ("triton", "none", "adam", "lazy_global")]
    if "triton" in IMPLEMENTATIONS
    else []
)
EVERY = list(itertools.product(CASES, [torch.float32, torch.bfloat16]))
# Every second one: a kind of update meets either type of rows in one pooling or another. Triton's interpreter takes
# seconds for what tests/kernels/test_triton.py compares in every run.
QUICK = [case for number, case in enumerate(EVERY) if number % 4 in (0, 3) and case[0][0] != "triton"]


@pytest.mark.parametrize(("case", "dtype"), in_every_run(QUICK, EVERY))
def test_the_same_bits(case, dtype):
    implementation, pooling, kind, mode = case
    batch = 3 if implementation == "triton" else 70
    weights, gradients = make_gradients(8, pooling, batch, 3)
    weights = weights.to(dtype)
    rule = make_rule(kind, mode)
    state = make_state(rule, weights)
    placed, place_of = scattered(gradients, len(weights))
    far_weights, far_state = apart(weights, place_of), [apart(held, place_of) for held in state]
    table_lr = torch.tensor([0.5, 1.0, 0.0])
    norms = [
        row_gradient_norm(held, mine, rule, table_lr=table_lr, first_row=3, implementation=implementation)
        for held, mine in ((weights, gradients), (far_weights, placed))
    ]
    assert norms[0] == norms[1] > 0
    for step in (1, 4):
        for held, held_state, mine in ((weights, state, gradients), (far_weights, far_state, placed)):
            row_update_(
                held,
                tuple(held_state),
                mine,
                rule,
                step=step,
                table_lr=table_lr,
                rounding_seed=11,
                implementation=implementation,
            )
    for one, other in zip((weights, *state), (far_weights, *far_state), strict=True):
        assert torch.equal(other[place_of], one)
        nowhere = torch.ones(len(other), dtype=torch.bool)
        nowhere[place_of] = False
        assert bool((other[nowhere] == 9).all())


def test_layouts_of_found_rows_on_a_device_are_those_of_other_steps():
    layout = make_layout(8)
    few, many = (placed(layout, found_rows(torch.empty(rows, 8, device="meta"))) for rows in (3, 5000))
    assert few is many
    assert few.num_rows == 0
    assert few.by_key is few.by_key
    assert placed(layout, found_rows(torch.empty(3, 8))).num_rows == 3


def test_a_place_outside_the_weights_is_rejected():
    weights, gradients = make_gradients(8, "sum", 5, 2)
    wrong = gradients[0]._replace(places=torch.full_like(gradients[0].keys, len(weights)))
    with pytest.raises(ConfigError, check=at("places")):
        row_update_(weights, (), [wrong], make_rule("sgd"), step=1)
    with pytest.raises(ConfigError, check=at("places")):
        row_update_(weights, (), [gradients[0], wrong], make_rule("sgd"), step=1)
    state = make_state(make_rule("adam", "global"), weights)
    with pytest.raises(ConfigError, check=at("mode")):
        row_update_(
            weights, state, [gradients[0]._replace(places=gradients[0].keys)], make_rule("adam", "global"), step=1
        )
