# SPDX-License-Identifier: Apache-2.0
"""The tables of the compiled core, without TensorFlow: both ways to merge gradients, and updates of rows."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from terarec.kernels.cpu import _tensorflow as core

SUM, MEAN, NONE, SQRTN = range(4)
NO_WEIGHTS = np.zeros(0, np.float32)
SGD = np.array([0.5, *[0.0] * (len(core.number_names()) - 1)])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    core.set_threads(0)


ZEROS, INSERT, ADMIT = range(3)


def table(
    rows: int | None, width: int, most: int = 10_000, *, forgets: bool = False, admitted: float = 1.0
) -> core.Table:
    made, _ = core.new_table(
        "t", width, -1 if rows is None else rows, most, 0.25, 0.0, False, 0, forgets, False, admitted
    )
    return made


def rows_of(own: core.Table, ids: list[int], absent: int = INSERT) -> NDArray[np.float32]:
    return own.lookup(np.array(ids, np.int64), np.zeros(0, np.int64), NO_WEIGHTS, NONE, absent)[0]


def bags(rng: np.random.Generator, ids: int) -> NDArray[np.int64]:
    """Where the bags of so many ids begin and end; some are empty."""
    cuts = np.sort(rng.integers(0, ids + 1, ids // 3))
    return np.concatenate([[0], cuts, [ids]])


def expected_sums(
    ids: NDArray[np.int64],
    splits: NDArray[np.int64],
    weights: NDArray[np.float32],
    grad: NDArray[np.float32],
    pooling: int,
) -> dict[int, NDArray[np.float64]]:
    factors = weights.astype(np.float64) if len(weights) else np.ones(len(ids))
    sums: dict[int, NDArray[np.float64]] = {}
    for bag in range(len(splits) - 1):
        at = slice(splits[bag], splits[bag + 1])
        part = factors[at]
        divisor = {SUM: 1.0, MEAN: part.sum(), SQRTN: np.sqrt((part**2).sum())}[pooling]
        for key, factor in zip(ids[at].tolist(), part, strict=True):
            sums[key] = sums.get(key, 0.0) + factor / divisor * grad[bag].astype(np.float64)
    return sums


# Few ids of a large table are grouped by an index, many of a small one by ranges of rows.
@pytest.mark.parametrize(("rows", "ids"), [(5, 1), (7, 400), (3000, 2000), (70_000, 9000), (70_000, 300)])
@pytest.mark.parametrize("pooling", [SUM, MEAN, SQRTN])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_merged_gradients_are_the_sums_of_each_id(rows: int, ids: int, pooling: int, is_weighted: bool) -> None:
    rng, width = np.random.default_rng(rows + ids), 20
    keys, splits = rng.integers(0, rows, ids) // 3, bags(rng, ids)
    weights = rng.uniform(0.5, 2.0, ids).astype(np.float32) if is_weighted else NO_WEIGHTS
    grad = rng.normal(size=(len(splits) - 1, width)).astype(np.float32)
    expected = expected_sums(keys, splits, weights, grad, pooling)
    growing, results = table(None, width, most=rows), []
    names = keys * 2**40 - 7
    growing.lookup(names[: ids // 2 + 1], np.array([0, ids // 2 + 1]), NO_WEIGHTS, SUM, INSERT)
    known = set(names[: ids // 2 + 1].tolist())
    for threads in (1, 2, 5):
        core.set_threads(threads)
        merged, sums = table(rows, width).merge(keys, splits, weights, grad, pooling)
        assert sorted(merged.tolist()) == sorted(expected)
        np.testing.assert_allclose(sums, [expected[key] for key in merged.tolist()], rtol=1e-4, atol=1e-5)
        results.append(sums[np.argsort(merged)])
        merged, sums = growing.merge(names, splits, weights, grad, pooling)
        assert set(merged.tolist()) == known
        np.testing.assert_allclose(sums, [expected[(key + 7) >> 40] for key in merged.tolist()], rtol=1e-4, atol=1e-5)
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


@pytest.mark.parametrize(("rows", "ids"), [(50, 400), (5000, 3)])
def test_rows_without_pooling_have_a_gradient_each(rows: int, ids: int) -> None:
    rng = np.random.default_rng(1)
    keys, grad = rng.integers(0, rows, ids), rng.normal(size=(ids, 3)).astype(np.float32)
    merged, sums = table(rows, 3).merge(keys, np.zeros(0, np.int64), NO_WEIGHTS, grad, NONE)
    expected = np.zeros((rows, 3))
    np.add.at(expected, keys, grad)
    found = np.zeros((rows, 3))
    found[merged] = sums
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 9000])
@pytest.mark.parametrize("repeats", [False, True])
def test_each_row_is_updated_once_by_the_sum_of_its_gradients(rows: int, repeats: bool) -> None:
    ids = np.array([3, 7, 0, 3 if repeats else 1])
    grad = np.arange(8, dtype=np.float32).reshape(4, 2)
    own = table(rows, 2)
    own.apply(ids, grad, SGD, 1, core.rule_number("sgd"))
    expected = np.zeros((rows, 2))
    np.add.at(expected, ids, -0.5 * grad)
    np.testing.assert_array_equal(own.read()[1], expected)
    for wrong in (rows, -1):
        with pytest.raises(ValueError, match=f"ids: got {wrong} at position 1"):
            own.apply(np.array([0, wrong]), grad[:2], SGD, 1, core.rule_number("sgd"))
    np.testing.assert_array_equal(own.read()[1], expected)


def test_new_ids_get_rows_and_states_and_are_refused_when_it_is_full() -> None:
    own = table(None, 2, most=3)
    own.have_states(1, 0.5)
    own.change(np.array([9, -4]), np.ones((2, 2), np.float32), 0)
    np.testing.assert_array_equal(rows_of(own, [9, 5, 9]), [[1, 1], [0.25, 0.25], [1, 1]])
    with pytest.raises(MemoryError, match="is full"):
        rows_of(own, [5, 6])
    ids, rows, (states,), *_ = own.read()
    assert ids.tolist() == [9, -4, 5]
    np.testing.assert_array_equal(rows, [[1, 1], [1, 1], [0.25, 0.25]])
    np.testing.assert_array_equal(states, np.full((3, 2), 0.5))
    np.testing.assert_array_equal(rows_of(own, [6], ZEROS), [[0, 0]])
    with pytest.raises(ValueError, match="expected ids that variable 't' has"):
        own.apply(np.array([6]), np.ones((1, 2), np.float32), SGD, 1, core.rule_number("sgd"))
    nothing = np.zeros((0, 2), np.float32)
    with pytest.raises(MemoryError, match="is full"):
        own.replace(np.arange(4), np.ones((4, 2), np.float32), [], np.zeros(0, np.int64), None)
    assert own.size() == 3
    own.replace(np.zeros(0, np.int64), nothing, [nothing], np.zeros(0, np.int64), None)
    assert own.size() == 0


def test_offsets_that_do_not_fit_are_refused() -> None:
    own = table(4, 2)
    for splits in ([0, 2], [1, 3], [0, 5, 3], []):
        with pytest.raises(ValueError, match="row_splits"):
            own.lookup(np.array([0, 1, 2]), np.array(splits, np.int64), NO_WEIGHTS, SUM, INSERT)


def test_a_full_table_that_forgets_gives_new_ids_the_rows_of_the_oldest() -> None:
    own, states = table(None, 2, most=4, forgets=True), 1
    own.have_states(states, 0.5)
    expected: dict[int, float] = {}  # the oldest first
    rng = np.random.default_rng(3)
    for step in range(60):
        ids = rng.choice(np.array([-5, 0, 3, 8, 2**40, 9]), rng.integers(1, 4), replace=False).tolist()
        found, gone, gone_rows = own.lookup(np.array(ids), np.zeros(0, np.int64), NO_WEIGHTS, NONE, INSERT)
        np.testing.assert_array_equal(found[:, 0], [expected.get(one, 0.25) for one in ids])
        for one in ids:
            expected[one] = expected.pop(one, 0.25)
        oldest = list(expected)[: max(0, len(expected) - 4)]
        # Rows that came in one call are equally old.
        assert len(gone) == len(oldest)
        np.testing.assert_array_equal(gone_rows[:, 0], [expected.pop(one) for one in gone.tolist()])
        assert not set(gone.tolist()) & set(ids)
        newer = [when for one, when in expected.items() if one not in ids]
        assert max(gone_rows[:, 0], default=-1) <= min(newer, default=step)
        own.change(np.array(ids), np.full((len(ids), 2), step, np.float32), 0)
        own.set_state(0, np.array(ids), np.full((len(ids), 2), -step, np.float32))
        for one in ids:
            expected[one] = step
        names, rows, (state,), *_ = own.read()
        assert sorted(names.tolist()) == sorted(expected)
        np.testing.assert_array_equal(rows[:, 0], [expected[one] for one in names.tolist()])
        np.testing.assert_array_equal(state, -rows)
    with pytest.raises(MemoryError, match="is full"):
        rows_of(own, [10, 11, 12, 13, 14])
    assert own.size() == 4
    # A gradient of an id that has lost its row since is left out.
    names = own.read()[0]
    own.apply(np.array([77, names[0]]), np.ones((2, 2), np.float32), SGD, 1, core.rule_number("sgd"))
    np.testing.assert_array_equal(rows_of(own, [int(names[0])]), [[expected[int(names[0])] - 0.5] * 2])


def test_a_table_that_forgets_knows_what_changed_since_a_time() -> None:
    own = table(None, 1, forgets=True)
    rows_of(own, [1, 2, 3])
    time.sleep(0.002)
    between = time.time_ns() // 1000
    rows_of(own, [3, 9, 3])
    rows_of(own, [1], ZEROS)
    assert sorted(own.since(between)[0].tolist()) == [3, 9]
    assert sorted(own.since(0)[0].tolist()) == [1, 2, 3, 9]
    with pytest.raises(ValueError, match="knows no times"):
        table(None, 1).since(0)


def test_an_id_is_admitted_with_its_chance() -> None:
    own = table(None, 1, most=100_000, admitted=0.25, forgets=True)
    rows_of(own, list(range(1000)))
    ids = list(range(20_000))
    rows = rows_of(own, ids + ids, ADMIT)[:, 0]
    np.testing.assert_array_equal(rows[:20_000], rows[20_000:])
    assert (rows[:1000] == 0.25).all()
    new = rows[1000:20_000]
    assert set(new.tolist()) == {0.0, 0.25}
    assert abs((new > 0).mean() - 0.25) < 0.02  # 6 standard deviations
    assert own.size() == 1000 + int((new > 0).sum())
    again = rows_of(own, ids, ADMIT)[1000:, 0]
    assert (again[new > 0] == 0.25).all()
    assert (again[new == 0] > 0).any()
    assert (rows_of(table(None, 1, admitted=0.0), ids, ADMIT) == 0).all()
