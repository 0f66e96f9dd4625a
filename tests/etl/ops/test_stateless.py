# SPDX-License-Identifier: Apache-2.0
"""What every step without a state does."""

import json

import pytest

from terarec.etl.columns import Rows, concatenate_rows, flat, is_list, kind_of, list_lengths, numpy_values
from terarec.etl.ops import Rename
from terarec.spec import from_data, to_data
from tests.etl.column_values import block_of, column_of, values_of
from tests.etl.ops.cases import CASES, Case
from tests.etl.ops.fitting import run_record_functions, types_of

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


def same(block: Rows, other: Rows) -> None:
    assert list(block.columns) == list(other.columns)
    assert block.ids.tolist() == other.ids.tolist()
    for name, column in block.columns.items():
        assert kind_of(column) == kind_of(other.columns[name])
        assert values_of(column) == values_of(other.columns[name])


@every_case
def test_equals_its_formula(case: Case) -> None:
    block = block_of(**case.inputs)
    before = {name: values_of(column) for name, column in block.columns.items()}
    made = case.step.transform(block, None)
    assert {name: values_of(column) for name, column in block.columns.items()} == before
    for name, (kind, values) in case.expected.items():
        assert kind_of(made.columns[name]) == kind
        assert values_of(made.columns[name]) == values_of(column_of(kind, values))
    assert made.ids.tolist() == (block.ids.tolist() if case.rows is None else case.rows)
    assert not made.columns.keys() & set(case.gone)
    for name, column in block.columns.items():
        if name not in {*case.step.writes, *case.gone} and case.rows is None:
            assert made.columns[name] is column


@every_case
def test_plain_values_become_the_same_together_and_row_by_row(case: Case) -> None:
    code, block = case.step, block_of(**case.inputs)
    if code.stage == "rows" or isinstance(case.step, Rename):
        assert not code.record_functions(types_of(block), None)  # not done to records, or seen through
        return
    found = run_record_functions(code, None, block)
    made = code.transform(block, None)
    assert dict(found) == {name: values_of(made.columns[name]) for name in case.step.writes}
    rows = [run_record_functions(code, None, block.slice(row, row + 1)) for row in range(block.num_rows)]
    for place, (name, values) in enumerate(found):
        assert [row[place] for row in rows] == [(name, [value]) for value in values]


@every_case
def test_comes_back_from_json(case: Case) -> None:
    data = json.loads(json.dumps(to_data(case.step)))
    assert from_data(type(case.step), data) == case.step


@every_case
def test_declares_its_types(case: Case) -> None:
    block = block_of(**case.inputs)
    code = case.step
    foretold = code.output_types(types_of(block))
    made = code.transform(block, None)
    assert set(foretold) == set(code.writes)
    for name, found in foretold.items():
        column = made.columns[name]
        assert (found.kind, found.is_list) == (kind_of(column), is_list(column))
        if found.max_length is not None and is_list(column):
            assert list_lengths(column).max(initial=0) <= found.max_length


@every_case
def test_blocks_equal_the_whole(case: Case) -> None:
    block = block_of(**case.inputs)
    code = case.step
    whole = code.transform(block, None)
    parts = [code.transform(block.slice(row, row + 1), None) for row in range(block.num_rows)]
    same(concatenate_rows(parts), whole)


@every_case
def test_takes_a_block_without_rows(case: Case) -> None:
    block = block_of(**case.inputs)
    code = case.step
    made = code.transform(block.slice(0, 0), None)
    assert made.num_rows == 0
    for name, (kind, _) in case.expected.items():
        assert (kind_of(made.columns[name]), len(made.columns[name])) == (kind, 0)


@every_case
def test_ids_are_below_their_number(case: Case) -> None:
    code = case.step
    made = code.transform(block_of(**case.inputs), None)
    for name, rows in code.cardinalities({}, None).items():
        values = numpy_values(flat(made.columns[name]))
        assert values.min(initial=0) >= 0
        assert values.max(initial=0) < rows
