# SPDX-License-Identifier: Apache-2.0
"""What every fitted step keeps to: blocks, threads and files change nothing, and only training rows teach."""

import numpy as np
import pytest

from terarec.etl.columns import Rows, concatenate_rows, flat, is_list, kind_of, numpy_values
from terarec.etl.ops import (
    Bucketize,
    Categorify,
    DropLowCardinality,
    FillMissing,
    JoinGroupby,
    LogOp,
    Normalize,
    NormalizeMinMax,
    Operator,
    TargetEncoding,
)
from tests.etl.column_values import column_of, values_of
from tests.etl.ops.fitting import apply, blocks_of, files_of, fit, run_record_functions, saved, types_of

STEPS: list[Operator] = [
    Categorify(columns=("t", "i"), min_count=3),
    Categorify(columns=("h", "hs"), hash_buckets=4, max_size=9, joint=True),
    Normalize(columns=("x", "i")),
    Normalize(columns=("xs",)),
    NormalizeMinMax(columns=("x", "i")),
    LogOp(columns=("x", "i"), shift=None),
    FillMissing(columns=("x", "i"), median=True, indicator=True),
    Bucketize(columns=("x", "i"), intervals=7),
    TargetEncoding(columns=("t", "i", "h", "d"), target="y", outputs=("te", "ie", "he", "de")),
    JoinGroupby(columns=("t", "d"), values=("x", "i"), statistics=("count", "sum", "mean", "std", "min", "max")),
    JoinGroupby(columns=("h",)),
    DropLowCardinality(columns=("t", "c"), min_distinct=3),
]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.kind}-{'-'.join(step.columns)}")


def rows(number: int, seed: int = 5) -> Rows:
    """Rows of every kind, a fifth of the values missing."""
    generator = np.random.default_rng(seed)

    def some(values: list, missing: float = 0.2) -> list:
        return [None if generator.random() < missing else value for value in values]

    skewed = (generator.pareto(1.0, number) * 3).astype(int).tolist()
    lists = [[] if n == 0 else some(generator.integers(0, 40, n).tolist()) for n in generator.integers(0, 4, number)]
    columns = {
        "t": column_of("text", some([f"v{value % 50}" for value in skewed])),
        "i": column_of("integer", some([value - 20 for value in skewed])),
        "h": column_of("hex32", some([value * 2654435761 % 2**32 for value in skewed])),
        "hs": column_of("hex32", lists, is_list=True),
        "d": column_of("id", [value % 30 for value in skewed]),
        "c": column_of("text", some(["only"] * number)),
        "x": column_of("number", some((generator.standard_normal(number) * 1000 + 7e5).tolist())),
        "xs": column_of("number", [[float(value or 0) for value in items] for items in lists], is_list=True),
        "y": column_of("number", some(generator.random(number).tolist(), 0.1)),
    }
    split = generator.choice(3, number, p=[0.7, 0.2, 0.1]).astype(np.uint8)
    return Rows(columns, np.arange(number, dtype=np.int64) * 3 + 11, split)


def same(block: Rows, other: Rows, names: tuple[str, ...]) -> None:
    assert list(block.columns) == list(other.columns)
    for name in set(names) & set(block.columns):
        assert values_of(block.columns[name]) == values_of(other.columns[name])


@every_step
def test_blocks_and_threads_change_no_bit(step: Operator) -> None:
    whole = rows(200)
    state = fit(step, [whole])
    expected = step.transform(whole, state)
    for size, threads in ((1, 1), (37, 4), (100, 2)):
        blocks = blocks_of(whole, size)
        other = fit(step, blocks, threads=threads)
        assert files_of(other) == files_of(state)
        same(apply(step, other, blocks), expected, step.writes)


@every_step
def test_plain_values_become_what_rows_outside_training_become(step: Operator) -> None:
    code, state = step, fit(step, [rows(300)])
    later = rows(60, seed=7)
    block = Rows(later.columns, later.ids)
    expected = {name: values_of(column) for name, column in code.transform(block, state).columns.items()}
    for part in (block, *blocks_of(block.slice(0, 9), 1)):
        for name, values in run_record_functions(code, state, part):
            first = int(part.ids[0] - block.ids[0]) // 3
            assert values == expected[name][first : first + part.num_rows], name


@every_step
def test_a_saved_state_behaves_the_same(step: Operator) -> None:
    whole, code = rows(300), step
    state = fit(step, [whole])
    again = saved(code, state)
    assert files_of(again) == files_of(state)
    same(code.transform(rows(200, seed=6), again), code.transform(rows(200, seed=6), state), step.writes)
    assert code.cardinalities({}, again) == code.cardinalities({}, state)


@every_step
def test_only_training_rows_teach(step: Operator) -> None:
    whole, others = rows(300), rows(300, seed=99)
    assert whole.split is not None
    teaches = whole.split == 0
    columns = {}
    for name, column in whole.columns.items():
        kept = [
            a if train else b
            for a, b, train in zip(values_of(column), values_of(others.columns[name]), teaches, strict=True)
        ]
        columns[name] = column_of(kind_of(column), kept, is_list=is_list(column))
    changed = Rows(columns, whole.ids, whole.split)
    assert files_of(fit(step, [changed])) == files_of(fit(step, [whole]))


@every_step
def test_declares_its_types(step: Operator) -> None:
    whole, code = rows(50), step
    made = code.transform(whole, fit(step, [whole]))
    foretold = code.output_types(types_of(whole))
    assert set(foretold) == set(step.writes)
    for name, found in foretold.items():
        assert (found.kind, found.is_list) == (kind_of(made.columns[name]), is_list(made.columns[name]))


@every_step
def test_ids_lie_below_the_cardinality(step: Operator) -> None:
    whole, code = rows(400), step
    state = fit(step, [whole])
    made = code.transform(concatenate_rows([whole, rows(400, seed=8)]), state)
    for name, cardinality in code.cardinalities({}, state).items():
        ids = numpy_values(flat(made.columns[name]))
        assert 0 <= ids.min() <= ids.max() < cardinality


@every_step
def test_learning_from_nothing_still_encodes(step: Operator) -> None:
    code = step
    state = fit(step, [rows(0)])
    made = code.transform(rows(20), saved(code, state))
    assert made.num_rows == 20
