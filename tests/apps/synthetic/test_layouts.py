# SPDX-License-Identifier: Apache-2.0
"""Every generator: the public layout, the same bytes from the same seed whatever the blocks, a plausible best AUC."""

import csv
import hashlib
import json
import re
from collections import Counter
from datetime import datetime

import numpy as np
import pytest

from terarec.apps.synthetic import adult, amazon, avazu, mind, movielens, rees46
from terarec.errors import ConfigError
from tests.errors import at

GENERATORS = {
    "avazu": (avazu, {}),
    "rees46": (rees46, {}),
    "mind": (mind, {}),
    "movielens": (movielens, {}),
    "movielens-1m": (movielens, {"layout": "1m"}),
    "adult": (adult, {}),
    "amazon": (amazon, {}),
    "amazon-2023": (amazon, {"layout": "2023"}),
}
LINE = {
    "avazu/train.csv": r"\d{20},[01],1410(2[1-9]|30)([01]\d|2[0-3])(,\d+){2}(,[0-9a-f]{8}){9}(,-?\d+){10}",
    "rees46/2019-Oct.csv": r"2019-10-\d\d \d\d:\d\d:\d\d UTC,(view|cart|purchase),\d+,\d{19},[a-z.]*,(brand\d+)?,"
    r"\d+\.\d\d,\d+,[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "mind/train/behaviors.tsv": r"\d+\tU\d+\t11/([9]|1[0-4])/2019 \d\d?:\d\d:\d\d [AP]M\t(N\d+( N\d+)*)?\t"
    r"N\d+-[01]( N\d+-[01]){3,7}",
    "mind/valid/behaviors.tsv": r"\d+\tU\d+\t11/15/2019 \d\d?:\d\d:\d\d [AP]M\t(N\d+( N\d+)*)?\t"
    r"N\d+-[01]( N\d+-[01]){3,7}",
    "mind/train/news.tsv": r"N\d+(\t[^\t]+){7}",
    "mind/valid/news.tsv": r"N\d+(\t[^\t]+){7}",
    "movielens/ratings.csv": r"\d+,\d+,[0-5]\.[05],\d{10}",
    "movielens/movies.csv": r'\d+,(".*, .*"|[^,"]*),(\(no genres listed\)|[A-Z][\w-]+(\|[A-Z][\w-]+)*)',
    "movielens-1m/ratings.dat": r"\d+::\d+::[1-5]::\d{10}",
    "movielens-1m/movies.dat": r"\d+::(Film|L'\u00e9toile) .*::(\(no genres listed\)|[A-Z][\w-]+(\|[A-Z][\w-]+)*)",
    "movielens-1m/users.dat": r"\d+::[FM]::(1|18|25|35|45|50|56)::\d\d?::\d{5}",
    "adult/adult.data": r"\d+(, [^,]+){13}, (<=|>)50K",
    "adult/adult.test": r"\d+(, [^,]+){13}, (<=|>)50K\.",
    "amazon/reviews.json": r"\{.*\}",
    "amazon/meta.json": r"\{.*\}",
    "amazon-2023/reviews.jsonl": r"\{.*\}",
    "amazon-2023/meta.jsonl": r"\{.*\}",
}
FIRST_LINE = {
    "avazu/train.csv": "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21",
    "rees46/2019-Oct.csv": "event_time,event_type,product_id,category_id,category_code,brand,price,user_id,"
    "user_session",
    "movielens/ratings.csv": "userId,movieId,rating,timestamp",
    "movielens/movies.csv": "movieId,title,genres",
    "adult/adult.test": "|1x3 Cross validator",
}
ROWS = 3_000

each = pytest.mark.parametrize("name", GENERATORS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    root = tmp_path_factory.mktemp("logs")
    return root, {
        name: module.generate(root / name, rows=ROWS, seed=7, **options)
        for name, (module, options) in GENERATORS.items()
    }


def lines(path, name):
    read = path.read_text("latin-1" if path.suffix == ".dat" else "utf-8").splitlines()
    return read[1:] if name in FIRST_LINE else read


def digests(directory):
    return {path: hashlib.sha256((directory / path).read_bytes()).hexdigest() for path in sorted(files(directory))}


def files(directory):
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


@each
def test_lines_have_the_layout(logs, name):
    root, reports = logs
    assert sorted(files(root / name)) == sorted(["generated.json", *reports[name].files])
    for file in reports[name].files:
        key = f"{name}/{file}"
        pattern = re.compile(LINE[key])
        wrong = [line for line in lines(root / key, key) if not pattern.fullmatch(line)]
        assert wrong == []
        if key in FIRST_LINE:
            assert (root / key).read_text().splitlines()[0] == FIRST_LINE[key]


@each
def test_the_report_is_next_to_the_files(logs, name):
    root, reports = logs
    report, known = reports[name], json.loads((root / name / "generated.json").read_text())
    assert known["best_auc"] == report.best_auc
    assert 0.75 < report.best_auc < 0.92
    assert known["rows"] == report.rows == ROWS
    assert 0 < report.positives < report.samples
    assert report.text_bytes == sum((root / name / file).stat().st_size for file in report.files)
    assert {key: known[key] for key in GENERATORS[name][1]} == GENERATORS[name][1]


@each
def test_rows_and_labels_are_as_many_as_reported(logs, name):
    root, reports = logs
    report, directory = reports[name], root / name
    labels = {
        "avazu": lambda: [line.split(",")[1] == "1" for line in lines(directory / "train.csv", "avazu/train.csv")],
        "rees46": lambda: [
            row["event_type"] == "purchase"
            for row in csv.DictReader((directory / "2019-Oct.csv").open())
            if row["event_type"] != "view"
        ],
        "mind": lambda: [
            shown.endswith("-1")
            for split in ("train", "valid")
            for line in (directory / split / "behaviors.tsv").read_text().splitlines()
            for shown in line.split("\t")[4].split()
        ],
        "movielens": lambda: [float(row["rating"]) >= 4 for row in csv.DictReader((directory / "ratings.csv").open())],
        "movielens-1m": lambda: [
            int(line.split("::")[2]) >= 4 for line in (directory / "ratings.dat").read_text().splitlines()
        ],
        "adult": lambda: [">50K" in line for file in report.files for line in lines(directory / file, f"adult/{file}")],
        "amazon": lambda: [
            json.loads(line)["overall"] >= 4 for line in (directory / "reviews.json").read_text().splitlines()
        ],
        "amazon-2023": lambda: [
            json.loads(line)["rating"] >= 4 for line in (directory / "reviews.jsonl").read_text().splitlines()
        ],
    }[name]()
    assert len(labels) == report.samples
    assert sum(labels) == report.positives


@each
def test_same_seed_gives_the_same_bytes_for_any_blocks(logs, name, tmp_path, monkeypatch):
    module, options = GENERATORS[name]
    monkeypatch.setattr(module, "_BLOCK_VISITS" if module is rees46 else "_BLOCK_ROWS", 777)
    module.generate(tmp_path / "again", rows=ROWS, seed=7, **options)
    assert digests(tmp_path / "again") == digests(logs[0] / name)


@each
def test_another_seed_another_log(logs, name, tmp_path):
    module, options = GENERATORS[name]
    report = module.generate(tmp_path / "other", rows=ROWS, seed=8, **options)
    first = report.files[0]
    assert digests(tmp_path / "other")[first] != digests(logs[0] / name)[first]
    assert report.best_auc != logs[1][name].best_auc


def test_events_are_in_order_of_time_and_a_visit_ends_with_its_decision(logs):
    rows = list(csv.DictReader((logs[0] / "rees46" / "2019-Oct.csv").open()))
    assert [row["event_time"] for row in rows] == sorted(row["event_time"] for row in rows)
    last = {row["user_session"]: row["event_type"] for row in rows}
    for row in rows:
        assert row["event_type"] == "view" or last[row["user_session"]] == row["event_type"]
    by_product = {}
    for row in rows:
        found = (row["category_id"], row["category_code"], row["brand"], row["price"])
        assert by_product.setdefault(row["product_id"], found) == found
    assert any(code == "" for _, code, _, _ in by_product.values())
    assert any(brand == "" for _, _, brand, _ in by_product.values())


def test_articles_on_pages_are_among_the_news(logs):
    root = logs[0] / "mind"
    known = {line.split("\t")[0] for line in (root / "train" / "news.tsv").read_text().splitlines()}
    for split in ("train", "valid"):
        rows = [line.split("\t") for line in (root / split / "behaviors.tsv").read_text().splitlines()]
        assert {shown.rsplit("-", 1)[0] for row in rows for shown in row[4].split()} <= known
        assert {article for row in rows for article in row[3].split()} <= known
        datetime.strptime(rows[0][2], "%m/%d/%Y %I:%M:%S %p")


def test_what_a_user_likes_is_of_what_he_has_read(logs):
    """The history tells the favourites: shares of clicks differ by whether an article's category was read before."""
    root = logs[0] / "mind"
    category = dict(line.split("\t")[:2] for line in (root / "train" / "news.tsv").read_text().splitlines())
    clicks = {True: [], False: []}
    for line in (root / "train" / "behaviors.tsv").read_text().splitlines():
        _, _, _, history, shown = line.split("\t")
        read = Counter(category[article] for article in history.split())
        if read.total() < 15:
            continue
        often = {name for name, _ in read.most_common(2)}
        for article, click in (pair.rsplit("-", 1) for pair in shown.split()):
            clicks[category[article] in often].append(click == "1")
    assert np.mean(clicks[True]) > 2 * np.mean(clicks[False])


def test_films_of_a_user_stand_together_and_genres_are_known(logs):
    users = [int(row["userId"]) for row in csv.DictReader((logs[0] / "movielens" / "ratings.csv").open())]
    assert users == sorted(users)
    assert min(np.bincount(users)[1:-1]) >= 20
    films = {row["movieId"]: row for row in csv.DictReader((logs[0] / "movielens" / "movies.csv").open())}
    assert {genre for film in films.values() for genre in film["genres"].split("|")} <= {
        *movielens.GENRES,
        "(no genres listed)",
    }
    assert any(", The" in film["title"] for film in films.values())


def test_every_user_of_1m_is_described_once(logs):
    directory = logs[0] / "movielens-1m"
    raters = [line.split("::")[0] for line in (directory / "ratings.dat").read_text().splitlines()]
    users = [line.split("::")[0] for line in (directory / "users.dat").read_text().splitlines()]
    assert users == list(dict.fromkeys(raters))


def test_reviews_name_products_that_are_described(logs):
    for name, reviews, meta, key in (
        ("amazon", "reviews.json", "meta.json", "asin"),
        ("amazon-2023", "reviews.jsonl", "meta.jsonl", "parent_asin"),
    ):
        known = [json.loads(line)[key] for line in (logs[0] / name / meta).read_text().splitlines()]
        assert len(set(known)) == len(known)
        said = [json.loads(line) for line in (logs[0] / name / reviews).read_text().splitlines()]
        assert {review[key] for review in said} <= set(known)


@pytest.mark.parametrize("module", [movielens, amazon])
def test_an_unknown_layout_is_rejected(module, tmp_path):
    with pytest.raises(ConfigError, check=at("layout")):
        module.generate(tmp_path / "log", rows=10, layout="1999")
    assert not list(tmp_path.iterdir())


@each
def test_no_rows_are_rejected(name, tmp_path):
    module, options = GENERATORS[name]
    with pytest.raises(ConfigError, check=at("rows")):
        module.generate(tmp_path / "log", rows=0, **options)
    assert not list(tmp_path.iterdir())
