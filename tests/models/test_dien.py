# SPDX-License-Identifier: Apache-2.0
"""The auxiliary loss of DIEN and its gradients: each state predicts the next item of its history, not drawn ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.models import build_model, contract
from terarec.models.histories import DIEN
from terarec.nn.negatives import Negatives, Sampler
from terarec.nn.objectives import BinaryObjective
from terarec.spec import DIENSpec, DynamicTablesSpec, NegativesSpec
from tests.errors import at
from tests.models.every import HISTORY, dataset
from tests.models.formulas import Weights, dien_states
from tests.models.gradients import check_gradients
from tests.models.test_formulas import random_model, weights_of

COLUMNS = dataset(dense=0, categorical=("a", "past"))
HISTORIES = [[1, 2, 0, 3], [], [4], [5, 6], [0, 0], [2, 2, 2, 1]]
ITEMS = [4, 5, 0, 6, 1, 3]
SPEC = DIENSpec(width=4, sequences=HISTORY, hidden=(6,), activation="relu", auxiliary=0.5)


def batch_of(histories: list[list[int]], items: list[int], weight: Tensor | None = None) -> Batch:
    lengths = [1] * len(items) + [len(history) for history in histories]
    return Batch(
        dense=torch.empty(len(items), 0),
        label=torch.zeros(len(items), 1),
        sparse=Jagged(
            names=("a", "past"),
            keys=torch.tensor([*items, *(key for history in histories for key in history)]),
            offsets=torch.tensor([0, *lengths]).cumsum(0),
        ),
        weight=weight,
    )


@pytest.mark.parametrize("draw", ["uniform", "batch", "hard"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_auxiliary_loss_is_that_of_the_formula(
    draw: str, is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, negatives=NegativesSpec(count=2, draw=draw))  # type: ignore[arg-type]
    model = random_model(spec, COLUMNS)
    assert isinstance(model, DIEN)
    drawn: list[Negatives] = []
    original = Sampler.draw

    def kept(self: Sampler, *arguments: object) -> Negatives:
        drawn.append(original(self, *arguments))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(Sampler, "draw", kept)
    weight = torch.tensor([2.0, 1.0, 1.0, 0.5, 1.0, 1.0]) if is_weighted else None
    batch = batch_of(HISTORIES, ITEMS, weight)
    torch.manual_seed(0)
    with torch.no_grad():
        evaluated = model.eval()(batch)
        assert not model.auxiliary_loss(evaluated, batch)
    output = model.train()(batch)
    found = contract.training_loss(model, output, batch, BinaryObjective())
    plain = BinaryObjective().loss(contract.logits_of(model, output), batch)
    torch.testing.assert_close(contract.logits_of(model, output), contract.logits_of(model, evaluated))

    assert drawn[0].is_valid.all()
    assert len(drawn[0].keys) == 2 * 6
    factors = np.ones(6) if weight is None else weight.numpy()

    def expected(w: Weights) -> float:
        losses, negatives = [], iter(drawn[0].keys.tolist())
        for sample, history in enumerate(HISTORIES):
            keys = [key for key in history if key]
            vectors = [w.tables["a"][key] for key in keys]
            terms = []
            for state, following in zip(dien_states(w, "attention.0", vectors, 4), keys[1:], strict=False):
                others = [next(negatives) for _ in range(2)]
                assert not set(others) & {0, *keys, ITEMS[sample]}
                own = np.logaddexp(0, -state @ w.tables["a"][following])
                terms.append(own + np.mean([np.logaddexp(0, state @ w.tables["a"][other]) for other in others]))
            losses.append(np.mean(terms) if terms else 0.0)
        return float(0.5 * np.mean(factors * losses))

    check_gradients(model, weights_of(model), found - plain, expected, tolerance=1e-4)


def test_any_keys_have_the_other_items_of_the_batch() -> None:
    columns = dataset(dense=0, categorical=("a", "past"), rows=None)
    spec = replace(SPEC, tables=DynamicTablesSpec(), mask_missing=False, negatives=NegativesSpec(draw="batch"))
    model = build_model(spec, columns)
    big = 1 << 60
    batch = batch_of([[big + key for key in history] for history in HISTORIES], [big + item for item in ITEMS])
    output = model(batch)
    loss = contract.training_loss(model, output, batch, BinaryObjective())
    loss.backward()
    assert loss.isfinite()
    assert output.auxiliary.count_nonzero() == 4


def test_what_cannot_be_drawn_is_rejected() -> None:
    columns = dataset(dense=0, categorical=("a", "past"), rows=None)
    with pytest.raises(ConfigError, check=at("dien: negatives", "'uniform' for a column of any keys")):
        build_model(replace(SPEC, tables=DynamicTablesSpec()), columns)
    with pytest.raises(ConfigError, check=at("dien: negatives", "got 1 items")):
        build_model(SPEC, dataset(dense=0, categorical=("a", "past"), rows=2))
    with pytest.raises(ConfigError, check=at("DIENSpec.negatives", "'column'")):
        DIENSpec(sequences=HISTORY, negatives=NegativesSpec(draw="column", column="tags"))
