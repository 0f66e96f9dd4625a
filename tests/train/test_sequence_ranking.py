# SPDX-License-Identifier: Apache-2.0
"""All items are ranked for each history, without its own, as a loop over them does."""

import math
from dataclasses import replace
from typing import cast

import pyarrow as pa
import pytest
import torch

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.models.sequences import SequenceModel
from terarec.spec import SASRecSpec
from terarec.train.retrieval import Popularity
from terarec.train.sequence_ranking import evaluate_sequences
from tests.errors import at
from tests.models.test_sequences import BATCH, COLUMNS, HISTORIES, ITEMS, ROWS, batch_of

SPEC = SASRecSpec(item="a", history="past", width=4, max_length=3, layers=1, inner=6)


def model() -> SequenceModel:
    return cast(SequenceModel, build_model(SPEC, COLUMNS, seed=1))


def expected(scores: list[list[float]], k: int) -> tuple[float, float]:
    """Hit rate and NDCG of the lists of k, by sorting all items."""
    hits, gains, users = 0, 0.0, 0
    for of_items, history, item in zip(scores, HISTORIES, ITEMS, strict=True):
        ranked = sorted((-score, key) for key, score in enumerate(of_items, start=1) if key not in history)
        place = [key for _, key in ranked].index(item)
        users += 1
        if place < k:
            hits += 1
            gains += 1 / math.log2(place + 2)
    return hits / users, gains / users


@pytest.mark.parametrize("k", [1, 3])
def test_metrics_are_those_of_the_sorted_items(k: int) -> None:
    own = model().eval()
    with torch.no_grad():
        scores = own.user_vectors(BATCH) @ own.vectors_of_items(torch.arange(1, ROWS)).t()
    results = evaluate_sequences(
        own.train(), [batch_of(HISTORIES[:2], ITEMS[:2]), batch_of(HISTORIES[2:], ITEMS[2:])], k=[k]
    )
    found = (results.values[f"hit_rate@{k}"], results.values[f"ndcg@{k}"])
    assert found == pytest.approx(expected(scores.tolist(), k))
    assert (results.users, results.items) == (len(ITEMS), ROWS - 1)
    assert own.training


def test_popularity_counts_the_train_split() -> None:
    train = [batch_of([[1, 2], [2, 0]], [3, 3])]
    counts = [1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    results = evaluate_sequences(Popularity.of_sequences(model(), train), [BATCH], k=[2])
    found = (results.values["hit_rate@2"], results.values["ndcg@2"])
    assert found == pytest.approx(expected([counts] * len(ITEMS), 2))


@pytest.mark.parametrize("longest", [3, 9])
def test_popularity_counts_events_once_where_each_is_a_sample(longest: int) -> None:
    """A history is that of the sample before with its item: its items were counted again for each later event."""
    logs = [[1, 2, 3, 2, 5, 6], [2, 7, 2, 1], [5], [8, 8, 2]]
    histories = [log[max(0, place - longest) : place] for log in logs for place in range(len(log))]
    items = [item for log in logs for item in log]
    parts = [slice(start, start + 4) for start in range(0, len(items), 4)]
    train = [batch_of(histories[part], items[part]) for part in parts]
    popular = Popularity.of_sequences(model(), train)
    assert popular.vectors_of_items(torch.arange(1, ROWS))[:, 0].tolist() == [2, 5, 1, 0, 2, 1, 1, 2]


@pytest.mark.parametrize("popular", [False, True])
def test_ids_of_rare_values_are_no_items(popular: bool) -> None:
    """They stand for many items and for all that training did not have, so that one hit was a hit for all of these."""
    ranked = Popularity.of_sequences(model(), [BATCH]) if popular else model()
    results = evaluate_sequences(ranked, [BATCH], k=[1, 5], first_item=3)
    # The items 2 and 1 are rare values; 4, 6, 8 and 7 are left.
    assert (results.users, results.items, results.relevant, results.relevant_unknown) == (4, ROWS - 3, 4, 2)
    with torch.no_grad():
        scores = (ranked.eval().user_vectors(BATCH) @ ranked.vectors_of_items(torch.arange(3, ROWS)).t()).tolist()
    hits = 0
    for of_items, history, item in zip(scores, HISTORIES, ITEMS, strict=True):
        ranking = sorted((-score, key) for key, score in enumerate(of_items, start=3) if key not in history)
        hits += item in [key for _, key in ranking[:1]]
    assert results.values["hit_rate@1"] == hits / 4
    with pytest.raises(ConfigError, check=at("retrieval", "no item in 'a'")):
        evaluate_sequences(ranked, [BATCH], first_item=ROWS)


def test_samples_of_a_label_of_0_are_left_out() -> None:
    labels = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    popular = Popularity.of_sequences(model(), [batch_of(HISTORIES, ITEMS, labels)])
    assert popular.vectors_of_items(torch.arange(1, ROWS))[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    results = evaluate_sequences(model(), [batch_of(HISTORIES, ITEMS, labels)])
    assert (results.users, results.relevant) == (1, 1)
    assert set(results.values) >= {"hit_rate@5", "ndcg@5"}


def test_the_items_of_a_user_are_relevant_at_once() -> None:
    """Each sample had a ranking of its own, in which the other items of its user were wrong ones."""
    users = [7, 4, 7, None, 4, 7]

    def part(of: slice) -> Batch:
        return replace(batch_of(HISTORIES[of], ITEMS[of]), metadata={"user": pa.array(users[of], pa.int64())})

    own = model().eval()
    results = evaluate_sequences(
        own, [part(slice(0, 2)), part(slice(2, 6))], user="user", k=[2], metrics=["recall", "ndcg"]
    )
    with torch.no_grad():
        scores = (own.user_vectors(BATCH) @ own.vectors_of_items(torch.arange(1, ROWS)).t()).tolist()
    recalls, gains = 0.0, 0.0
    for first, relevant in ((0, {4, 6, 7}), (1, {2, 1})):  # of the users 7 and 4
        of_first = [(-score, key) for key, score in enumerate(scores[first], start=1) if key not in HISTORIES[first]]
        is_hit = [key in relevant for _, key in sorted(of_first)[:2]]
        recalls += sum(is_hit) / len(relevant)
        gains += (is_hit[0] + is_hit[1] / math.log2(3)) / (1 + 1 / math.log2(3))
    assert results.values == pytest.approx({"recall@2": recalls / 2, "ndcg@2": gains / 2})
    assert (results.users, results.relevant) == (2, 5)
    with pytest.raises(ConfigError, check=at("retrieval", "no sample with a user in column 'user'")):
        evaluate_sequences(own, [part(slice(3, 4))], user="user")
    with pytest.raises(ConfigError, check=at("column 'user'", "not in the batch")):
        evaluate_sequences(own, [BATCH], user="user")


def test_what_cannot_be_ranked_is_reported() -> None:
    with pytest.raises(ConfigError, check=at("retrieval", "got no sample")):
        evaluate_sequences(model(), [])
    with pytest.raises(ConfigError, check=at("retrieval", "got no sample")):
        evaluate_sequences(Popularity.of_sequences(model(), [BATCH]), [])
    with pytest.raises(ConfigError, check=at("k", "got 9")):
        evaluate_sequences(model(), [BATCH], k=[9])
