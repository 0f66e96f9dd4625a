# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/recommend``: what `terarec recommend` writes, limits, and versions that change while it answers."""

import contextlib
import itertools
import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from terarec.apps.item_index import ItemIndex
from terarec.apps.promotion import promote
from terarec.apps.recommend import Recommender
from terarec.apps.served_recommendations import ServedRecommendations
from terarec.config.files import load_recommendations
from terarec.errors import ConfigError, DataNotFoundError, NoSpaceError
from terarec.serve import InferenceSession
from terarec.serve.loading import VersionLoader
from terarec.serve.models import ServedModels
from terarec.serve.protocol import ServerBusyError, UnknownModelError
from terarec.serve.recommending import RecommendRequest
from terarec.serve.repository import ModelRepository
from terarec.serve.request_memory import UNCOUNTED_BYTES, RequestMemory
from terarec.serve.served_model import ServedModel
from terarec.serve.watching import repository_models
from terarec.spec import BatchingSpec, ServedTablesSpec
from terarec.spec.serving import RecommendationSpec
from terarec.spec.serving_options import ServedModelOptions
from terarec.spec.serving_repository import PromotionSpec, RepositorySpec
from tests.apps.conftest import FilmRuns
from tests.apps.test_recommend import USERS
from tests.cli.conftest import figures
from tests.errors import at
from tests.processes import Python
from tests.serve.http.serving import served
from tests.serve.http.test_schemathesis import check_operation
from tests.waiting import PATIENCE, wait_for

PATH = "/v1/recommend"


@dataclass
class Shop:
    """A server of a repository with both models of films.

    Attributes:
        client: Client of it.
        service: What answers.
        models: Its models.
        repository: The repository.
        items: File of the films.
    """

    client: httpx.Client
    service: ServedRecommendations
    models: ServedModels
    repository: Path
    items: Path

    def recommend(self, users: Any = USERS, **fields: Any) -> dict[str, Any]:
        answer = self.client.post(PATH, json={"users": users, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def rejected(self, status: int, where: str, problem: str = "", **body: Any) -> None:
        answer = self.client.post(PATH, json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"].startswith(f"{where}: {problem}"), answer.text


@pytest.fixture(scope="module")
def published(film_runs: FilmRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two versions of the towers, of which the first answers, and a ranking model."""
    path = tmp_path_factory.mktemp("published") / "models"
    for run, name in ((film_runs.towers, "towers"), (film_runs.towers, "towers"), (film_runs.ranker, "ranker")):
        promote(run, path, name)
    ModelRepository(path).model("towers").roll_back()
    return path


@contextlib.contextmanager
def shop_of(
    film_runs: FilmRuns,
    published: Path,
    folder: Path,
    options: ServedModelOptions | None = None,
    *,
    keep_versions: int = 1,
    tables: ServedTablesSpec | None = None,
    **fields: Any,
) -> Iterator[Shop]:
    shutil.copytree(published, folder / "models")
    items = folder / "films.csv"
    pyarrow.csv.write_csv(film_runs.films, items)
    spec = {"retrieval": "towers", "ranker": "ranker", "candidates": 30, "poll_seconds": 1e6, **fields}
    repository = RepositorySpec(path=str(folder / "models"), poll_seconds=1e6, keep_versions=keep_versions)
    with (
        repository_models(repository, VersionLoader(options, tables=tables)) as models,
        ServedRecommendations(RecommendationSpec(items=str(items), key="movieId", **spec), models) as service,
        served(models, recommendations=service) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield Shop(client, service, models, folder / "models", items)


@pytest.fixture(scope="module")
def shop(film_runs: FilmRuns, published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A server that no test changes."""
    with shop_of(film_runs, published, tmp_path_factory.mktemp("shop"), most_items=50, most_candidates=60) as found:
        yield found


def test_answers_are_those_of_the_command_line(film_runs: FilmRuns, shop: Shop, tmp_path: Path) -> None:
    """The same users, filters and numbers; the ranking model scores next to other requests."""
    seen, stock = [[1, 2], [], [], [3]], film_runs.films.column("movieId").to_pylist()[:40]
    pq.write_table(pa.table({**USERS, "seen": seen}), tmp_path / "users.parquet")
    pyarrow.csv.write_csv(film_runs.films.slice(0, 40), tmp_path / "stock.csv")
    options = ["--items", shop.items, "--key", "movieId", "--ranker", film_runs.ranker, "--k", 3, "--candidates", 12]
    options += ["--exclude", "seen", "--allow", tmp_path / "stock.csv", "--out", tmp_path / "out.jsonl"]
    figures("recommend", film_runs.towers, tmp_path / "users.parquet", *options)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for user, columns in enumerate(zip(*USERS.values(), strict=True)):
        one = {name: [value] for name, value in zip(USERS, columns, strict=True)}
        alone = shop.recommend(one, k=3, candidates=12, exclude=[seen[user]], allow=stock)
        assert alone["items"][0] == [row["movieId"] for row in rows if row["row"] == user]
    found = shop.recommend(k=3, candidates=12, exclude=seen, allow=stock, id="7")
    assert [(row["row"], row["rank"], row["movieId"]) for row in rows] == [
        (user, 1 + place, item) for user, items in enumerate(found["items"]) for place, item in enumerate(items)
    ]
    assert np.allclose([row["score"] for row in rows], np.concatenate(found["scores"]), rtol=0, atol=1e-6)
    assert found["retrieval"] == {"model": "towers", "version": "1", "step": 20}
    assert found["ranking"] == {"model": "ranker", "version": "1", "step": 20}
    assert found["id"] == "7"


def test_candidates_count_where_others_hold_the_memory(shop: Shop) -> None:
    """A hundred bytes become columns of all their candidates, which wait for the ranking model."""
    memory = RequestMemory(2**20)
    memory.hold().take(2**20)
    held = memory.hold()
    held.take(UNCOUNTED_BYTES)
    rejected = shop.service.statistics().requests["rejected"]
    with pytest.raises(ServerBusyError, check=at("server", "the request needs")):
        shop.service.take(RecommendRequest(users=USERS, k=6), held)
    assert shop.service.statistics().requests["rejected"] == rejected + 1


def test_the_towers_alone(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    with shop_of(film_runs, published, tmp_path, ranker=None) as shop:
        found = shop.recommend(k=6)
        expected = Recommender.open(film_runs.towers, film_runs.catalogue()).recommend(USERS, 6)
        assert found["items"] == expected.items
        assert np.allclose(found["scores"], expected.scores, rtol=0, atol=1e-6)
        assert found["ranking"] is None
        assert len(shop.recommend(k=4, exclude=found["items"])["items"][0]) == 4


def test_users_who_ask_at_once_get_their_own_items(film_runs: FilmRuns, shop: Shop) -> None:
    """Their vectors are computed, and their candidates are scored, in batches of several requests."""
    users = [{"userId": [1 + number], "past_movies": [[1 + number % 7]]} for number in range(24)]
    expected = [shop.recommend(one, k=1 + number % 4) for number, one in enumerate(users)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda pair: shop.recommend(pair[1], k=1 + pair[0] % 4), enumerate(users)))
    for alone, joined in zip(expected, answers, strict=True):
        assert np.allclose(alone["scores"], joined["scores"], rtol=0, atol=1e-5)
        assert len(joined["items"][0]) == len(alone["items"][0])


def test_nothing_is_left_to_rank(shop: Shop) -> None:
    found = shop.recommend(allow=[10**9])
    assert (found["items"], found["scores"]) == ([[]] * 4, [[]] * 4)
    assert found["ranking"]["version"] == "1"


def test_what_is_wrong_is_one_line(shop: Shop) -> None:
    one = {"userId": [1], "past_movies": [[3]]}
    shop.rejected(400, "users", "got null, expected an object")
    shop.rejected(400, "users.userId", "got 1, expected a list", users={"userId": 1})
    shop.rejected(400, "users", "got columns of [1, 2] values", users={**one, "userId": [1, 2]})
    shop.rejected(400, "users", "got none", users={"userId": [], "past_movies": []})
    shop.rejected(400, "column 'past_movies'", "missing", users={"userId": [1]})
    shop.rejected(400, "column 'movieId'", "is one of the items", users={**one, "movieId": [1]})
    shop.rejected(400, "users", "", users={**one, "user": [1]})
    shop.rejected(400, "column 'userId'[0]", "got true", users={**one, "userId": [True]})
    shop.rejected(400, "column 'past_movies', row 0", "got 3, expected a list", users={**one, "past_movies": [3]})
    shop.rejected(400, "column 'past_movies'[0]", "got {'a': 1}", users={**one, "past_movies": [[{"a": 1}]]})
    shop.rejected(400, "the body", "unknown field 'n'", users=one, n=3)
    for k in (0, -1, True, "3", 1.5):
        shop.rejected(400, "k", "got", users=one, k=k)
    shop.rejected(400, "k", "got 51, expected at most 50", users=one, k=51)
    shop.rejected(400, "candidates", "got 61, expected at most 60", users=one, candidates=61)
    shop.rejected(400, "exclude", "got 2 lists, expected 1", users=one, exclude=[[], []])
    shop.rejected(400, "exclude[0]", "got 1, expected a list", users=one, exclude=[1])
    shop.rejected(400, "exclude[0][1]", "got true", users=one, exclude=[[1, True]])
    shop.rejected(400, "allow[0]", "got [1]", users=one, allow=[[1]])
    shop.rejected(400, "parameters", "got 3", users=one, parameters=3)
    shop.rejected(400, "parameters.priority", "got -1", users=one, parameters={"priority": -1})
    assert shop.client.post(PATH, content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert shop.client.post(PATH, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert shop.client.get(PATH).status_code == 405
    many = {"userId": [1] * 4000, "past_movies": [[]] * 4000}
    shop.rejected(413, "users", "got 4000 with 60 candidates each, expected at most 65536", users=many, candidates=60)


def test_values_of_users_are_bounded_with_their_candidates(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate gets a list as long as the longest one of the users."""
    monkeypatch.setattr("terarec.serve.columns.MOST_REPEATED", 4 * 60)  # a list of three for 60 candidates: one user's
    one = {name: values[:1] for name, values in USERS.items()}
    shop.recommend(one, candidates=60)
    shop.rejected(413, "column 'past_movies'", "got a value of 4 characters or items", users=USERS, candidates=60)


def test_queues_are_those_of_other_requests(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    """A request whose time is over while it waits for others is dropped, and counted."""
    batching = BatchingSpec(max_queue_delay_microseconds=10_000_000)
    options = ServedModelOptions(batching=batching)
    with shop_of(film_runs, published, tmp_path, options, ranker=None) as shop:
        body = {"users": {"userId": [1], "past_movies": [[]]}, "parameters": {"timeout": 1}}
        answer = shop.client.post(PATH, json=body)
        assert answer.status_code == 503
        assert "beyond its timeout" in answer.json()["error"]
        assert shop.service.statistics().requests["expired"] == 1


def test_metrics_by_stage(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    with shop_of(film_runs, published, tmp_path) as shop:
        for _ in range(2):
            shop.recommend()
        shop.rejected(400, "k", users=USERS, k=0)
        shop.rejected(400, "column 'past_movies'", users={"userId": [1]})
        text = shop.client.get("/metrics").text
    for stage in ("retrieve", "rank", "request"):
        assert f'terarec_recommendation_duration_seconds_count{{stage="{stage}"}} 2.0' in text
    assert 'terarec_recommendation_requests_total{outcome="success"} 2.0' in text
    assert 'terarec_recommendation_requests_total{outcome="error"} 1.0' in text  # the other one was no request
    assert "terarec_recommendation_users_total 8.0" in text
    assert f"terarec_recommendation_items {len(film_runs.films)}.0" in text
    assert 'terarec_requests_total{model="ranker",outcome="success",version="1"} 2.0' in text


def test_versions_and_items_change_while_it_answers(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    with shop_of(film_runs, published, tmp_path, poll_seconds=0.02) as shop:
        assert shop.recommend()["retrieval"]["version"] == "1"
        for name, version in (("towers", 2), ("towers", 1)):
            shop.models.pointers.promote(name, version, PromotionSpec())  # type: ignore[union-attr]
            seen = set()
            # No request fails while the index is computed; then the new version answers.
            wait_for(lambda: seen.add(shop.recommend()["retrieval"]["version"]) or str(version) in seen)  # noqa: B023
            assert shop.recommend()["retrieval"]["version"] == str(version)


def test_a_version_whose_rows_are_gone_is_not_available(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    """It was an error 500 until the index of the next version was there."""
    with shop_of(film_runs, published, tmp_path, keep_versions=0, tables=ServedTablesSpec()) as shop:
        assert shop.recommend()["retrieval"]["version"] == "1"
        shop.models.pointers.promote("towers", 2, PromotionSpec())  # type: ignore[union-attr]
        wait_for(lambda: states(shop.models, "towers") == {"1": "UNAVAILABLE", "2": "READY"})
        problem = "version 1 of 'towers' is unloaded, and the next one not indexed; try again"
        wait_for(lambda: shop.client.post(PATH, json={"users": USERS}).status_code == 503)  # its rows go last
        shop.rejected(503, "recommendations", problem, users=USERS)
        assert shop.service.poll() == 1
        assert shop.recommend()["retrieval"]["version"] == "2"


def states(models: ServedModels, name: str) -> dict[str, str]:
    return {state.version: state.state for state in models.index() if state.name == name}


def test_another_file_of_items_takes_over(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    with shop_of(film_runs, published, tmp_path) as shop:
        assert shop.service.poll() == 0
        pyarrow.csv.write_csv(film_runs.films.slice(0, 5), shop.items)
        assert shop.service.poll() == 1
        assert {len(items) for items in shop.recommend()["items"]} == {5}
        shop.items.write_text("title\nwhat\n")
        with pytest.raises(ConfigError, check=at("key")):
            shop.service.poll()
        assert {len(items) for items in shop.recommend()["items"]} == {5}  # the former ones
        assert shop.service.poll() == 0  # which is not tried again at once


def test_an_index_that_could_not_be_made_is_tried_again(
    film_runs: FilmRuns, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, tries = ItemIndex.save, itertools.count(1)

    def full_disk(*arguments: Any, **options: Any) -> None:
        if next(tries) < 3:
            raise NoSpaceError("index", "the disk is full")
        save(*arguments, **options)

    with shop_of(film_runs, published, tmp_path, index_dir=str(tmp_path / "index"), poll_seconds=0.02) as shop:
        monkeypatch.setattr(ItemIndex, "save", full_disk)
        pyarrow.csv.write_csv(film_runs.films.slice(0, 5), shop.items)
        wait_for(lambda: {len(items) for items in shop.recommend()["items"]} == {5})
    assert next(tries) == 4


def test_a_ranker_that_comes_back_is_seen(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    with shop_of(film_runs, published, tmp_path) as shop:
        ranker = shop.models.get("ranker")
        shop.models.retire("ranker", "1")
        pyarrow.csv.write_csv(film_runs.films.slice(0, 5), shop.items)
        with pytest.raises(UnknownModelError, check=at("model 'ranker'")):
            shop.service.poll()
        assert shop.service.poll() == 0
        shop.models.install(ServedModel(ranker.session, ranker.options, name="ranker", version="1"))
        assert shop.service.poll() == 1
        assert {len(items) for items in shop.recommend()["items"]} == {5}


def test_a_share_of_the_users_is_ranked_by_another_version(
    film_runs: FilmRuns, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop_of(film_runs, published, tmp_path, score="score") as shop:
        promote(film_runs.ranker, shop.repository, "ranker", PromotionSpec(share=0.5, by="user"))
        shop.models.pointers.promote("ranker", 2, PromotionSpec(share=0.5, by="user"))  # type: ignore[union-attr]
        wait_for(lambda: shop.models.versions("ranker") == ("1", "2"))
        versions = [shop.recommend(parameters={"user": f"u{number}"})["ranking"]["version"] for number in range(20)]
        assert set(versions) == {"1", "2"}
        assert versions[0] == shop.recommend(parameters={"user": "u0"})["ranking"]["version"]
        # By the score of the version that answers, which may have others, in another order.
        second, names = shop.models.get("ranker", "2").session, vars(InferenceSession)["score_names"].fget
        others = property(lambda session: ("score_like",) if session is second else names(session))
        monkeypatch.setattr(InferenceSession, "score_names", others)
        first_user, second_user = ({"user": f"u{versions.index(version)}"} for version in ("1", "2"))
        assert shop.recommend(parameters=first_user)["ranking"]["version"] == "1"
        problem = "got 'score', expected one of score_like"
        shop.rejected(400, "score", problem, users=USERS, parameters=second_user)


def test_a_model_that_is_unloaded_is_not_available(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    with shop_of(film_runs, published, tmp_path) as shop:
        shutil.rmtree(shop.repository / "ranker")
        shop.models.retire("ranker", "1")
        shop.rejected(404, "model 'ranker'", users=USERS)
        shop.models.retire("towers", "1")
        shop.service.poll()
        shop.rejected(503, "recommendations", "the model 'towers' is not loaded", users=USERS)


@pytest.mark.parametrize(
    ("error", "where", "fields"),
    [
        (UnknownModelError, "model 'films'", {"retrieval": "films"}),
        (UnknownModelError, "model 'films'", {"ranker": "films"}),
        (ConfigError, "run", {"retrieval": "ranker"}),
        (ConfigError, "score", {"score": "liked"}),
    ],
)
def test_models_that_cannot_be_served(
    film_runs: FilmRuns, published: Path, tmp_path: Path, error: type[Exception], where: str, fields: dict[str, str]
) -> None:
    with pytest.raises(error, check=at(where)), shop_of(film_runs, published, tmp_path, **fields):
        pass


def test_keys_are_integers_or_texts(film_runs: FilmRuns, published: Path, tmp_path: Path) -> None:
    dates = pa.array(range(len(film_runs.films)), pa.int32()).cast(pa.date32())
    path = tmp_path / "dates.parquet"
    pq.write_table(film_runs.films.append_column("day", dates), path)
    spec = RecommendationSpec(items=str(path), key="day", retrieval="towers")
    with repository_models(RepositorySpec(path=str(published), control="none"), VersionLoader()) as models:
        with pytest.raises(ConfigError, check=at(path)):
            ServedRecommendations(spec, models)
        with pytest.raises(DataNotFoundError, check=at(tmp_path / "none.csv")):
            ServedRecommendations(replace(spec, items=str(tmp_path / "none.csv")), models)


@pytest.mark.parametrize(
    ("field", "fields"),
    [("candidates", {"candidates": 20_000}), ("score", {"score": "liked"}), ("retrieval", {"retrieval": "a/b"})],
)
def test_descriptions_that_are_wrong(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=at(f"RecommendationSpec.{field}")):
        RecommendationSpec(items="films.csv", key="movieId", **fields)


@pytest.mark.slow
def test_generated_requests_are_answered_as_described(shop: Shop) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{shop.client.base_url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    (recommend,) = [operation for operation in operations if operation.path == PATH]
    check_operation(recommend)
    for operation in operations:
        if operation.path.startswith("/v1/repository/"):
            check_operation(operation)


@pytest.mark.slow
def test_a_server_of_the_command_line(film_runs: FilmRuns, tmp_path: Path) -> None:
    """Of a run alone, whose towers order the items; relative paths count from the description."""
    pyarrow.csv.write_csv(film_runs.films, tmp_path / "films.csv")
    (tmp_path / "recommend.json").write_text(
        '// films\n{"items": "films.csv", "key": "movieId", "retrieval": "towers"}'
    )
    assert load_recommendations(tmp_path / "recommend.json").items == str(tmp_path / "films.csv")
    program = "from terarec.cli import main; main()"
    options = ("--name", "towers", "--recommend", tmp_path / "recommend.json", "--port", 0)
    with contextlib.closing(Python(program, "serve", film_runs.towers, *options)) as server:
        url = server.read_line().split(" at ")[1].partition("/v2/")[0]
        answer = httpx.post(f"{url}{PATH}", json={"users": USERS, "k": 6}, timeout=PATIENCE)
        document = httpx.get(f"{url}/openapi.json", timeout=PATIENCE).json()
        server.send_signal(signal.SIGTERM)
        assert server.wait().returncode == 0
    expected = Recommender.open(film_runs.towers, film_runs.catalogue()).recommend(USERS, 6)
    assert answer.json()["items"] == expected.items
    operation = document["paths"][PATH]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/RecommendRequest")
    jsonschema = pytest.importorskip("jsonschema")
    for name, message in (("RecommendRequest", {"users": USERS, "k": 6}), ("RecommendAnswer", answer.json())):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(message)
