# SPDX-License-Identifier: Apache-2.0
"""Items for histories by models that read them: by the command and by a server, against scores of all pairs."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.apps.recipes.reproduce import prepare_sequences
from terarec.apps.recommend import Catalogue, Recommender
from terarec.apps.served_recommendations import ServedRecommendations
from terarec.errors import ConfigError
from terarec.serve import InferenceSession
from terarec.serve.models import ServedModels
from terarec.serve.served_model import ServedModel
from terarec.spec import AdamSpec, BERT4RecSpec, MultVAESpec, RunSpec, SASRecSpec, TrainingSpec, YouTubeDNNSpec
from terarec.spec.serving import RecommendationSpec
from terarec.train.run import build
from tests.apps.recipes.sequences import ITEMS, write_planted_sequences
from tests.cli.conftest import figures
from tests.errors import at
from tests.serve.http.serving import served
from tests.waiting import PATIENCE

HISTORIES: list[list[int] | None] = [[1, 2, 3], [7], [], None, [12, 1, 2, 3, 4, 5]]
CATALOGUE = list(range(ITEMS, 0, -1))  # not in the order of the ids
MODELS = {
    "sasrec": SASRecSpec(item="item", history="history", width=8, max_length=4, layers=1, inner=8, dropout=0.0),
    "bert4rec": BERT4RecSpec(item="item", history="history", width=8, max_length=4, layers=1, inner=8, dropout=0.0),
    "youtube_dnn": YouTubeDNNSpec(item="item", history="history", width=8, hidden=(8,)),
    "mult_vae": MultVAESpec(item="item", history="history", hidden=(8,), latent=4),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each model."""
    root = tmp_path_factory.mktemp("sequences")
    prepare_sequences(write_planted_sequences(root / "files") / "Beauty.txt", root / "data")
    training = TrainingSpec(batch_size=32, epochs=3, eval_split=None, reader_threads=1)
    rate = AdamSpec(lr=0.02)
    for name, model in MODELS.items():
        spec = RunSpec(
            data=str(root / "data"), model=model, training=training, dense_optimizer=rate, sparse_optimizer=rate
        )
        build(spec, root / name).fit()
    return {name: root / name for name in MODELS}


def recommender_of(run: Path) -> Recommender:
    return Recommender.open(run, Catalogue({"item": CATALOGUE}, "item"))


def logits_of_all(run: Path, history: list[int] | None) -> np.ndarray:
    """The logit of each item of the catalogue, scored as a pair with the history."""
    records = {"item": CATALOGUE, "history": [history] * ITEMS}
    scores = InferenceSession.open(run).predict(records)[:, 0].astype(np.float64)
    return np.log(scores / (1 - scores))


@pytest.mark.parametrize("kind", MODELS)
def test_items_are_those_of_the_greatest_scores(runs: dict[str, Path], kind: str) -> None:
    recommender = recommender_of(runs[kind])
    assert recommender.user_columns == ("history",)
    found = recommender.recommend({"history": HISTORIES}, 5)
    for history, items, scores in zip(HISTORIES, found.items, found.scores, strict=True):
        logits = logits_of_all(runs[kind], history)
        order = np.argsort(-logits, kind="stable")[:5]
        assert items == [CATALOGUE[place] for place in order]
        assert np.allclose(scores, logits[order], atol=1e-4)
    if kind not in ("sasrec", "bert4rec"):
        return
    # Without a history every score is 0, and the items come as the catalogue has them.
    assert found.items[2] == found.items[3] == CATALOGUE[:5]
    assert found.scores[2] == [0.0] * 5


def test_seen_items_are_left_out_and_candidates_are_scored(runs: dict[str, Path]) -> None:
    recommender = recommender_of(runs["sasrec"])
    unseen = recommender.recommend({"history": HISTORIES[:2]}, ITEMS, exclude=HISTORIES[:2])  # type: ignore[arg-type]
    assert [len(items) for items in unseen.items] == [ITEMS - 3, ITEMS - 1]
    candidates = [4, 9, 2]
    scored = recommender.recommend({"history": HISTORIES[:1]}, len(candidates), allow=candidates)
    logits = dict(zip(CATALOGUE, logits_of_all(runs["sasrec"], HISTORIES[0]), strict=True))
    assert sorted(scored.items[0]) == sorted(candidates)
    assert np.allclose(scored.scores[0], [logits[item] for item in scored.items[0]], atol=1e-4)


def test_an_item_that_is_no_id_is_reported(runs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, check=at("column 'history', row 0", "got 13")):
        recommender_of(runs["sasrec"]).recommend({"history": [[1, ITEMS + 1]]})


@pytest.fixture(scope="module")
def client(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server of the model that recommends."""
    items = tmp_path_factory.mktemp("items") / "items.parquet"
    pq.write_table(pa.table({"item": CATALOGUE}), items)
    spec = RecommendationSpec(items=str(items), key="item", poll_seconds=1e6)
    with ServedModels() as models:
        models.install(ServedModel(InferenceSession.open(runs["sasrec"])))
        with (
            ServedRecommendations(spec, models) as service,
            served(models, recommendations=service) as server,
            httpx.Client(base_url=server.url, timeout=PATIENCE) as found,
        ):
            yield found


def test_a_server_answers_as_the_command(runs: dict[str, Path], client: httpx.Client, tmp_path: Path) -> None:
    pq.write_table(pa.table({"history": HISTORIES}), tmp_path / "users.parquet")
    pq.write_table(pa.table({"item": CATALOGUE}), tmp_path / "items.parquet")
    options = ["--items", tmp_path / "items.parquet", "--key", "item", "--k", 4, "--exclude", "history"]
    figures("recommend", runs["sasrec"], tmp_path / "users.parquet", *options, "--out", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    body = {"users": {"history": HISTORIES}, "k": 4, "exclude": [history or [] for history in HISTORIES]}
    answer = client.post("/v1/recommend", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [(row["row"], row["item"]) for row in rows] == [
        (user, item) for user, items in enumerate(found["items"]) for item in items
    ]
    assert np.allclose([row["score"] for row in rows], np.concatenate(found["scores"]), rtol=0, atol=1e-6)
    assert found["ranking"] is None


def test_a_server_reports_an_item_that_is_no_id(client: httpx.Client) -> None:
    answer = client.post("/v1/recommend", json={"users": {"history": [[ITEMS + 1]]}})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("column 'history', row 0: got 13")
