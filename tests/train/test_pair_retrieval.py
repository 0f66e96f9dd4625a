# SPDX-License-Identifier: Apache-2.0
"""Models of users and items are ranked by their own scores, and know the positive items of the train split."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.data import InMemorySource, Reader
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.models.pairs import PairModel
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DynamicTablesSpec,
    MFBPRSpec,
    NCFSpec,
    NegativesSpec,
    TwoTowerSpec,
)
from terarec.spec.dataset import MISSING_KEY
from terarec.spec.model import ModelSpec
from terarec.train.retrieval import Popularity, evaluate_towers, user_column
from tests.errors import at
from tests.models.every import dataset

COLUMNS = dataset(dense=0, categorical=("a", "b"))
DYNAMIC = DynamicTablesSpec()
TRAIN = [(1, 1, 1), (1, 2, 1), (2, 3, 1), (2, 4, 0), (3, 5, 1), (3, 6, 1)]
TEST = [(1, 3, 1), (2, 5, 1), (2, 6, 0), (3, 1, 1), (1, 5, 1)]


def batch_of(triples: list[tuple[int, int, int]]) -> Batch:
    users, items, labels = torch.tensor(triples).T
    return Batch(
        dense=torch.empty(len(triples), 0),
        label=labels.float()[:, None],
        sparse=Jagged(names=("a", "b"), keys=torch.cat([items, users]), offsets=torch.arange(2 * len(triples) + 1)),
    )


@pytest.mark.parametrize("form", ["gmf", "mlp", "neumf"])
def test_the_ranking_is_by_the_scores_of_pairs(form: str) -> None:
    spec = NCFSpec(user="b", item="a", width=4, hidden=(5,), form=form, dropout=0.5)  # type: ignore[arg-type]
    model = build_model(spec, COLUMNS, seed=1)
    assert isinstance(model, PairModel)
    with torch.no_grad():
        for name in "ab":
            model.embedding.table(name).normal_(0, 1, generator=torch.Generator().manual_seed(ord(name)))
    found = evaluate_towers(model, [batch_of(TEST)], [batch_of(TRAIN)], user=user_column(spec, COLUMNS), k=[2])
    assert model.training
    model.eval()  # whose scores have no dropout
    hits, recalls = [], []
    for user in (1, 2, 3):
        relevant = {item for one, item, label in TEST if one == user and label}
        seen = {item for one, item, label in TRAIN if one == user and label}
        with torch.no_grad():
            scores = model.output_logits(model(batch_of([(user, item, 1) for item in range(1, 7)])))[:, 0]
        ranked = [item for item in (scores.argsort(descending=True) + 1).tolist() if item not in seen][:2]
        hits.append(bool(relevant & set(ranked)))
        recalls.append(len(relevant & set(ranked)) / len(relevant))
    assert found.values["hit_rate@2"] == pytest.approx(np.mean(hits))
    assert found.values["recall@2"] == pytest.approx(np.mean(recalls))
    assert (found.users, found.items) == (3, 6)


def test_ids_of_rare_values_are_no_items() -> None:
    spec = MFBPRSpec(user="b", item="a", width=2)
    model = build_model(spec, COLUMNS, seed=1)
    assert isinstance(model, PairModel)
    found = evaluate_towers(model, [batch_of(TEST)], [batch_of(TRAIN)], user="b", k=[1], first_item=4)
    # Of the items 1 to 6 three are left; of the relevant ones (1, 3) and (3, 1) are rare values.
    assert (found.users, found.items, found.relevant, found.relevant_unknown) == (2, 3, 2, 2)
    with pytest.raises(ConfigError, check=at("retrieval", "no item in 'a'")):
        evaluate_towers(model, [batch_of(TEST)], user="b", first_item=7)


def test_no_positive_of_the_train_split_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(MFBPRSpec(user="b", item="a", width=2, negatives=NegativesSpec(count=200)), COLUMNS)
    assert isinstance(model, PairModel)
    model.learn_positives([batch_of(TRAIN[:3]), batch_of(TRAIN[3:])])
    drawn = []
    original = model.sampler.draw

    def draw(*arguments: object) -> object:
        drawn.append(original(*arguments))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(model.sampler, "draw", draw)
    batch = batch_of([(1, 1, 1), (2, 3, 1), (3, 5, 1)])
    model.training_loss(model(batch), batch)
    for user, keys in zip((1, 2, 3), drawn[0].keys.view(3, 200), strict=True):
        own = {item for one, item, label in TRAIN if one == user and label}
        assert set(keys.tolist()) == set(range(1, 7)) - own


@pytest.mark.parametrize("of_users", [COLUMNS.categorical[1], CategoricalColumn(name="b")], ids=["ids", "keys"])
def test_the_loss_of_an_evaluation_is_that_of_a_loaded_model(of_users: CategoricalColumn) -> None:
    """Which does not know the positives of the train split, nor which users were there."""
    spec = NCFSpec(user="b", item="a", width=2, tables=DYNAMIC, negatives=NegativesSpec(count=20))
    columns, losses = replace(COLUMNS, categorical=(COLUMNS.categorical[0], of_users)), []
    for knows in (False, True):
        model = build_model(spec, columns, seed=1)
        assert isinstance(model, PairModel)
        if knows:
            model.learn_positives([batch_of(TRAIN)])
        model(batch_of(TRAIN))  # in training, so that tables of keys have rows
        batch = batch_of([*TEST, (4, 2, 1), (5, 3, 1)])
        losses.append(model.eval().training_loss(model(batch), batch).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "spec",
    [
        MFBPRSpec(user="b", item="a", width=2),
        TwoTowerSpec(user=("b",), item=("a",), width=2, hidden=(), vector_width=2),
    ],
)
def test_metadata_of_the_names_of_keys_are_no_keys(spec: ModelSpec) -> None:
    """As ``--metadata userId,movieId`` keeps the raw values beside the ids."""

    def with_metadata(triples: list[tuple[int, int, int]]) -> Batch:
        users, items, _ = zip(*triples, strict=True)
        raw = {"a": pa.array([10 * item for item in items]), "b": pa.array([f"user {user}" for user in users])}
        return replace(batch_of(triples), metadata=raw)

    found = []
    for made in (batch_of, with_metadata):
        model = build_model(spec, COLUMNS, seed=1)
        if isinstance(model, PairModel):
            model.learn_positives([made(TRAIN)])
            model.training_loss(model(made(TRAIN)), made(TRAIN)).backward()
        popular = Popularity.of_positives("a", [made(TRAIN)])
        found.append(
            [
                evaluate_towers(one, [made(TEST)], [made(TRAIN)], user="b", k=[1], first_item=4)
                for one in (model, popular)
            ]
        )
    assert found[0] == found[1]
    assert found[1][0].items == 3


@pytest.mark.parametrize(
    ("columns", "missing", "users"),
    [
        (replace(COLUMNS, workflow="w"), 0, 3),
        (replace(COLUMNS, categorical=tuple(replace(c, given=None) for c in COLUMNS.categorical)), 0, 4),
        (replace(COLUMNS, workflow="w", categorical=tuple(replace(c, given=True) for c in COLUMNS.categorical)), 0, 4),
        (replace(COLUMNS, categorical=(COLUMNS.categorical[0], CategoricalColumn(name="b"))), MISSING_KEY, 3),
    ],
    ids=["ids of a workflow", "ids of other data", "given ids", "keys"],
)
def test_missing_users_are_no_user(columns: DatasetSpec, missing: int, users: int) -> None:
    users_of, items, label = map(np.array, zip(*TEST, (missing, 2, 1), (missing, 4, 1), strict=True))
    source = InMemorySource(columns, label[:, None], np.empty((len(label), 0)), [items, users_of])
    model = build_model(MFBPRSpec(user="b", item="a", width=2, tables=DYNAMIC), columns, seed=1)
    assert isinstance(model, PairModel)
    found = evaluate_towers(model, Reader(source, batch_size=4), user="b", k=[1])
    assert (found.users, found.items) == (users, 6)
