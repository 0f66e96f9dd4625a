# SPDX-License-Identifier: Apache-2.0
"""The ready workflows on small logs of the public layouts, held against plain Python."""

import csv
import json
import math
from collections import defaultdict
from datetime import UTC, datetime

import pytest

from terarec.apps.synthetic import criteo
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ready import PUBLISHED_SIZES, compare_sizes, criteo_terabyte
from terarec.etl.ready import criteo as ready_criteo
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset as read
from tests.errors import at
from tests.etl.ready.prepared import CASES, Prepared, ids, make, vocabulary

ROWS = {"mind": 600}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("ready"), ROWS.get(name, 3_000))
        return made[name]

    return get


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def histories(groups, times, values, longest):
    """Of each row the values of earlier rows of its group, those of strictly lower time, oldest first."""
    order = sorted(range(len(times)), key=lambda row: (times[row], row))
    past, found, waiting = defaultdict(list), {}, []
    for row in order:
        while waiting and times[waiting[0]] < times[row]:
            before = waiting.pop(0)
            past[groups[before]].append(values[before])
        found[row] = past[groups[row]][-longest:]
        waiting.append(row)
    return [found[row] for row in range(len(times))]


def latest(times, share):
    """Whether each row is in the split "valid": the latest ones, equal times together in the earlier part."""
    last_of_train, first_of_valid = sorted(times)[len(times) - round(len(times) * share) - 1 :][:2]
    assert last_of_train <= first_of_valid
    return [time > last_of_train for time in times]


def parts(values, is_valid):
    """The values of the rows of both splits."""
    pairs = list(zip(values, is_valid, strict=True))
    return [value for value, valid in pairs if not valid], [value for value, valid in pairs if valid]


@pytest.mark.parametrize("name", CASES)
def test_the_best_auc_and_every_row_arrive(prepared, name):
    report, known = prepared(name).report, json.loads((prepared(name).raw / "generated.json").read_text())
    assert report.best_auc == known["best_auc"]
    assert report.rows == known["samples"] == sum(report.splits.values())
    assert min(report.splits.values()) > 0


def test_criteo_ids_logarithms_and_sizes(tmp_path):
    raw = tmp_path / "raw"
    files = [raw / name for name in criteo.generate(raw, rows=3_000, days=2, seed=3).files]
    days = [[line.split("\t") for line in path.read_text().splitlines()] for path in files]
    made = Prepared(
        raw, tmp_path / "data", prepare(Workflow.of(criteo_terabyte(min_count=3)), files, tmp_path / "data")
    )
    counts = [[int(row[2] or 0) for row in day] for day in days]
    for split, day, count in zip(("train", "valid"), days, counts, strict=True):
        columns = made.split(split)
        assert columns["label"] == [int(row[0]) for row in day]
        known = vocabulary([int(row[16], 16) if row[16] else None for row in days[0]], 3)
        assert columns["C3"] == ids([int(row[16], 16) if row[16] else None for row in day], known)
        raised = [max(number, min(counts[0])) + 1 - min(counts[0]) for number in count]
        assert columns["I2"] == pytest.approx([math.log(number) for number in raised], rel=1e-6, abs=1e-6)

    prepare(Workflow.of(ready_criteo(min_count=1, split=None)), files, tmp_path / "whole")
    found = {difference.column: difference.obtained for difference in compare_sizes(read(tmp_path / "whole"), "kaggle")}
    values = [{row[13 + n] for day in days for row in day} - {""} for n in range(1, 27)]
    published = PUBLISHED_SIZES["kaggle"].sizes
    different = {f"C{n}": len(v) for n, v in enumerate(values, 1) if abs(len(v) - published[n - 1]) > 1}
    assert found == different
    assert "C9" not in found

    merged = ready_criteo(min_count=1, split=None, modulo=10_000_000)
    prepare(Workflow.of(merged), files[:1], tmp_path / "merged")
    rows = {column.name: column.rows for column in read(tmp_path / "merged").categorical}
    assert rows["C3"] == len({int(row[16], 16) % 10_000_000 for row in days[0] if row[16]}) + 2
    with pytest.raises(ConfigError, check=at("criteo: modulo")):
        ready_criteo(modulo=7)


def test_avazu_ids_and_split(prepared):
    made = prepared("avazu")
    rows = rows_of(made.raw / "train.csv")
    is_valid = latest([int(row["hour"]) for row in rows], 0.1)
    assert {row["hour"][:6] for row, valid in zip(rows, is_valid, strict=True) if valid} == {"141030"}
    moments = [datetime.strptime("20" + row["hour"], "%Y%m%d%H").replace(tzinfo=UTC) for row in rows]
    columns = {
        "site_id": [int(row["site_id"], 16) for row in rows],
        "device_ip": [int(row["device_ip"], 16) for row in rows],
        "C20": [int(row["C20"]) for row in rows],
        "hour_of_day": [moment.hour for moment in moments],
        "weekday": [moment.weekday() for moment in moments],
    }
    train, valid = made.split("train"), made.split("valid")
    assert (train["click"], valid["click"]) == parts([int(row["click"]) for row in rows], is_valid)
    for name, values in columns.items():
        early, late = parts(values, is_valid)
        known = vocabulary(early, 2)
        assert train[name] == ids(early, known), name
        assert valid[name] == ids(late, known), name


def test_rees46_histories_differences_and_labels(prepared):
    made = prepared("rees46")
    rows = [row for row in rows_of(made.raw / "2019-Oct.csv") if row["event_type"] != "view"]
    times = [
        int(datetime.strptime(row["event_time"], "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp())
        for row in rows
    ]
    is_valid = latest(times, 0.1)
    train, valid = made.split("train"), made.split("valid")
    purchases = [int(row["event_type"] == "purchase") for row in rows]
    assert (train["purchase"], valid["purchase"]) == parts(purchases, is_valid)
    products, users = [int(row["product_id"]) for row in rows], [row["user_id"] for row in rows]
    past = histories(users, times, products, 20)
    (early, _), (early_past, late_past) = parts(products, is_valid), parts(past, is_valid)
    known = vocabulary([*early, *(item for items in early_past for item in items)], 2)
    assert train["product_id"] == ids(early, known)
    assert train["past_products"] == [ids(items, known) for items in early_past]
    assert valid["past_products"] == [ids(items, known) for items in late_past]
    last, has_none = {}, {}
    for row in sorted(range(len(rows)), key=lambda row: (times[row], row)):
        has_none[row] = float(users[row] not in last)
        last[users[row]] = times[row]
    none_before = [has_none[row] for row in range(len(rows))]
    assert (train["seconds_since_last_missing"], valid["seconds_since_last_missing"]) == parts(none_before, is_valid)


def test_mind_samples_are_what_pages_show(prepared):
    made = prepared("mind")
    news = dict(line.split("\t")[:2] for line in (made.raw / "train/news.tsv").read_text().splitlines())
    samples = {}
    for split in ("train", "valid"):
        pages = [line.split("\t") for line in (made.raw / split / "behaviors.tsv").read_text().splitlines()]
        samples[split] = [
            (*shown.rsplit("-", 1), page[3].split(), user)
            for page in pages
            for shown in page[4].split()
            for user in [page[1]]
        ]
        columns = made.split(split)
        assert columns["clicked"] == [int(click) for _, click, _, _ in samples[split]]
        known = vocabulary([item for shown, _, past, _ in samples["train"] for item in (shown, *past)], 2)
        assert columns["news_id"] == ids([shown for shown, _, _, _ in samples[split]], known)
        assert columns["read_news"] == [ids(past, known) for _, _, past, _ in samples[split]]
        topics = vocabulary([news[item] for shown, _, past, _ in samples["train"] for item in (shown, *past)], 2)
        assert columns["category"] == ids([news[shown] for shown, _, _, _ in samples[split]], topics)
        assert columns["read_categories"] == [
            ids([news[item] for item in past], topics) for _, _, past, _ in samples[split]
        ]
        users = vocabulary([user for _, _, _, user in samples["train"]], 2)
        assert columns["user_id"] == ids([user for _, _, _, user in samples[split]], users)


def test_movielens_genres_and_histories(prepared):
    made = prepared("movielens")
    rows = rows_of(made.raw / "ratings.csv")
    times = [int(row["timestamp"]) for row in rows]
    is_valid = latest(times, 0.1)
    films = {row["movieId"]: row["genres"].split("|") for row in rows_of(made.raw / "movies.csv")}
    genres = [[name for name in films[row["movieId"]] if name[0] != "("] for row in rows]
    train, valid = made.split("train"), made.split("valid")
    liked = [int(float(row["rating"]) >= 4) for row in rows]
    assert (train["liked"], valid["liked"]) == parts(liked, is_valid)
    early, late = parts(genres, is_valid)
    known = vocabulary([name for names in early for name in names], 2)
    assert [[item for item in items if item] for items in train["genres"]] == [ids(names, known) for names in early]
    assert [[item for item in items if item] for items in valid["genres"]] == [ids(names, known) for names in late]
    seen = [int(row["movieId"]) for row in rows]
    past = histories([row["userId"] for row in rows], times, seen, 50)
    (early_seen, _), (early_past, late_past) = parts(seen, is_valid), parts(past, is_valid)
    known = vocabulary([*early_seen, *(item for items in early_past for item in items)], 2)
    assert train["past_movies"] == [ids(items, known) for items in early_past]
    assert valid["past_movies"] == [ids(items, known) for items in late_past]


def test_movielens_1m_has_its_users(prepared):
    made = prepared("movielens-1m")
    rows = [line.split("::") for line in (made.raw / "ratings.dat").read_text().splitlines()]
    users = dict(line.split("::", 1) for line in (made.raw / "users.dat").read_text().splitlines())
    is_valid = latest([int(row[3]) for row in rows], 0.1)
    for place, name in enumerate(("gender", "age", "occupation", "zip")):
        values = [users[row[0]].split("::")[place] for row in rows]
        found = [value if name in ("gender", "zip") else int(value) for value in values]
        early, late = parts(found, is_valid)
        known = vocabulary(early, 2)
        assert made.split("train")[name] == ids(early, known)
        assert made.split("valid")[name] == ids(late, known)


def test_adult_skips_the_remark_and_reads_both_spellings_of_the_label(prepared):
    made = prepared("adult")
    assert sum(made.report.bad_input.counts.values()) == 1
    assert "adult.test" in made.report.bad_input.first[0]
    people = {}
    for split, file in (("train", "adult.data"), ("valid", "adult.test")):
        lines = (made.raw / file).read_text().splitlines()
        people[split] = [line.split(", ") for line in lines if not line.startswith("|")]
        columns = made.split(split)
        assert columns["income"] == [int(person[14].startswith(">")) for person in people[split]]
        for place, name in ((1, "workclass"), (13, "native_country")):
            known = vocabulary([person[place] for person in people["train"] if person[place] != "?"], 1)
            assert columns[name] == ids([person[place].replace("?", "") for person in people[split]], known)
        known = vocabulary([int(person[10]) for person in people["train"]], 1)
        assert columns["capital_gain"] == ids([int(person[10]) for person in people[split]], known)


@pytest.mark.parametrize(
    ("name", "reviews", "meta", "fields"),
    [
        ("amazon", "reviews.json", "meta.json", ("reviewerID", "asin", "overall", "unixReviewTime", "brand")),
        ("amazon-2023", "reviews.jsonl", "meta.jsonl", ("user_id", "parent_asin", "rating", "timestamp", "store")),
    ],
)
def test_amazon_brands_and_histories_without_the_same_moment(prepared, name, reviews, meta, fields):
    made = prepared(name)
    user, product, rating, time, brand = fields
    rows = [json.loads(line) for line in (made.raw / reviews).read_text().splitlines()]
    described = {row[product]: row for row in map(json.loads, (made.raw / meta).read_text().splitlines())}
    times = [row[time] for row in rows]
    is_valid = latest(times, 0.1)
    train, valid = made.split("train"), made.split("valid")
    assert (train["liked"], valid["liked"]) == parts([int(row[rating] >= 4) for row in rows], is_valid)
    early, late = parts([described[row[product]][brand] for row in rows], is_valid)
    known = vocabulary(early, 2)
    assert (train["brand"], valid["brand"]) == (ids(early, known), ids(late, known))
    bought = [row[product] for row in rows]
    past = histories([row[user] for row in rows], times, bought, 50)
    (early_bought, _), (early_past, late_past) = parts(bought, is_valid), parts(past, is_valid)
    known = vocabulary([*early_bought, *(item for items in early_past for item in items)], 2)
    assert train["past_products"] == [ids(items, known) for items in early_past]
    assert valid["past_products"] == [ids(items, known) for items in late_past]
