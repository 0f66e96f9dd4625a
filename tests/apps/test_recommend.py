# SPDX-License-Identifier: Apache-2.0
"""Items for users: retrieved by a two-tower model, ranked by another one; against scores of all items."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from terarec.apps.recommend import Catalogue, Recommender
from terarec.apps.retrieval_model import RetrievalModel
from terarec.config import load_run
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ops import GivenIds, LambdaOp, LogOp
from terarec.etl.workflow import Workflow
from terarec.models.artifact import load_model
from terarec.serve import InferenceSession
from terarec.spec import (
    ItemIndexSpec,
    LabelSpec,
    MFBPRSpec,
    NCFSpec,
    Numbers,
    PrepareOptions,
    RunSpec,
    SourceColumn,
    SourceSpec,
    TrainingSpec,
    TwoTowerSpec,
)
from terarec.train.run import build
from tests.apps.conftest import FilmRuns
from tests.cli.conftest import figures, rejected
from tests.cli.test_docs import unnamed
from tests.errors import at

FACTORS = MFBPRSpec(user="userId", item="movieId", width=4)
USERS = {"userId": [1, 2, 10**9, None], "past_movies": [[3, 5, 8], [], [1], None]}


def of_all_items(film_runs: FilmRuns, users: Mapping[str, list[Any]], user: int) -> tuple[np.ndarray, np.ndarray]:
    """The towers' and the ranking model's scores of every film for one user."""
    films = film_runs.films.column("movieId").to_pylist()
    records = {name: [values[user]] * len(films) for name, values in users.items()} | {"movieId": films}
    towers = InferenceSession.open(film_runs.towers)
    logits = towers.predict(records)[:, 0]
    return logits, InferenceSession.open(film_runs.ranker).predict(records)[:, 0]


def in_order(films: list[int], scores: np.ndarray) -> list[int]:
    return [films[place] for place in np.argsort(-scores, kind="stable")]


@pytest.fixture(scope="module")
def recommender(film_runs: FilmRuns) -> Recommender:
    return Recommender.open(film_runs.towers, film_runs.catalogue(), ranker=film_runs.ranker)


def test_the_towers_alone_give_the_items_of_the_greatest_scores(film_runs: FilmRuns) -> None:
    recommender = Recommender.open(film_runs.towers, film_runs.catalogue())
    films = film_runs.films.column("movieId").to_pylist()
    found = recommender.recommend(USERS, 6)
    for user, items in enumerate(found.items):
        scores, _ = of_all_items(film_runs, USERS, user)
        assert items == in_order(films, scores)[:6]
        assert np.allclose(1 / (1 + np.exp(-np.array(found.scores[user]))), np.sort(scores)[::-1][:6], atol=1e-5)


def test_factors_of_users_and_items_retrieve_and_ncf_ranks_alone(film_runs: FilmRuns, tmp_path: Path) -> None:
    spec = load_run(film_runs.towers / "run.json")
    for model in (FACTORS, NCFSpec(user="userId", item="movieId")):
        build(replace(spec, model=model, training=replace(spec.training, max_steps=4)), tmp_path / model.kind).fit()
    found = Recommender.open(tmp_path / "mf_bpr", film_runs.catalogue()).recommend(USERS, 6)
    films = film_runs.films.column("movieId").to_pylist()
    for user, items in enumerate(found.items):
        records = {name: [values[user]] * len(films) for name, values in USERS.items()} | {"movieId": films}
        assert items == in_order(films, InferenceSession.open(tmp_path / "mf_bpr").predict(records)[:, 0])[:6]
    with pytest.raises(ConfigError, check=at("run", "'ncf', whose scores are no dots")):
        Recommender.open(tmp_path / "ncf", film_runs.catalogue())
    ranked = Recommender.open(film_runs.towers, film_runs.catalogue(), ranker=tmp_path / "ncf").recommend(USERS, 3)
    assert [len(items) for items in ranked.items] == [3] * 4


def inverse(hours: pa.Array) -> pa.Array:
    return pc.divide_checked(60, hours)


def test_columns_of_the_other_side_are_not_read(tmp_path: Path) -> None:
    """Steps of both sides' columns reject 0, and one value of `hour` is none."""
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(1, 9, 200) for name in ("user", "item", "income", "price", "hour")}
    pq.write_table(pa.table({**columns, "liked": rng.integers(0, 2, 200)}), tmp_path / "log.parquet")
    names = ("user", "item", "income", "price", "hour", "liked")
    workflow = Workflow(
        [
            LogOp(columns=("price", "income"), shift=0.0),
            GivenIds(columns=("item", "user"), rows=(9, 9)),
            LambdaOp(columns=("hour",), outputs=("hour",), function=f"{__name__}:inverse", output_type="number"),
        ],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            header=True,
            columns=tuple(SourceColumn(name=name, type="integer") for name in names),
        ),
        labels=[LabelSpec(name="liked")],
        dense=["price", "income", "hour"],
        categorical=["user", "item"],
    )
    prepare(workflow, [tmp_path / "log.parquet"], tmp_path / "data", PrepareOptions(threads=1))
    towers = TwoTowerSpec(user=("user", "income", "hour"), item=("item", "price"), width=4, hidden=(), vector_width=4)
    training = TrainingSpec(batch_size=50, max_steps=2, reader_threads=1, eval_split="none")
    build(RunSpec(data=str(tmp_path / "data"), model=towers, training=training), tmp_path / "run").fit()
    items = {"item": list(range(1, 9)), "price": [float(item) for item in range(1, 9)]}
    users = {"user": [1, 2], "income": [3, 4], "hour": [5, 6]}
    allowed = (__name__.split(".", maxsplit=1)[0],)
    recommender = Recommender.open(tmp_path / "run", Catalogue(items, "item"), allow_import=allowed)
    assert set(recommender.user_columns) == users.keys()
    found = recommender.recommend(users, 8)
    session = InferenceSession.open(tmp_path / "run", allow_import=allowed)
    for user in range(2):
        records = {name: [values[user]] * 8 for name, values in users.items()} | items
        assert found.items[user] == in_order(items["item"], session.predict(records)[:, 0])


def test_candidates_are_ranked_by_the_ranking_model(film_runs: FilmRuns, recommender: Recommender) -> None:
    films = film_runs.films.column("movieId").to_pylist()
    found = recommender.recommend(USERS, 5, candidates=30)
    for user, items in enumerate(found.items):
        logits, scores = of_all_items(film_runs, USERS, user)
        retrieved = np.argsort(-logits, kind="stable")[:30]
        ranked = retrieved[np.argsort(-scores[retrieved], kind="stable")][:5]
        assert items == [films[place] for place in ranked]
        assert np.allclose(found.scores[user], scores[ranked], atol=1e-6)
    everything = recommender.recommend(USERS, 5, candidates=len(films))
    assert everything.items[1] == in_order(films, of_all_items(film_runs, USERS, 1)[1])[:5]


def test_filters(film_runs: FilmRuns, recommender: Recommender) -> None:
    films = film_runs.films.column("movieId").to_pylist()
    first = recommender.recommend(USERS, 5, candidates=30)
    again = recommender.recommend(USERS, 5, candidates=30, exclude=[*first.items[:2], [], [10**9]])
    assert not set(again.items[0]) & set(first.items[0])
    assert len(again.items[0]) == 5
    assert again.items[2:] == first.items[2:]
    stock = films[5:9]
    few = recommender.recommend(USERS, 5, allow=stock, exclude=[[stock[0]], [], [], stock])
    assert [len(items) for items in few.items] == [3, 4, 4, 0]
    assert set(few.items[1]) == set(stock)


def test_columns_may_be_arrays(recommender: Recommender) -> None:
    users = {"userId": np.array([1, 2]), "past_movies": pa.array([[3, 5, 8], []])}
    expected = recommender.recommend({name: values[:2] for name, values in USERS.items()}, 4, candidates=20)
    assert recommender.recommend(users, 4, candidates=20) == expected
    assert recommender.recommend({"userId": [], "past_movies": []}).items == []


def test_an_index_is_kept_until_the_items_change(film_runs: FilmRuns, tmp_path: Path) -> None:
    made = Recommender.open(film_runs.towers, film_runs.catalogue(), index_dir=tmp_path / "index")
    time = (tmp_path / "index" / "index.json").stat().st_mtime_ns
    again = Recommender.open(film_runs.towers, film_runs.catalogue(), index_dir=tmp_path / "index")
    assert (tmp_path / "index" / "index.json").stat().st_mtime_ns == time
    assert np.array_equal(made.index.vectors, again.index.vectors)
    fewer = Catalogue(film_runs.films.slice(3), "movieId")
    assert len(Recommender.open(film_runs.towers, fewer, index_dir=tmp_path / "index").index) == len(fewer)
    exact = ItemIndexSpec(method="exact")
    Recommender.open(film_runs.towers, fewer, index=exact, index_dir=tmp_path / "index")
    assert (tmp_path / "index" / "index.json").stat().st_mtime_ns > time


def test_an_index_is_of_one_model_in_one_numbers(film_runs: FilmRuns, tmp_path: Path) -> None:
    """Factors have no layers, and both runs are of the same step; nor do layers change where they are frozen."""
    spec = load_run(film_runs.towers / "run.json")
    towers = RetrievalModel.open(film_runs.towers)
    loaded, made = load_model(film_runs.towers), {towers.fingerprint()}
    for numbers in (Numbers(precision="int8"), Numbers(row_type="int8")):
        made.add(RetrievalModel(loaded, towers.workflow, numbers).fingerprint())
    assert len(made) == 3
    for seed in (1, 2):
        training = replace(spec.training, seed=seed, max_steps=2)
        build(replace(spec, model=FACTORS, training=training), tmp_path / f"{seed}").fit()
    for seed in (1, 2):
        kept = Recommender.open(tmp_path / f"{seed}", film_runs.catalogue(), index_dir=tmp_path / "index")
        fresh = Recommender.open(tmp_path / f"{seed}", film_runs.catalogue())
        assert np.array_equal(kept.index.vectors, fresh.index.vectors)


def test_the_command_line(film_runs: FilmRuns, recommender: Recommender, tmp_path: Path) -> None:
    users = pa.table({**USERS, "seen": [[1, 2], [], None, [3]]})
    pq.write_table(users, tmp_path / "users.parquet")
    pyarrow.csv.write_csv(film_runs.films, tmp_path / "films.csv")
    pyarrow.csv.write_csv(film_runs.films.slice(0, 40), tmp_path / "stock.csv")
    given = [film_runs.towers, tmp_path / "users.parquet", "--items", tmp_path / "films.csv", "--key", "movieId"]
    given += ["--out", tmp_path / "out.jsonl", "--ranker", film_runs.ranker, "--k", 3, "--candidates", 12]
    reported = figures("recommend", *given, "--exclude", "seen", "--allow", tmp_path / "stock.csv")
    stock = film_runs.films.column("movieId").to_pylist()[:40]
    expected = recommender.recommend(USERS, 3, candidates=12, exclude=[[1, 2], [], [], [3]], allow=stock)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["row"], row["rank"], row["movieId"]) for row in rows] == [
        (user, 1 + place, item) for user, items in enumerate(expected.items) for place, item in enumerate(items)
    ]
    assert np.allclose([row["score"] for row in rows], np.concatenate(expected.scores))
    assert unnamed(reported, "recommend") == set()
    for where, options in {
        "--out": given,
        "--exclude": [*given, "--force", "--exclude", "saw"],
        "--allow": [*given, "--force", "--allow", tmp_path / "users.parquet"],
    }.items():
        rejected("recommend", *options, where=where)


def test_what_is_rejected(film_runs: FilmRuns, recommender: Recommender) -> None:
    films = film_runs.films
    catalogue = film_runs.catalogue()
    for where, call in {
        "run": lambda: RetrievalModel.open(film_runs.ranker),
        "key": lambda: Catalogue(films, "movie"),
        "items": lambda: Catalogue(films.slice(0, 0), "movieId"),
        "items[1].movieId": lambda: Catalogue({"movieId": [1, 1]}, "movieId"),
        "items[0].movieId": lambda: Catalogue({"movieId": [None, 1]}, "movieId"),
        "score": lambda: Recommender.open(film_runs.towers, catalogue, score="liked"),
        "index": lambda: Recommender(
            RetrievalModel.open(film_runs.towers), Catalogue(films[:5], "movieId"), recommender.index
        ),
        "k": lambda: recommender.recommend(USERS, 0),
        "candidates": lambda: recommender.recommend(USERS, candidates=0),
        "exclude": lambda: recommender.recommend(USERS, exclude=[[]]),
        "exclude[1][1]": lambda: recommender.recommend(USERS, exclude=[[10**9], [1, "318"], [], []]),
        "allow[0]": lambda: recommender.recommend(USERS, allow=["318"]),
        "column 'past_movies'": lambda: recommender.recommend({"userId": [1]}),
        "column 'movieId'": lambda: recommender.recommend({**USERS, "movieId": [1] * 4}),
        "users": lambda: recommender.recommend({**USERS, "userId": [1]}),
    }.items():
        with pytest.raises(ConfigError, check=at(where)):
            call()
    with pytest.raises(ConfigError):
        recommender.recommend({**USERS, "userId": ["a", 1, 2, 3]})
    with pytest.raises(ConfigError, check=at("items")):
        Recommender.open(film_runs.towers, Catalogue({"title": ["a"]}, "title"))
