# SPDX-License-Identifier: Apache-2.0
"""Of given ids, 0 is an item as any other: models do with it what they do with the lowest id of a workflow's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.models import build_model
from terarec.models.contract import logits_of, training_loss
from terarec.nn.objectives import BinaryObjective
from terarec.spec import (
    BERT4RecSpec,
    BSTSpec,
    DIENSpec,
    DINSpec,
    GRU4RecSpec,
    HSTURankerSpec,
    HSTUSpec,
    MFBPRSpec,
    MultVAESpec,
    NCFSpec,
    NegativesSpec,
    SASRecSpec,
    TargetHistory,
    YouTubeDNNSpec,
)
from terarec.spec.dataset import MISSING_KEY
from tests.models.every import dataset

ROWS = 9
NAMES = ("a", "b", "past")
MADE = replace(dataset(dense=0, categorical=NAMES, rows=ROWS + 1), workflow="w")
GIVEN = replace(
    MADE,
    categorical=tuple(replace(one, rows=ROWS, given=True) if one.name != "b" else one for one in MADE.categorical),
)
ITEMS, USERS = [0, 1, 4, 0, 8, 5], [1, 2, 3, 4, 2, 1]
PAST = [[0, 1], [0], [], [5, 0, 3, 0], [7, 2], [0, 8, 0]]
PAIR: dict[str, Any] = {"user": "b", "item": "a"}
NEXT: dict[str, Any] = {"item": "a", "history": "past"}
WITH: dict[str, Any] = {"sequences": (TargetHistory(target="a", history="past"),), "width": 4, "hidden": (5,)}
SEQUENCE: dict[str, Any] = {**NEXT, "width": 4, "max_length": 4, "dropout": 0.0}
SPECS: dict[str, Any] = {
    "mf_bpr": MFBPRSpec(**PAIR),
    "mf_bpr-sampled_softmax": MFBPRSpec(**PAIR, loss="sampled_softmax", negatives=NegativesSpec(draw="mixed")),
    "mf_bpr-shown": MFBPRSpec(**PAIR, negatives=NegativesSpec(draw="column", column="past")),
    "ncf": NCFSpec(**PAIR),
    "youtube_dnn": YouTubeDNNSpec(**NEXT, loss="softmax"),
    "youtube_dnn-drawn": YouTubeDNNSpec(**NEXT),
    "mult_vae": MultVAESpec(**NEXT, dropout=0.0),
    "sasrec": SASRecSpec(**SEQUENCE),
    "sasrec-softmax": SASRecSpec(**SEQUENCE, loss="softmax"),
    "bert4rec": BERT4RecSpec(**SEQUENCE, loss="sampled_softmax"),
    "gru4rec": GRU4RecSpec(**SEQUENCE, loss="sampled_bce"),
    "hstu": HSTUSpec(**SEQUENCE),
    "din": DINSpec(**WITH),
    "bst": BSTSpec(**WITH, dropout=0.0),
    "hstu_ranker": HSTURankerSpec(**WITH),
    "dien": DIENSpec(**WITH),
}


def batch_of(shift: int) -> Batch:
    bags = [[[item + shift] for item in ITEMS], [[user] for user in USERS], [[key + shift for key in p] for p in PAST]]
    keys = [key for column in bags for bag in column for key in bag]
    return Batch(
        dense=torch.empty(len(ITEMS), 0),
        label=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])[:, None],
        sparse=Jagged(
            names=NAMES,
            keys=torch.tensor(keys),
            offsets=torch.tensor([0, *(len(bag) for column in bags for bag in column)]).cumsum(0),
        ),
    )


def results(model: Any, batch: Batch) -> list[Tensor]:
    torch.manual_seed(0)
    output = model(batch)
    loss = training_loss(model, output, batch, BinaryObjective())
    return [loss, logits_of(model, output)]


@pytest.mark.parametrize("name", ["mf_bpr", "youtube_dnn", "sasrec", "din"])
def test_ids_that_no_workflow_made_are_given(name: str) -> None:
    """Models took id 0 for a missing value there, and metrics for a user or an item."""
    plain = replace(MADE, workflow=None, categorical=tuple(replace(one, given=None) for one in GIVEN.categorical))
    said = replace(plain, categorical=tuple(replace(one, given=False) for one in GIVEN.categorical))
    for columns, missing, first in ((plain, MISSING_KEY, 0), (said, 0, 1), (replace(plain, workflow="w"), 0, 1)):
        assert (columns.missing_key("past"), columns.first_id("past")) == (missing, first)
        model: Any = build_model(SPECS[name], columns)
        assert getattr(model, "first_item", first) == first
        assert getattr(model, "missing", missing) == missing
        assert getattr(model, "_missing", {}) in ({}, {"past": missing})


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("is_training", [False, True])
def test_given_ids_from_0_are_those_of_a_workflow_from_1(name: str, is_training: bool) -> None:
    made, given = (build_model(SPECS[name], columns, seed=1).train(is_training) for columns in (MADE, GIVEN))
    with torch.no_grad():
        for of_made, of_given in zip(made.modules(), given.modules(), strict=True):
            if isinstance(of_made, EmbeddingCollection) and isinstance(of_given, EmbeddingCollection):
                for spec in of_given.specs:
                    table = of_made.table(spec.name)
                    table.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
                    of_given.table(spec.name).copy_(
                        table[len(table) - spec.rows :],
                    )
        dense = {key: value for key, value in made.state_dict().items() if value.is_floating_point() and value.numel()}
        own = given.state_dict()
        given.load_state_dict(
            {key: value for key, value in dense.items() if own[key].shape == value.shape}, strict=False
        )
        expected, found = results(made, batch_of(1)), results(given, batch_of(0))
    for wanted, value in zip(expected, found, strict=True):
        torch.testing.assert_close(value, wanted)
    assert expected[0] > 0
