# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.metrics import evaluate_retrieval
from terarec.metrics.ranking import best_items
from terarec.ragged import Ragged
from tests.errors import at


def lists_of(items):
    """Return the lists of items: a list of items for each user."""
    offsets = np.cumsum([0, *map(len, items)])
    return Ragged(np.array([item for of_user in items for item in of_user], np.int64), offsets)


def by_full_sort(users, items, relevant, seen, k):
    """Return the four metrics at k by sorting all items of each user, in float64."""
    found = {"recall": [], "ndcg": [], "hit_rate": [], "mrr": []}
    for vector, wanted, masked in zip(users, relevant, seen, strict=True):
        wanted = set(wanted) - set(masked)
        if not wanted:
            continue
        products = items.astype(np.float64) @ vector.astype(np.float64)
        order = [item for item in np.lexsort((np.arange(len(items)), -products)) if item not in masked]
        places = [place for place, item in enumerate(order[:k], start=1) if item in wanted]
        ideal = sum(1 / math.log2(place + 1) for place in range(1, min(k, len(wanted)) + 1))
        found["recall"].append(len(places) / len(wanted))
        found["ndcg"].append(sum(1 / math.log2(place + 1) for place in places) / ideal)
        found["hit_rate"].append(float(bool(places)))
        found["mrr"].append(1 / places[0] if places else 0.0)
    return {f"{name}@{k}": float(np.mean(values)) for name, values in found.items()}, len(found["mrr"])


def planted(num_users, num_items, width, seed):
    """Return vectors of whole numbers, whose float32 products are exact and often equal, and items of each user."""
    rng = np.random.default_rng(seed)
    users = rng.integers(-2, 3, (num_users, width)).astype(np.float32)
    items = rng.integers(-2, 3, (num_items, width)).astype(np.float32)
    relevant = [rng.integers(0, num_items, rng.integers(0, 6)).tolist() for _ in range(num_users)]
    seen = [rng.integers(0, num_items, rng.integers(0, 9)).tolist() for _ in range(num_users)]
    return users, items, relevant, seen


@pytest.mark.parametrize("block_bytes", [1, 4 * 31 * 7, 1 << 20])
@pytest.mark.parametrize(("num_items", "width"), [(31, 2), (31, 5), (9, 3)])
def test_equals_a_full_sort_in_float64(num_items, width, block_bytes):
    users, items, relevant, seen = planted(40, num_items, width, seed=num_items + width)
    lengths = [1, 2, 5, num_items]
    results = evaluate_retrieval(
        torch.from_numpy(users),
        torch.from_numpy(items),
        lists_of(relevant),
        seen=lists_of(seen),
        k=lengths,
        block_bytes=block_bytes,
    )
    for k in lengths:
        expected, count = by_full_sort(users, items, relevant, seen, k)
        assert results.users == count
        assert {name: results.values[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    left_out = sum(len(set(wanted) & set(masked)) for wanted, masked in zip(relevant, seen, strict=True))
    assert results.relevant_seen == left_out > 0
    assert results.relevant == sum(map(len, map(set, relevant))) - left_out
    assert results.items == num_items


def test_without_seen_items_all_are_ranked():
    users, items, relevant, _ = planted(25, 20, 3, seed=1)
    results = evaluate_retrieval(torch.from_numpy(users), torch.from_numpy(items), lists_of(relevant), k=[4])
    expected, _ = by_full_sort(users, items, relevant, [[]] * 25, 4)
    assert results.values == pytest.approx(expected, rel=1e-12)


def test_a_known_case():
    results = evaluate_retrieval(
        torch.tensor([[1.0], [1.0], [1.0]]),
        torch.tensor([[4.0], [3.0], [2.0], [1.0]]),
        lists_of([[1, 3], [0], [2]]),
        seen=lists_of([[0], [0], []]),
        k=[1, 2],
        metrics=["recall", "hit_rate", "mrr", "map"],
    )
    # The first user is shown 1, 2, 3; the second has seen what is relevant; the third is shown 0, 1, 2, 3.
    assert (results.users, results.relevant, results.relevant_seen) == (2, 3, 1)
    assert results.values == {
        "recall@1": 0.25,
        "hit_rate@1": 0.5,
        "mrr@1": 0.5,
        "map@1": 0.5,
        "recall@2": 0.25,
        "hit_rate@2": 0.5,
        "mrr@2": 0.5,
        "map@2": 0.25,
    }


def test_no_user_counts():
    vectors = torch.ones(2, 3)
    results = evaluate_retrieval(vectors, vectors, lists_of([[], [1]]), seen=lists_of([[0], [1]]), k=[1])
    assert results.users == 0
    assert all(math.isnan(value) for value in results.values.values())


@pytest.mark.parametrize("k", [1, 3, 8, 11])
def test_the_lower_number_comes_first_among_equal_scores(k):
    rng = np.random.default_rng(k)
    scores = rng.integers(0, 3, (50, 11)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(best_items(torch.from_numpy(scores), k).numpy(), expected)


VECTORS = torch.ones(2, 3)
GOOD = lists_of([[0], [1]])


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"user_vectors": torch.ones(2, 4)}, ("vectors", "got users [2, 4] and items [2, 3]")),
        ({"item_vectors": torch.ones(0, 3)}, ("vectors", "at least one item")),
        ({"item_vectors": torch.tensor([[1.0] * 3, [math.nan] * 3])}, ("item_vectors", "row 1")),
        ({"user_vectors": torch.full((2, 3), 3e38)}, ()),
        ({"relevant": lists_of([[0]])}, ("relevant", "got offsets [2]")),
        ({"seen": lists_of([[0], [2]])}, ("seen.values", "got 2")),
        ({"seen": Ragged(np.array([0]), np.array([0, 2, 1]))}, ("seen.offsets",)),
        ({"relevant": Ragged(np.array([0.0, 1.0]), np.array([0, 1, 2]))}, ("relevant.values", "got float64")),
        ({"k": [3]}, ("k", "got 3")),
        ({"k": []}, ("k, metrics", "got none")),
        ({"metrics": ["auc"]}, ("metrics", "got 'auc'")),
    ],
)
def test_bad_input_is_named(arguments, place):
    given = {"user_vectors": VECTORS, "item_vectors": VECTORS, "relevant": GOOD, "k": [1]} | arguments
    if not place:  # infinite products are ranked; undefined ones are not
        evaluate_retrieval(**given)
        given["item_vectors"] = torch.tensor([[3e38, -3e38, 1.0], [1.0, 1.0, 1.0]])
        place = ("scores", "got NaN")
    with pytest.raises(ConfigError, check=at(*place)):
        evaluate_retrieval(**given)
