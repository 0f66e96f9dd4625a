# SPDX-License-Identifier: Apache-2.0
"""Models of users and items are ranked by their own scores, and know the positive items of the train split."""

import numpy as np
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.models.pairs import PairModel
from terarec.spec import MFBPRSpec, NCFSpec, NegativesSpec
from terarec.train.retrieval import evaluate_towers, user_column
from tests.errors import at
from tests.models.every import dataset

COLUMNS = dataset(dense=0, categorical=("a", "b"))
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
    spec = NCFSpec(user="b", item="a", width=4, hidden=(5,), form=form)  # type: ignore[arg-type]
    model = build_model(spec, COLUMNS, seed=1)
    assert isinstance(model, PairModel)
    with torch.no_grad():
        for name in "ab":
            model.embedding.table(name).normal_(0, 1, generator=torch.Generator().manual_seed(ord(name)))
    found = evaluate_towers(model, [batch_of(TEST)], [batch_of(TRAIN)], user=user_column(spec, COLUMNS), k=[2])
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
