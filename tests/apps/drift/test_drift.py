# SPDX-License-Identifier: Apache-2.0
"""Drift figures against their formulas, over data sets of one workflow and of two."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.apps.drift.compare import (
    ColumnDrift,
    DriftReport,
    compare,
    jensen_shannon_distance,
    stability_index,
    write_drift_report,
)
from terarec.apps.drift.summary import names_apart, summarize_dataset, summarize_raw
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ops import Categorify, History
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset, write_dataset
from terarec.spec import LabelSpec, OneSplit, SourceColumn, SourceSpec
from tests.apps.drift.data_sets import fitted, rows, write
from tests.errors import at
from tests.etl.column_values import block_of, values_of

COUNTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)


@given(counts=COUNTS)
def test_distances_follow_their_formulas(counts):
    sides = [list(side) for side in zip(*counts, strict=True)]
    index, distance = (
        measure(*(np.array(side) for side in sides)) for measure in (stability_index, jensen_shannon_distance)
    )
    if not all(map(sum, sides)):
        assert math.isnan(index)  # finding N4: 0 would say that nothing has moved
        assert math.isnan(distance)
        return
    p, q = ([(n + 0.5) / (sum(side) + 0.5 * len(side)) for n in side] for side in sides)
    assert index == pytest.approx(sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True)), abs=1e-12)
    p, q = ([n / sum(side) for n in side] for side in sides)
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    parts = [sum(a * math.log2(a / m) for a, m in zip(side, middle, strict=True) if a) for side in (p, q)]
    assert distance == pytest.approx(math.sqrt(max(sum(parts) / 2, 0.0)), abs=1e-7)
    assert 0.0 <= distance <= 1.0 + 1e-12


def test_distances_of_equal_and_disjoint_counts():
    assert jensen_shannon_distance(np.array([3, 1, 0]), np.array([6, 2, 0])) == 0.0
    assert jensen_shannon_distance(np.array([3, 0]), np.array([0, 5])) == 1.0
    assert stability_index(np.array([30, 10]), np.array([30, 10])) == 0.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    before, after = rows(4000, 1), rows(3000, 2, moved=True)
    made, place = fitted(before), tmp_path_factory.mktemp("data")
    return {
        "before": write(place / "before", made, train=before, valid=rows(500, 3)),
        "same": write(place / "same", made, train=rows(3000, 4)),
        "moved": write(place / "moved", made, train=after),
        "own": write(place / "own", fitted(after), train=after),
    }


def drift(directories: dict[str, Path], current: str) -> DriftReport:
    return compare(summarize_dataset(directories["before"], ["train"]), summarize_dataset(directories[current]))


def column(report: DriftReport, name: str) -> ColumnDrift:
    return next(column for column in report.columns if column.name == name)


def test_other_rows_of_the_same_kind_have_not_moved(directories):
    report = drift(directories, "same")
    assert [column.name for column in report.columns] == ["bought", "price", "city", "model", "tags", "user"]
    assert all(column.stability_index < 0.03 for column in report.columns)
    assert report.reference.splits == {"train": 4000, "valid": 500}
    assert (report.reference.rows, report.current.rows) == (4000, 3000)


def test_new_missing_and_rare_values_are_counted(directories):
    found = column(drift(directories, "moved"), "city")
    cities = values_of(rows(3000, 2, moved=True).columns["city"])
    assert found.missing == (0.0, cities.count(None) / 3000)
    # The reference's workflow has no id for the new cities: they lie in its hash buckets.
    assert found.rare[1] - found.rare[0] == pytest.approx(
        sum("new" in (city or "") for city in cities) / 3000, abs=0.01
    )
    assert found.new == 0.0
    assert found.stability_index > 0.25


def test_data_of_another_workflow_are_compared_by_their_raw_values(directories):
    report = drift(directories, "own")
    city = column(report, "city")
    cities = values_of(rows(3000, 2, moved=True).columns["city"])
    assert city.new == sum("new" in (name or "") for name in cities) / 3000
    before = Counter(values_of(rows(4000, 1).columns["city"]))
    bins = {
        name: (own, other)
        for name, own, other in zip(city.bins.names, city.bins.reference, city.bins.current, strict=True)
    }
    for name, count in before.most_common(5):
        assert bins[name] == (count, cities.count(name))
    model = column(report, "model")
    assert model.new == 0.0
    assert model.stability_index < 0.03
    assert {f"{977 * number + 5:08x}" for number in range(6)} <= set(model.bins.names)


def test_lists_that_became_empty_have_drifted(tmp_path):
    """Finding N12: 95 % empty lists had a stability index of 0.02, as the other items were alike."""
    before, after = rows(2000, 1), rows(2000, 2)
    lists = values_of(after.columns["tags"])
    kept = [items if number % 20 == 0 else [] for number, items in enumerate(lists)]
    emptied = after.with_columns(block_of(tags=("text", kept)).columns)
    made = fitted(before)
    directories = [write(tmp_path / name, made, train=block) for name, block in (("a", before), ("b", emptied))]
    report = compare(*map(summarize_dataset, directories))
    (tags,) = [column for column in report.columns if column.name == "tags"]
    lengths = [[len(items[:3]) for items in side] for side in (values_of(before.columns["tags"]), kept)]
    assert tags.lists.empty == tuple(side.count(0) / 2000 for side in lengths)
    assert tags.lists.mean_lengths == pytest.approx(tuple(sum(side) / 2000 for side in lengths))
    assert tags.lists.bins.reference.tolist() == [lengths[0].count(length) for length in range(4)]
    assert tags.stability_index > 1
    assert all(column.lists is None for column in report.columns if column.name != "tags")


def test_data_without_rows_are_not_compared(directories):
    """Finding N4: they counted as data that have not moved."""
    report = drift(directories, "own")
    empty = replace(report.current, rows=0)
    with pytest.raises(ConfigError, check=at(empty.name)):
        compare(report.reference, empty)


def test_numbers_lie_in_the_references_deciles(directories):
    price = column(drift(directories, "moved"), "price")
    assert len(price.bins.names) == 11
    assert price.bins.reference[1:].tolist() == pytest.approx([400] * 10, abs=1)
    assert price.bins.current.sum() == 3000
    assert price.stability_index > 0.25
    assert price.means is not None
    raw = np.array(values_of(rows(4000, 1).columns["price"]))
    assert price.means[1] > price.means[0] == pytest.approx(raw.mean(), rel=1e-6)


def raw_log(path: Path, block) -> Path:
    """`block` as the workflow's source reads it."""
    columns = {name: values_of(column) for name, column in block.columns.items()}
    columns["code"] = [f"{code:x}" for code in columns["code"]]
    columns["tags"] = [" ".join(tags) for tags in columns["tags"]]
    rows = zip(*columns.values(), strict=True)
    path.write_text("".join("\t".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows))
    return path


def test_raw_logs_are_encoded_by_the_references_workflow(directories, tmp_path):
    raw = raw_log(tmp_path / "day.tsv", rows(3000, 2, moved=True))
    before = summarize_dataset(directories["before"], ["train"])
    found = compare(before, summarize_raw([raw], directories["before"]))
    expected = compare(before, summarize_dataset(directories["moved"]))
    assert found.current.name == "day.tsv"
    for own, other in zip(found.columns, expected.columns, strict=True):
        assert (own.name, own.missing, own.rare, own.new) == (other.name, other.missing, other.rare, other.new)
        assert own.stability_index == other.stability_index
        assert own.bins.current.tolist() == other.bins.current.tolist()


def test_ids_of_data_without_a_workflow_stand_for_themselves(directories, tmp_path):
    spec = replace(read_dataset(directories["same"]), workflow=None)
    (tmp_path / "train").symlink_to(directories["same"] / "train")
    write_dataset(replace(spec, splits={}), tmp_path)
    raw = summarize_raw([tmp_path / "train" / "part-00000.parquet"], tmp_path)
    cities = raw.categories["city"]
    assert (cities.total, cities.missing, cities.rare) == (3000, 0, 0)
    assert set(cities.values.to_pylist()) <= {str(number) for number in range(spec.categorical[0].rows)}
    assert raw.numbers["price"].total == 3000
    said = replace(spec, splits={}, categorical=tuple(replace(one, given=False) for one in spec.categorical))
    write_dataset(said, tmp_path)
    file = directories["moved"] / "train" / "part-00000.parquet"
    missing = summarize_raw([file], tmp_path).categories["city"].missing
    assert missing == (pq.read_table(file)["city"].to_numpy() == 0).sum() > 0


def test_data_without_a_common_column_are_rejected(directories):
    summary = summarize_dataset(directories["before"])
    with pytest.raises(ConfigError, check=at("before and other")):
        compare(summary, replace(summary, name="other", numbers={}, categories={"x": summary.categories["city"]}))


def test_splits_that_are_not_there_are_rejected(directories):
    with pytest.raises(ConfigError, check=at("data set 'shop'")):
        summarize_dataset(directories["before"], ["test"])


def test_the_page_is_self_contained_and_shows_the_figures_of_the_json(directories, tmp_path):
    pytest.importorskip("matplotlib")
    report = drift(directories, "own")
    page, figures = write_drift_report(report, tmp_path / "drift.html")
    html, content = page.read_text(), json.loads(figures.read_text())
    assert not re.findall(r'(?:src|href)="(?!#)', html)
    assert html.count("<svg") == len(report.columns) == len(content["columns"])
    assert (content["format"], content["version"]) == ("terarec.drift", 1)
    for moved in content["columns"]:
        assert f">{moved['stability_index']:.3f}<" in html
    assert content["reference"]["splits"] == {"train": 4000, "valid": 500}
    identifiers = re.findall(r' id="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))


def test_names_are_escaped(tmp_path):
    pytest.importorskip("matplotlib")
    before = rows(200, 1)
    directory = write(tmp_path / "<b>&", fitted(before), train=before)
    summary = summarize_dataset(directory)
    cities = summary.categories["city"]
    odd = pa.array(["<script>$x_{", "\n\x00", *cities.values.to_pylist()[2:]], type=pa.large_string())
    shown = replace(summary, categories={"city": replace(cities, values=odd)})
    page, _ = write_drift_report(compare(shown, shown), tmp_path / "drift.html")
    html = page.read_text()
    assert "<script" not in html
    assert "Drift of &lt;b&gt;&amp; (current) from &lt;b&gt;&amp; (reference)" in html


def people(path: Path, cities: list[str], ages: range, factor: int) -> Path:
    lines = [f"{at % 2},{age},{factor * (at % 50)},{cities[at % len(cities)]}" for at, age in enumerate(ages)]
    path.write_text("\n".join(["label,age,gains,city", *lines]) + "\n", encoding="utf-8")
    return path


def test_numbers_are_in_raw_units_after_any_scaling(tmp_path, recwarn):
    """E5: whole numbers lie in the same intervals after another mean and deviation, too."""
    pytest.importorskip("matplotlib")
    options = CsvOptions(label="label", dense=("age",), log=("gains",), categorical=("city",))
    cities = ["東京", "Zürich", "北京市"]
    for name, ages, factor in (("a", range(20, 420), 1), ("b", range(20, 620), 1)):
        log = people(tmp_path / f"{name}.csv", cities, ages, factor)
        prepare(Workflow.of(csv_workflow(options)), [log], tmp_path / name / "data")
    before, after = (summarize_dataset(tmp_path / name / "data") for name in ("a", "b"))
    assert set(before.numbers["age"].sample.numbers.tolist()) == set(range(20, 420))
    assert set(after.numbers["age"].sample.numbers.tolist()) == set(range(20, 620))
    for side in (before, after):
        np.testing.assert_allclose(np.unique(side.numbers["gains"].sample.numbers), np.arange(50), atol=1e-3)
    report = compare(before, after)
    age = column(report, "age")
    assert age.means == (pytest.approx(219.5), pytest.approx(319.5))
    assert age.bins.names[1:3] == ("< 60", "60 to 100")
    assert age.bins.current[1:3].tolist() == [40, 40]
    assert column(report, "gains").stability_index < 1e-2
    page, _ = write_drift_report(report, tmp_path / "drift.html")
    html = page.read_text(encoding="utf-8")
    assert all(city in html for city in cities)  # as text, which the reader's fonts draw
    assert [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)] == []


def test_sides_are_reported_apart(tmp_path):
    """E5: by the directories around them, by their splits, or by their parts in the comparison."""
    assert names_apart(tmp_path / "one" / "data", tmp_path / "two" / "data") == ("one/data", "two/data")
    assert names_apart(tmp_path / "one", tmp_path / "two") == ("one", "two")
    assert names_apart(tmp_path / "one", tmp_path / "one") == ("one", "one")
    block = rows(300, 1)
    data = write(tmp_path / "data", fitted(block), train=block, valid=rows(100, 2))
    report = compare(summarize_dataset(data, ["train"]), summarize_dataset(data, ["valid"], name="new/data"))
    assert (report.reference.name, report.current.name) == ("data (train)", "new/data (valid)")
    report = compare(summarize_dataset(data), summarize_dataset(data))
    assert (report.reference.name, report.current.name) == ("data (reference)", "data (current)")


def test_served_records_of_a_workflow_with_histories_are_compared(tmp_path: Path) -> None:
    visits = [(user, time, f"i{(user * time) % 7}") for time in range(40) for user in range(5)]
    (tmp_path / "log.csv").write_text(
        "user,time,item,click\n" + "".join(f"{user},{time},{item},{time % 2}\n" for user, time, item in visits)
    )
    workflow = Workflow(
        [
            History(columns=("item",), outputs=("past",), group="user", order="time", max_length=3),
            Categorify(columns=("item", "past"), joint=True),
        ],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            header=True,
            columns=(
                SourceColumn(name="user", type="integer"),
                SourceColumn(name="time", type="integer"),
                SourceColumn(name="item", type="text"),
                SourceColumn(name="click", type="integer"),
            ),
        ),
        split=OneSplit(split="train"),
        labels=[LabelSpec(name="click")],
        categorical=["item", "past"],
    )
    prepare(workflow, [tmp_path / "log.csv"], tmp_path / "data")
    table = pa.table(
        {"item": ["i1", "i2", "new", None], "past": [["i1"], [], None, ["i0", "i3"]], "served.score": [0.5] * 4}
    )
    served = tmp_path / "served" / "shop"
    served.mkdir(parents=True)
    pq.write_table(table, served / "a.parquet")
    found = summarize_raw([served], tmp_path / "data")
    assert found.rows == 4
    item, past = found.categories["item"], found.categories["past"]
    assert (item.total, item.missing, item.rare) == (4, 1, 1)
    assert past.lengths.tolist() == [2, 1, 1]
    report = compare(summarize_dataset(tmp_path / "data"), found)
    assert {column.name for column in report.columns} == {"item", "past"}
    # Logs have no lists yet, and those of a column are no records.
    pq.write_table(table.drop_columns(["past"]), served / "b.parquet")
    with pytest.raises(ConfigError, match=r"looks at other rows \(History\), expected .*, or served records"):
        summarize_raw([served], tmp_path / "data")
