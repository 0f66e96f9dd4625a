# SPDX-License-Identifier: Apache-2.0
"""Rows whose columns are on several ranks: together they move as in one process, by rules that take all columns."""

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient, RowRule, row_rule, row_update_, state_shapes
from terarec.ops.split_rows import split_row_update_, takes_whole_rows
from tests.errors import at
from tests.waiting import PATIENCE

ROWS, WIDTH, SIZE = 40, 36, 3
RULES = {
    "row-wise": lambda: row_rule("rowwise_adagrad", lr=0.05, eps=1e-4),
    "row-wise, regularised and clipped": lambda: row_rule(
        "rowwise_adagrad", lr=0.05, l1=0.01, l2=0.1, grad_scale=0.5, clip_value=0.9, clip_norm=1.5
    ),
    "Adam, clipped": lambda: row_rule("adam", lr=0.01, eps=1e-3, beta1=0.9, beta2=0.99, clip_norm=1.5),
    "Adam that catches up, clipped": lambda: row_rule(
        "adam", lr=0.01, eps=1e-3, beta1=0.9, beta2=0.99, clip_norm=1.5, mode="lazy_global"
    ),
}


class Threads:
    """Ranks as threads, each with an equal part of the columns of table "split"."""

    def __init__(self, *, is_exact: bool) -> None:
        self.widths: Mapping[str, int] = {"split": WIDTH}
        self.is_exact = is_exact
        self._rank = threading.local()
        self._held: dict[int, Mapping[str, Tensor]] = {}
        self._barrier = threading.Barrier(SIZE)

    def run(self, call: Callable[[int], None]) -> None:
        def on(rank: int) -> None:
            self._rank.number = rank
            call(rank)

        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(on, range(SIZE)))

    def parts(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        self._held[self._rank.number] = values
        self._barrier.wait(PATIENCE)
        found = {name: [self._held[rank][name] for rank in range(SIZE)] for name in values}
        self._barrier.wait(PATIENCE)
        return found

    def place(self, table: str) -> int:
        number: int = self._rank.number
        return number


def layout(width: int) -> BagLayout:
    return BagLayout(
        table_names=("other", "split"),
        table_base=(0, ROWS),
        table_rows=(ROWS, ROWS),
        feature_names=("a", "b"),
        feature_table=(0, 1),
        pooling=("none", "none"),
        width=width,
    )


def gradients(columns: slice) -> list[BagGradient]:
    """Return two gradients of repeated keys of both tables, of some columns."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(2):
        keys = torch.randint(ROWS, (50,), generator=generator)
        grad = torch.randn(50, WIDTH, generator=generator)[:, columns].contiguous()
        found.append(BagGradient(keys, torch.tensor([0, 20, 50]), grad, layout(grad.shape[1])))
    return found


def state_of(rule: RowRule, width: int) -> dict[str, Tensor]:
    shapes = state_shapes(rule.kind, 2 * ROWS, width, mode=rule.mode)
    return {name: torch.zeros(shape, dtype=torch.int32 if name == "last_update" else None) for name, shape in shapes}


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_columns_on_ranks_move_as_those_of_one_process(name: str, is_exact: bool) -> None:
    rule, rates = RULES[name](), torch.tensor([1.0, 0.7])
    first = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    whole, state = first.clone(), state_of(rule, WIDTH)
    for step in (1, 2):
        row_update_(whole, tuple(state.values()), gradients(slice(None)), rule, step=step, table_lr=rates)
    ranks = Threads(is_exact=is_exact)

    def on_rank(rank: int) -> None:
        columns = slice(rank * WIDTH // SIZE, (rank + 1) * WIDTH // SIZE)
        mine, held = first[:, columns].contiguous(), state_of(rule, WIDTH // SIZE)
        for step in (1, 2):
            others = split_row_update_(mine, held, gradients(columns), rule, ranks, step=step, table_lr=rates)
            assert others is not None
            assert others.tolist() == [1.0, 0.0]
        torch.testing.assert_close(mine[:ROWS], first[:ROWS, columns], rtol=0, atol=0)  # the other table
        most = 0.0 if is_exact else 1e-6
        torch.testing.assert_close(mine[ROWS:], whole[ROWS:, columns], rtol=most, atol=most)
        for tensor, expected in zip(held.values(), state.values(), strict=True):
            own = expected if expected.dim() == 1 else expected[:, columns]
            torch.testing.assert_close(tensor[ROWS:], own[ROWS:], rtol=most, atol=most)

    ranks.run(on_rank)


@pytest.mark.parametrize("is_exact", [False, True])
def test_frozen_columns_stay_and_leave_the_other_tables_to_the_caller(is_exact: bool) -> None:
    rule, rates = RULES["row-wise, regularised and clipped"](), torch.tensor([1.0, 0.0])
    rows, state = torch.ones(2 * ROWS, WIDTH), state_of(rule, WIDTH)
    ranks = Threads(is_exact=is_exact)  # which would wait for each other
    assert split_row_update_(rows, state, gradients(slice(None)), rule, ranks, step=1, table_lr=rates) is rates
    assert bool((rows == 1.0).all())


def test_which_rules_take_whole_rows_and_what_is_rejected() -> None:
    assert [takes_whole_rows(make()) for make in RULES.values()] == [True] * len(RULES)
    assert not takes_whole_rows(row_rule("adagrad", lr=0.1, clip_value=math.inf))
    rule = row_rule("rowwise_adagrad", lr=0.1, l2=0.1, mode="global")
    with pytest.raises(ConfigError, check=at("mode")):
        split_row_update_(torch.zeros(0, 2), {}, [], rule, Threads(is_exact=False), step=1)
