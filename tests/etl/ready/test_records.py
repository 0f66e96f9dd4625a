# SPDX-License-Identifier: Apache-2.0
"""A raw record gets, at serving, the numbers and ids that preparation gave to the same row."""

import csv
import itertools
from datetime import UTC, datetime

import numpy as np
import pytest

from terarec.etl.columns import concatenate_rows
from terarec.etl.source.source import open_source
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.serving import EncodedRecords
from tests.etl.ready.prepared import CASES, make
from tests.etl.ready.served import served_records


def people(made):
    lines = (made.raw / "adult.test").read_text().splitlines()[1:]
    fields = list(zip(*(line.split(", ") for line in lines), strict=True))
    names = [column.name for column in Workflow.load(made.out / "workflow").spec.source.columns]
    return {
        name: [None if value == "?" else int(value) if value.isdigit() else value for value in values]
        for name, values in zip(names, fields, strict=True)
    }


def clicks(made):
    with (made.raw / "train.csv").open() as file:
        rows = list(csv.DictReader(file))[-made.report.splits["valid"] :]
    hashed = ("site", "app", "device_id", "device_ip", "device_model")
    return {
        name: [row[name] if name.startswith(hashed) else int(row[name]) for row in rows]
        for name in rows[0]
        if name != "id"
    }


def shown_articles(made):
    columns = {"user_id": [], "time": [], "history": [], "impressions": []}
    for line in (made.raw / "valid" / "behaviors.tsv").read_text().splitlines():
        _, user, time, history, page = line.split("\t")
        second = int(datetime.strptime(time, "%m/%d/%Y %I:%M:%S %p").replace(tzinfo=UTC).timestamp())
        for shown in page.split():
            # A record is one article, of which nobody knows yet whether it will be clicked on.
            values = (user, second, history.split(), shown.rsplit("-", 1)[0])
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
    return columns


@pytest.mark.parametrize(
    ("name", "rows", "records"), [("adult", 600, people), ("avazu", 2_000, clicks), ("mind", 200, shown_articles)]
)
def test_records_are_encoded_as_rows_were(tmp_path, name, rows, records):
    made = make(name, tmp_path, rows)
    workflow = Workflow.load(made.out / "workflow")
    raw, expected = records(made), made.split("valid")
    encoded = workflow.encode({column: raw[column] for column in workflow.record_columns})
    dense = np.stack([expected[column] for column in workflow.spec.dense], axis=1)
    np.testing.assert_array_equal(encoded.dense, dense.astype(np.float32))
    for column, keys in zip(workflow.spec.categorical, encoded.keys, strict=True):
        if isinstance(keys, tuple):
            items, offsets = keys
            found = [items[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]
        else:
            found = keys.tolist()
        assert found == expected[column], column


def lists_of(encoded: EncodedRecords) -> list:
    """The dense values, and the ids or lists of ids of each column."""
    keys = [found if isinstance(found, np.ndarray) else np.split(found[0], found[1][1:-1]) for found in encoded.keys]
    return [encoded.dense.tolist(), *([np.asarray(item).tolist() for item in column] for column in keys)]


@pytest.mark.parametrize("name", ["avazu", "rees46", "mind", "movielens", "adult", "amazon"])
def test_records_one_at_a_time_together_and_as_a_block_equal_what_was_prepared(tmp_path, name):
    made = make(name, tmp_path, 300)
    workflow = Workflow.load(made.out / "workflow")
    files = [made.raw / file for file in CASES[name].sources]
    rows = concatenate_rows(list(open_source(workflow.spec.source, files, "skip", 1).blocks()))
    records = served_records(workflow, rows)
    together = workflow.encode(records)
    expected = workflow.encode_rows(workflow.apply(rows))
    np.testing.assert_array_equal(together.dense, expected.dense)
    for found, wanted in zip(together.keys, expected.keys, strict=True):
        np.testing.assert_array_equal(np.concatenate(found, axis=None), np.concatenate(wanted, axis=None))
    everything = lists_of(together)
    for row in range(20):
        single = workflow.encode({column: values[row : row + 1] for column, values in records.items()})
        assert lists_of(single) == [column[row : row + 1] for column in everything]
