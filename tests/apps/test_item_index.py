# SPDX-License-Identifier: Apache-2.0
"""The items with the largest products: exact and by inverted lists, with filters, saved and read, and of a table."""

from pathlib import Path

import numpy as np
import pytest

from terarec.apps.item_index import ItemIndex
from terarec.errors import ConfigError, FormatError, MissingDependencyError
from terarec.export.table_rows import table_chunks
from terarec.spec import ItemIndexSpec
from tests.errors import at
from tests.serve.conftest import TrainedRun

ITEMS, WIDTH = 3_000, 8
RNG = np.random.default_rng(0)
# Lengths differ, so that a search by distance alone would find other items.
VECTORS = (RNG.standard_normal((ITEMS, WIDTH)) * RNG.lognormal(0, 0.2, (ITEMS, 1))).astype(np.float32)
KEYS = RNG.permutation(10 * ITEMS)[:ITEMS]
QUERIES = RNG.standard_normal((25, WIDTH)).astype(np.float32)
EXCLUDE = [RNG.choice(KEYS, length).tolist() for length in RNG.integers(0, 60, len(QUERIES))]
METHODS = {
    "exact": ItemIndexSpec(method="exact"),
    # Half of the lists: with vectors without clusters, which are the hardest, fewer find less than nearly all.
    "lists": ItemIndexSpec(method="lists", lists=32, probes=16),
}


@pytest.fixture(scope="module", params=list(METHODS))
def index(request: pytest.FixtureRequest) -> ItemIndex:
    if request.param == "lists":
        pytest.importorskip("faiss", reason="the extra 'ann' is not installed")
    return ItemIndex(VECTORS, KEYS, METHODS[request.param])


def best(query: np.ndarray, k: int, *, exclude: object = (), allow: object = None) -> list[int]:
    """By all products, one query at a time."""
    allowed = None if allow is None else set(allow)  # type: ignore[call-overload]
    found = sorted(zip(-(VECTORS @ query), KEYS.tolist(), strict=True))
    names = [key for _, key in found if key not in set(exclude) and (allowed is None or key in allowed)]  # type: ignore[call-overload]
    return names[:k]


def recall(found: np.ndarray, expected: list[list[int]]) -> float:
    shares = [len(set(row) & set(wanted)) / len(wanted) for row, wanted in zip(found.tolist(), expected, strict=True)]
    return float(np.mean(shares))


def test_the_best_items(index: ItemIndex) -> None:
    found = index.search(QUERIES, 20)
    expected = [best(query, 20) for query in QUERIES]
    assert recall(found.keys, expected) > (0.97 if index.method == "lists" else 0.9999)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    row_of = dict(zip(KEYS.tolist(), VECTORS, strict=True))
    products = [[row_of[key] @ query for key in row] for row, query in zip(found.keys.tolist(), QUERIES, strict=True)]
    assert np.allclose(found.scores, products, atol=1e-5)


def test_excluded_items_are_not_found_and_others_take_their_place(index: ItemIndex) -> None:
    exclude = [[*keys, *best(query, 5)] for keys, query in zip(EXCLUDE, QUERIES, strict=True)]
    found = index.search(QUERIES, 20, exclude=exclude)
    expected = [best(query, 20, exclude=keys) for query, keys in zip(QUERIES, exclude, strict=True)]
    assert found.keys.shape == (len(QUERIES), 20)
    assert not any(set(row) & set(keys) for row, keys in zip(found.keys.tolist(), exclude, strict=True))
    assert recall(found.keys, expected) > (0.97 if index.method == "lists" else 0.9999)


def test_allowed_items_alone_are_found_exactly(index: ItemIndex) -> None:
    allow = np.sort(RNG.choice(KEYS, 40, replace=False))
    found = index.search(QUERIES, 10, exclude=EXCLUDE, allow=np.concatenate([allow, allow[:3], [10**9]]))
    for row, query, keys in zip(found.keys.tolist(), QUERIES, EXCLUDE, strict=True):
        assert row == best(query, 10, exclude=keys, allow=allow.tolist())
    lists = [RNG.choice(KEYS, size).tolist() for size in RNG.integers(0, 15, len(QUERIES))]
    found = index.search(QUERIES, 10, exclude=EXCLUDE, allow=lists)
    for row, query, keys, mine in zip(found.keys.tolist(), QUERIES, EXCLUDE, lists, strict=True):
        expected = best(query, 10, exclude=keys, allow=mine)
        assert row == expected + [-1] * (10 - len(expected))


def test_fewer_items_than_requested(index: ItemIndex) -> None:
    small = ItemIndex(VECTORS[:7], KEYS[:7], index.spec)
    found = small.search(QUERIES[:2], 9, exclude=[KEYS[:2], []])
    assert sorted(found.keys[1].tolist()) == sorted([-1, -1, *KEYS[:7].tolist()])
    assert sorted(found.keys[0].tolist()) == sorted([-1] * 4 + KEYS[2:7].tolist())
    assert np.isneginf(found.scores[found.keys < 0]).all()
    assert small.search(QUERIES[:0], 3).keys.shape == (0, 3)
    assert small.search(QUERIES[:1], 2, allow=np.empty(0, np.int64)).keys.tolist() == [[-1, -1]]


def test_of_items_with_one_vector_the_first_are_found(index: ItemIndex) -> None:
    """As items that no training sample has: they share the vector of unseen values."""
    distinct = 100
    copies = ItemIndex(VECTORS[np.arange(ITEMS) % distinct], spec=index.spec)
    found = copies.search(QUERIES, 40, exclude=[range(number) for number in range(len(QUERIES))])
    for number, (row, query) in enumerate(zip(found.keys, QUERIES, strict=True)):
        products = (VECTORS[:distinct] @ query)[np.arange(number, ITEMS) % distinct]
        assert row.tolist() == (number + np.argsort(-products, kind="stable")[:40]).tolist()


def test_it_is_saved_and_read(index: ItemIndex, tmp_path: Path) -> None:
    index.save(tmp_path / "index", source={"of": "a"})
    read = ItemIndex.load(tmp_path / "index", source={"of": "a"})
    assert read is not None
    assert (read.method, read.spec) == (index.method, index.spec)
    assert np.array_equal(read.search(QUERIES, 20).keys, index.search(QUERIES, 20).keys)
    assert ItemIndex.load(tmp_path / "index", source={"of": "b"}) is None
    index.save(tmp_path / "index", source={"of": "b"})
    assert ItemIndex.load(tmp_path / "index", source={"of": "b"}) is not None
    for file in set((tmp_path / "index").iterdir()) - {tmp_path / "index" / "index.json"}:
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(FormatError):
            ItemIndex.load(tmp_path / "index", source={"of": "b"})
        file.write_bytes(content)
    (tmp_path / "index" / "other").touch()
    with pytest.raises(ConfigError):
        index.save(tmp_path / "index")


def test_lists_with_fewer_items_than_are_wanted_are_completed() -> None:
    pytest.importorskip("faiss", reason="the extra 'ann' is not installed")
    index = ItemIndex(VECTORS, KEYS, ItemIndexSpec(method="lists", lists=64, probes=1))
    wanted = ITEMS // 2
    found = index.search(QUERIES[:2], wanted, exclude=[KEYS[:9], []])
    assert found.keys[1].tolist() == best(QUERIES[1], wanted)
    assert found.keys[0].tolist() == best(QUERIES[0], wanted, exclude=KEYS[:9].tolist())


def test_small_catalogues_are_searched_exactly() -> None:
    assert ItemIndex(VECTORS).method == "exact"
    assert ItemIndex(VECTORS).search(VECTORS[:1], 1).keys.tolist() == [[int(np.argmax(VECTORS @ VECTORS[0]))]]


def test_lists_need_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(MissingDependencyError):
        ItemIndex(VECTORS, spec=ItemIndexSpec(exact_items=ITEMS - 1))


def test_rows_of_a_table(trained: TrainedRun) -> None:
    [(keys, vectors, _)] = table_chunks(trained.path, "C3")
    index = ItemIndex.of_table(trained.path, "C3")
    found = index.search(vectors[5:6], 3)
    products = vectors @ vectors[5]
    assert found.keys[0].tolist() == keys[np.argsort(-products, kind="stable")[:3]].tolist()
    with pytest.raises(ConfigError, check=at("table")):
        ItemIndex.of_table(trained.path, "C99")


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("vectors", lambda: ItemIndex(VECTORS[:0])),
        ("vectors", lambda: ItemIndex(VECTORS[0])),
        ("vectors[2]", lambda: ItemIndex(np.where(np.arange(ITEMS)[:, None] == 2, np.nan, VECTORS))),
        ("keys", lambda: ItemIndex(VECTORS, KEYS[:-1])),
        ("keys", lambda: ItemIndex(VECTORS, np.zeros(ITEMS, np.int64))),
        ("keys", lambda: ItemIndex(VECTORS, -KEYS - 1)),
        ("queries", lambda: ItemIndex(VECTORS).search(QUERIES[:, 1:], 3)),
        ("queries[0]", lambda: ItemIndex(VECTORS).search(QUERIES[:1] * np.inf, 3)),
        ("k", lambda: ItemIndex(VECTORS).search(QUERIES, 0)),
        ("exclude", lambda: ItemIndex(VECTORS).search(QUERIES, 3, exclude=[[1]])),
        ("allow", lambda: ItemIndex(VECTORS).search(QUERIES, 3, allow=[[1.5]] * len(QUERIES))),
    ],
)
def test_what_is_rejected(where: str, call: object) -> None:
    with pytest.raises(ConfigError, check=at(where)):
        call()  # type: ignore[operator]
