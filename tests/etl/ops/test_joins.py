# SPDX-License-Identifier: Apache-2.0
"""Target encodings, group figures, side tables and dropped columns against plain Python."""

import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError, FormatError, StorageError
from terarec.etl.columns import ColumnType, Rows
from terarec.etl.ops import DropLowCardinality, JoinGroupby, JoinTable, TargetEncoding
from terarec.etl.values import encoding_bytes
from tests.errors import at
from tests.etl.column_values import block_of, column_of, values_of
from tests.etl.ops.fitting import blocks_of, files_of, fit, saved, types_of
from tests.kernels.plain_encoding import xxh64_int64
from tests.params import examples

KEYS = {
    "text": st.none() | st.sampled_from(["a", "b", "\u00fc"]),
    "integer": st.none() | st.sampled_from([0, 7, -7]),
    "hex32": st.none() | st.sampled_from([0, 1, 2**32 - 1]),
    "id": st.integers(0, 3),
}
TARGETS = st.none() | st.sampled_from([0.0, 1.0, 0.25, -3.5])
KINDS = pytest.mark.parametrize("kind", KEYS)


def same_key(kind, key):
    """A key as groups see it: id 0 is missing."""
    return None if kind == "id" and key == 0 else key


def encoding_of(step, rows, key, left_out):
    """The encoding of `key`, from (key, fold, target) of the training rows, without those of the fold `left_out`."""
    used = [(other, target) for other, fold, target in rows if target is not None and fold != left_out]
    prior = sum(target for _, target in used) / len(used) if used else 0.0
    own = [target for other, target in used if other == key]
    weight = len(own) + step.smoothing
    return (sum(own) + step.smoothing * prior) / weight if weight else prior


@KINDS
@settings(max_examples=examples(40))
@given(data=st.data())
def test_target_encoding(kind, data):
    number = data.draw(st.integers(0, 25))

    def drawn(values):
        return data.draw(st.lists(values, min_size=number, max_size=number))

    keys, targets, split = drawn(KEYS[kind]), drawn(TARGETS), drawn(st.integers(0, 2))
    folds, smoothing = data.draw(st.integers(2, 4)), data.draw(st.sampled_from([0.0, 1.0, 20.0]))
    step = TargetEncoding(columns=("k",), target="y", folds=folds, smoothing=smoothing, outputs=("e",), seed=7)
    columns = {"k": column_of(kind, keys), "y": column_of("number", targets)}
    block = Rows(columns, np.arange(number) * 5 + 2, np.array(split, dtype=np.uint8))
    code = step
    state = fit(step, blocks_of(block, 6))
    fold_of = [int(hashed) % folds for hashed in xxh64_int64(block.ids, 7)]
    train = [
        (same_key(kind, key), fold, target)
        for key, fold, target, part in zip(keys, fold_of, targets, split, strict=True)
        if part == 0
    ]
    expected = [
        encoding_of(step, train, same_key(kind, key), fold if part == 0 else None)
        for key, fold, part in zip(keys, fold_of, split, strict=True)
    ]
    assert values_of(code.transform(block, state).columns["e"]) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    served = Rows({"k": columns["k"]}, block.ids)
    alone = [encoding_of(step, train, same_key(kind, key), None) for key in keys]
    assert values_of(code.transform(served, saved(code, state)).columns["e"]) == pytest.approx(
        alone, rel=1e-12, abs=1e-12
    )


def test_a_row_never_sees_its_own_target():
    generator = np.random.default_rng(4)
    keys, targets = generator.integers(0, 20, 200).tolist(), generator.random(200)
    step = TargetEncoding(columns=("k",), target="y", outputs=("e",), smoothing=0.5)
    code = step

    def encoded(numbers):
        columns = {"k": column_of("integer", keys), "y": column_of("number", numbers.tolist())}
        block = Rows(columns, np.arange(200), np.zeros(200, dtype=np.uint8))
        return values_of(code.transform(block, fit(step, [block])).columns["e"])

    before = encoded(targets)
    for row in range(0, 200, 10):
        changed = targets.copy()
        changed[row] += 1e6
        after = encoded(changed)
        assert after[row] == before[row]
        assert after != before


def test_values_never_seen_have_the_prior():
    step = TargetEncoding(columns=("k",), target="y")
    block = block_of(k=("text", ["a", "a", "b"]), y=("integer", [1, 0, 1]))
    made = step.transform(block_of(k=("text", ["z"])), fit(step, [block]))
    assert values_of(made.columns["k"]) == [2 / 3]


@KINDS
@settings(max_examples=examples(40))
@given(data=st.data())
def test_join_groupby(kind, data):
    number = data.draw(st.integers(0, 25))
    keys = data.draw(st.lists(KEYS[kind], min_size=number, max_size=number))
    values = data.draw(
        st.lists(st.none() | st.integers(-100, 100).map(lambda n: 1e6 + n / 4), min_size=number, max_size=number)
    )
    step = JoinGroupby(columns=("k",), values=("x",), statistics=("max", "count", "mean", "std", "sum", "min"))
    assert step.writes == ("k_count", "k_x_max", "k_x_mean", "k_x_std", "k_x_sum", "k_x_min")
    block = block_of(k=(kind, keys), x=("number", values))
    code, state = step, fit(step, blocks_of(block, 4))
    groups, sizes = defaultdict(list), defaultdict(int)
    for key, value in zip(keys, values, strict=True):
        sizes[same_key(kind, key)] += 1
        groups[same_key(kind, key)] += [] if value is None else [value]
    later = data.draw(st.lists(KEYS[kind], max_size=5))
    made = code.transform(block_of(k=(kind, later)), saved(code, state))
    assert values_of(made.columns["k_count"]) == [float(sizes[same_key(kind, key)]) for key in later]
    formulas = {"max": max, "mean": statistics.fmean, "std": statistics.pstdev, "sum": math.fsum, "min": min}
    for name, formula in formulas.items():
        found = values_of(made.columns[f"k_x_{name}"])
        expected = [formula(groups[key]) if groups[key] else None for key in (same_key(kind, key) for key in later)]
        assert [value is None for value in found] == [value is None for value in expected]
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (TargetEncoding(columns=("l",), target="y"), ("column 'l'",)),
        (TargetEncoding(columns=("t",), target="t"), ("column 't'", "holds text")),
        (JoinGroupby(columns=("y",)), ("column 'y'", "holds number")),
        (JoinGroupby(columns=("t",), values=("t",), statistics=("sum",)), ("column 't'", "holds text")),
        (DropLowCardinality(columns=("y",)), ("column 'y'", "holds number")),
    ],
)
def test_inputs_of_other_kinds_are_rejected(step, place):
    types = {"t": ColumnType("text"), "l": ColumnType("text", is_list=True), "y": ColumnType("number")}
    with pytest.raises(ConfigError, check=at(*place)):
        step.output_types(types)


def group_rows(state):
    """The fitted state of column k, as it is saved."""
    return state.columns["k"].rows


BEYOND_MEMORY = pytest.mark.parametrize(
    ("step", "kind"),
    [
        (TargetEncoding(columns=("k",), target="y", folds=3), "text"),
        (JoinGroupby(columns=("k",)), "text"),
        (JoinGroupby(columns=("k",), values=("y",), statistics=("count", "sum", "std", "min")), "integer"),
        (JoinGroupby(columns=("k",), values=("y",), statistics=("mean",)), "hex32"),
    ],
)


def many_groups(kind):
    """Rows of a long tail of groups, in blocks; their targets' sums are rounded."""
    generator = np.random.default_rng(3)
    keys = (generator.pareto(0.7, 20_000) * 50).astype(np.int64) % 2**31
    values = (
        [f"a text as long as identifiers are, {key}" if key % 7 else None for key in keys.tolist()]
        if kind == "text"
        else keys.tolist()
    )
    targets = [None if target < 0.1 else target for target in generator.random(20_000).tolist()]
    return blocks_of(block_of(k=(kind, values), y=("number", targets)), 3000)


@BEYOND_MEMORY
def test_groups_beyond_memory_go_to_the_disk_and_give_the_same_bits(step, kind, caplog):
    blocks = many_groups(kind)
    expected = fit(step, blocks)
    found = fit(step, blocks, memory_bytes=encoding_bytes(group_rows(expected)) * 11 // 10)
    assert files_of(found) == files_of(expected)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1
    assert "column 'k': the sums of its groups exceed the memory bound of" in logged[0]


@BEYOND_MEMORY
def test_statistics_of_groups_beyond_memory_are_rejected_with_their_number_and_what_helps(step, kind):
    blocks = many_groups(kind)
    rows = group_rows(fit(step, blocks))
    for memory in (encoding_bytes(rows) * 9 // 10, 10_000):
        with pytest.raises(StorageError, check=at("column 'k'", f"the statistics of its {rows.num_rows:,} groups")):
            fit(step, blocks, memory_bytes=memory)


def test_damaged_folds_are_rejected(tmp_path):
    step = TargetEncoding(columns=("k",), target="y", folds=3)
    block = block_of(k=("text", list("abcabc")), y=("number", [1.0] * 6))
    fit(step, [block]).save(tmp_path, "s")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/s.json: $.state")):
        TargetEncoding(columns=("k",), target="y", folds=2).load_state(tmp_path, "s")


def test_columns_that_hardly_vary_are_dropped():
    block = block_of(
        t=("text", ["a", None, "a", ""]), i=("integer", [1, 2, None, None]), l=("hex32", [[], [5, 5], [5], [None]])
    )
    step = DropLowCardinality(columns=("t", "i", "l"))
    code, state = step, fit(step, blocks_of(block, 1))
    assert state.dropped == ("t", "l")
    made = code.transform(block, saved(code, state))
    assert list(made.columns) == ["i"]
    assert list(code.transform(block.select(["i"]), state).columns) == ["i"]


SIDE = {
    "k": ("integer", [5, 3, None, 9]),
    "brand": ("text", ["x", None, "lost", "y"]),
    "price": ("number", [1.5, 2.5, 3.5, None]),
    "tags": ("hex32", [[1, None], [], [3], [4, 5]]),
}


def joined(step, side, block):
    code = step
    state = fit(step, blocks_of(side, 2))
    assert saved(code, state).rows.equals(state.rows)
    return code.transform(block, saved(code, state))


def test_columns_of_a_side_table():
    step = JoinTable(table="items", on="k", columns=("tags", "brand", "price"))
    assert step.table == "items"
    made = joined(step, block_of(**SIDE), block_of(k=("integer", [9, 3, 4, None, 5, 9])))
    assert values_of(made.columns["brand"]) == ["y", None, None, None, "x", "y"]
    assert values_of(made.columns["price"]) == [None, 2.5, None, None, 1.5, None]
    assert values_of(made.columns["tags"]) == [[4, 5], [], [], [], [1, None], [4, 5]]


def test_columns_of_a_side_table_for_items_of_lists():
    step = JoinTable(table="items", on="k", columns=("brand", "price"))
    side, block = block_of(**SIDE), block_of(k=("integer", [[5, 4], [], [None, 9]]))
    made = joined(step, side, block)
    assert values_of(made.columns["brand"]) == [["x", None], [], [None, "y"]]
    assert values_of(made.columns["price"]) == [[1.5, None], [], [None, None]]
    types = step.output_types({**types_of(side), **types_of(block)})
    assert types["price"] == ColumnType("number", is_list=True)


def test_a_key_that_a_side_table_has_twice_is_rejected():
    step = JoinTable(table="items", on="k", columns=("v",))
    with pytest.raises(FormatError, check=at("table 'items'")):
        fit(step, [block_of(k=("text", ["a", "b", "a"]), v=("integer", [1, 2, 3]))])


def test_a_side_table_beyond_memory_is_rejected():
    step = JoinTable(table="items", on="k", columns=("v",))
    with pytest.raises(StorageError, check=at("table 'items'")):
        fit(step, [block_of(k=("integer", list(range(999))), v=("integer", [1] * 999))], memory_bytes=5000)
