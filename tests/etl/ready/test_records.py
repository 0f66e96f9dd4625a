"""A raw record gets, at serving, the numbers and ids that preparation gave to the same row."""

import csv
import itertools
from datetime import UTC, datetime

import numpy as np
import pytest

from terarec.etl.workflow import Workflow
from tests.etl.ready.prepared import make


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
