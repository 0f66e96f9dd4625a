# SPDX-License-Identifier: Apache-2.0
"""Losses of MF-BPR, NCF, YouTubeDNN and Mult-VAE against their formulas in float64, and what these models learn.

The gradients of all weights are compared, too.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.models import build_model, contract
from terarec.models.next_items import MultVAE, NextItemModel
from terarec.models.pairs import PairModel
from terarec.nn.negatives import Negatives, Sampler
from terarec.nn.objectives import BinaryObjective
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import (
    AdamSpec,
    DatasetSpec,
    DynamicTablesSpec,
    MFBPRSpec,
    MultVAESpec,
    NCFSpec,
    NegativesSpec,
    YouTubeDNNSpec,
)
from tests.errors import at
from tests.models.every import dataset
from tests.models.formulas import Sample, Weights, encoded, logits, mult_vae_scores
from tests.models.gradients import check_gradients
from tests.models.test_formulas import samples_of, weights_of

ROWS = 9
COLUMNS = dataset(dense=0, categorical=("a", "b", "tags"), rows=ROWS)
HISTORIES = dataset(dense=0, categorical=("a", "past"), rows=ROWS)
USERS, ITEMS = [1, 2, 1, 3, 4, 2], [1, 2, 3, 4, 0, 6]
LABELS = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
SHOWN = [[2, 5], [3, 3, 2], [], [0, 4], [1], [7]]
PAST = [[1, 2, 0, 3], [], [4], [5, 6, 6], [7], [8, 1]]
PAIR = {"user": "b", "item": "a", "width": 4}
NEXT = {"item": "a", "history": "past"}


def batch_of(columns: DatasetSpec, **bags: list[list[int]]) -> Batch:
    every = [bag for column in columns.categorical for bag in bags[column.name]]
    return Batch(
        dense=torch.empty(len(LABELS), 0, dtype=torch.float64),
        label=torch.tensor(LABELS)[:, None],
        sparse=Jagged(
            names=tuple(column.name for column in columns.categorical),
            keys=torch.tensor([key for bag in every for key in bag]),
            offsets=torch.tensor([0, *map(len, every)]).cumsum(0),
        ),
        weight=torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 1.0]),
    )


PAIRS = batch_of(COLUMNS, a=[[item] for item in ITEMS], b=[[user] for user in USERS], tags=SHOWN)
LISTS = batch_of(HISTORIES, a=[[item] for item in ITEMS], past=PAST)


def model_of(spec: Any, columns: DatasetSpec) -> Any:
    """In float64 but for its tables, none of its weights near its first value."""
    model = build_model(spec, columns, seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("rows"):
                parameter.normal_(0, 0.5, generator=generator)
        for collection in (model.embedding, *([model.biases] if isinstance(model, MultVAE) else [])):
            for table in collection.specs:
                collection.table(table.name).normal_(0, 0.5, generator=generator)
    return model.double()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What samplers have drawn."""
    results: list[Any] = []

    def kept(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            results.append(original(*arguments))
            return results[-1]

        return call

    for name in ("draw", "shared"):
        monkeypatch.setattr(Sampler, name, kept(getattr(Sampler, name)))
    return results


def loss_of(model: Any, batch: Batch) -> Tensor:
    torch.manual_seed(0)
    return contract.training_loss(model, model(batch), batch, BinaryObjective())


def score_of(spec: Any, w: Weights, columns: DatasetSpec, sample: Sample, item: int) -> float:
    changed = Sample(sample.dense, {**sample.keys, "a": [item]})
    return float(logits(spec, w, changed, columns)[0])


POSITIVES = [(1, 5), (2, 7)]  # of the train split besides the batch
OWNED = {1: {1, 5}, 2: {2, 6, 7}, 3: {4}, 4: set[int]()}


@pytest.mark.parametrize("draw", ["uniform", "popularity", "batch", "mixed", "hard", "column"])
@pytest.mark.parametrize("spec", [MFBPRSpec(**PAIR), NCFSpec(**PAIR, hidden=(5,))], ids=["bpr", "bce"])  # type: ignore[arg-type]
def test_the_loss_of_pairs(spec: Any, draw: str, drawn: list[Any]) -> None:
    negatives = NegativesSpec(count=2, draw=draw, column="tags" if draw == "column" else None)  # type: ignore[arg-type]
    spec = replace(spec, negatives=negatives)
    model = model_of(spec, COLUMNS)
    model.know_positives(*torch.tensor(POSITIVES).T)
    loss = loss_of(model, PAIRS)
    (result,) = drawn
    assert isinstance(result, Negatives)
    keys, is_valid = result.keys.view(-1, 2).tolist(), result.is_valid.view(-1, 2).tolist()
    others = [[key for key, counts in zip(*one, strict=True) if counts] for one in zip(keys, is_valid, strict=True)]
    is_item = [item > 0 for item in ITEMS]
    is_positive = [label > 0 and item > 0 for label, item in zip(LABELS, ITEMS, strict=True)]
    for row, of_row in enumerate(others):
        if is_positive[row]:
            assert not set(of_row) & (OWNED[USERS[row]] | {0})
            assert draw != "column" or set(of_row) <= set(SHOWN[row])
            assert draw in ("batch", "column") or len(of_row) == 2

    def expected(w: Weights) -> float:
        losses, number = [], 0
        for row, sample in enumerate(samples_of(PAIRS)):
            own = score_of(spec, w, COLUMNS, sample, ITEMS[row])
            scores = np.array([score_of(spec, w, COLUMNS, sample, key) for key in others[row]])
            if spec.loss == "bpr":
                counts = is_positive[row] and bool(others[row])
                value = np.logaddexp(0, scores - own).mean() if counts else 0.0
            else:
                counts = is_item[row]
                value = np.logaddexp(0, -own) + np.logaddexp(0, scores).sum()
                value = value if is_positive[row] else np.logaddexp(0, own)
            losses.append(value * counts * float(PAIRS.weight[row]))  # type: ignore[index]
            number += counts
        return float(sum(losses) / number)

    check_gradients(model, weights_of(model), loss, expected, tolerance=1e-4)


def softmax_loss(own: float, others: list[float]) -> float:
    return math.log(math.exp(own) + sum(math.exp(other) for other in others)) - own


@pytest.mark.parametrize("draw", ["uniform", "popularity", "batch", "mixed"])
def test_the_sampled_softmax_of_pairs(draw: str, drawn: list[Any]) -> None:
    negatives = NegativesSpec(count=12, draw=draw, uniform_share=0.25)  # type: ignore[arg-type]
    spec = MFBPRSpec(**PAIR, loss="sampled_softmax", negatives=negatives)  # type: ignore[arg-type]
    model = model_of(spec, COLUMNS)
    model.know_positives(*torch.tensor(POSITIVES).T)
    loss = loss_of(model, PAIRS)
    keys = drawn[0][0].tolist()
    items = [item for item in ITEMS if item]
    counts = np.bincount([1, 2, 4, 6], minlength=ROWS)
    popular = (counts + 1.0) ** 0.75
    share = {"batch": 0.0, "mixed": 0.25}.get(draw, 1.0)

    def q(key: int) -> float:
        if draw == "popularity":
            return float(popular[key] / popular[1:].sum())
        return share / (ROWS - 1) + (1 - share) * items.count(key) / len(items)

    def expected(w: Weights) -> float:
        losses = []
        for row, sample in enumerate(samples_of(PAIRS)):
            if LABELS[row] > 0 and ITEMS[row] > 0:
                own = score_of(spec, w, COLUMNS, sample, ITEMS[row]) - math.log(q(ITEMS[row]))
                others = [key for key in keys if key not in OWNED[USERS[row]]]
                scores = [score_of(spec, w, COLUMNS, sample, key) - math.log(q(key)) for key in others]
                losses.append(softmax_loss(own, scores) * float(PAIRS.weight[row]))  # type: ignore[index]
        return float(np.mean(losses))

    check_gradients(model, weights_of(model), loss, expected, tolerance=1e-4)


@pytest.mark.parametrize("loss", ["softmax", "sampled_softmax"])
def test_the_loss_of_youtube_dnn(loss: str, drawn: list[Any]) -> None:
    spec = YouTubeDNNSpec(**NEXT, width=4, hidden=(5,), loss=loss, negatives=NegativesSpec(count=7))  # type: ignore[arg-type]
    model = model_of(spec, HISTORIES)
    found = loss_of(model, LISTS)
    every = list(range(1, ROWS)) if loss == "softmax" else drawn[0][0].tolist()

    def expected(w: Weights) -> float:
        losses = []
        for row, sample in enumerate(samples_of(LISTS)):
            if LABELS[row] > 0 and ITEMS[row] > 0:
                mine = {ITEMS[row]} if loss == "softmax" else {ITEMS[row], *PAST[row]}
                others = [score_of(spec, w, HISTORIES, sample, key) for key in every if key not in mine]
                own = score_of(spec, w, HISTORIES, sample, ITEMS[row])
                losses.append(softmax_loss(own, others) * float(LISTS.weight[row]))  # type: ignore[index]
        return float(np.mean(losses))

    check_gradients(model, weights_of(model), found, expected, tolerance=1e-4)


@pytest.mark.parametrize(
    ("loss", "draw"), [("softmax", "uniform"), ("sampled_softmax", "uniform"), ("sampled_softmax", "batch")]
)
def test_the_loss_of_mult_vae(loss: str, draw: str, drawn: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MultVAESpec(**NEXT, hidden=(6, 5), latent=3, dropout=0.0, beta=0.3, anneal_steps=4, loss=loss)  # type: ignore[arg-type]
    spec = replace(spec, negatives=NegativesSpec(count=7, draw=draw))  # type: ignore[arg-type]
    predicted = [key for row in range(len(LABELS)) for key in (*PAST[row], ITEMS[row]) if key]
    model, samples = model_of(spec, HISTORIES), samples_of(LISTS)
    noise = torch.linspace(-1.5, 1.2, 18, dtype=torch.float64).view(6, 3)
    monkeypatch.setattr(torch, "randn_like", lambda like: noise.to(like.dtype))

    def expected(w: Weights, step: int, every: list[int]) -> float:
        losses = []
        for row, sample in enumerate(samples):
            if LABELS[row] == 0 or ITEMS[row] == 0:
                continue
            mine = [key for key in (*PAST[row], ITEMS[row]) if key]
            scores = mult_vae_scores(w, sample, spec, noise[row].numpy())
            if draw == "batch":  # less the logarithm of the probability of a draw
                scores = scores - np.log([max(1, predicted.count(key)) for key in range(ROWS)])
            value = 0.0
            for target in mine:
                taken = {target} if loss == "softmax" else set(mine)
                value += softmax_loss(scores[target], [scores[key] for key in every if key not in taken])
            # The divergence of the latent vector from a standard normal one, by the formula for two normal ones.
            mean, log_variance = encoded(w, [key for key in PAST[row] if key], spec)
            value += 0.3 * step / 4 * float((mean**2 + np.exp(log_variance) - 1 - log_variance).sum() / 2)
            losses.append(value * float(LISTS.weight[row]))  # type: ignore[index]
        return float(np.mean(losses))

    for step in (1, 2):
        found = loss_of(model, LISTS)
        every = list(range(1, ROWS)) if loss == "softmax" else drawn[-1][0].tolist()
        check_gradients(model, weights_of(model), found, partial(expected, step=step, every=every), tolerance=1e-4)
        model.zero_grad()
    assert int(model.updates) == 2
    model.eval()
    evaluated = []
    for row, sample in enumerate(samples):
        scores = mult_vae_scores(weights_of(model), sample, spec)
        if LABELS[row] > 0 and ITEMS[row] > 0:
            others = [scores[key] for key in range(1, ROWS) if key != ITEMS[row]]
            evaluated.append(softmax_loss(scores[ITEMS[row]], others) * float(LISTS.weight[row]))  # type: ignore[index]
    if loss == "softmax":
        assert loss_of(model, LISTS).item() == pytest.approx(np.mean(evaluated), rel=1e-4)


def test_items_are_left_out_of_the_input_in_training_alone() -> None:
    """What is kept counts 1 / (1 - dropout): the mean over many draws is what the encoder reads in evaluation."""
    spec = MultVAESpec(**NEXT, hidden=(6,), latent=3, dropout=0.4)  # type: ignore[arg-type]
    model = build_model(spec, HISTORIES)
    assert isinstance(model, MultVAE)
    torch.manual_seed(0)
    lengths = torch.tensor([3, 0, 1, 3, 1, 2])
    kept, factors = model._kept(model.without_missing(LISTS))
    assert factors is not None
    assert kept.keys[:6].tolist() == ITEMS
    # The table divides the sum by the root of the number that is kept.
    number = kept.offsets.diff()[6:]
    is_some = number > 0
    torch.testing.assert_close((factors / number.sqrt())[is_some], (1 / 0.6 / lengths.sqrt())[is_some])
    share = np.mean([len(model._kept(model.without_missing(LISTS))[0].keys) - 6 for _ in range(2000)]) / 10
    assert share == pytest.approx(0.6, abs=0.02)
    every, factors = model.eval()._kept(model.without_missing(LISTS))
    assert torch.equal(every.offsets.diff()[6:], lengths)
    assert factors is None


@pytest.mark.parametrize("name", ["mf_bpr", "ncf", "youtube_dnn", "mult_vae"])
def test_evaluation_repeats_itself_and_leaves_the_draws_of_training(name: str) -> None:
    specs: dict[str, Any] = {
        "mf_bpr": MFBPRSpec(**PAIR),  # type: ignore[arg-type]
        "ncf": NCFSpec(**PAIR),  # type: ignore[arg-type]
        "youtube_dnn": YouTubeDNNSpec(**NEXT),  # type: ignore[arg-type]
        "mult_vae": MultVAESpec(**NEXT, loss="sampled_softmax"),  # type: ignore[arg-type]
    }
    is_pair = name in ("mf_bpr", "ncf")
    model, batch = build_model(specs[name], COLUMNS if is_pair else HISTORIES).eval(), PAIRS if is_pair else LISTS
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.no_grad():
        first, second = (model.training_loss(model(batch), batch) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def learned(spec: Any, columns: DatasetSpec, batches: Callable[[int], Batch]) -> Any:
    model = build_model(spec, columns, seed=1)
    dense = build_dense_optimizer(AdamSpec(lr=0.01), model.parameters()) if len(list(model.parameters())) > 1 else None
    rows = RowOptimizer(model, AdamSpec(lr=0.03))
    torch.manual_seed(0)
    for step in range(150):
        batch = batches(step)
        loss = model.training_loss(model(batch), batch)
        if dense is not None:
            dense.zero_grad()
        loss.backward()
        if dense is not None:
            dense.step()
        rows.step()
    return model.eval()


@pytest.mark.parametrize(
    "spec",
    [MFBPRSpec(**PAIR), NCFSpec(**PAIR, hidden=(8,)), NCFSpec(**PAIR, form="gmf")],
    ids=["mf", "neumf", "gmf"],  # type: ignore[arg-type]
)
def test_pairs_learn_who_takes_what(spec: Any) -> None:
    """User k takes item k."""
    spec = replace(spec, width=8)

    def batches(seed: int) -> Batch:
        users = torch.randint(1, ROWS, (64,), generator=torch.Generator().manual_seed(seed))
        sparse = Jagged(names=("a", "b"), keys=torch.cat([users, users]), offsets=torch.arange(129))
        return Batch(dense=torch.empty(64, 0), label=torch.ones(64, 1), sparse=sparse)

    model = learned(spec, dataset(dense=0, categorical=("a", "b"), rows=ROWS), batches)
    assert isinstance(model, PairModel)
    batch = batches(-1)
    with torch.no_grad():
        scores = model.pair_scores(
            model.user_vectors(batch), model.vectors_of_items(torch.arange(1, ROWS)).unsqueeze(0)
        )
    assert torch.equal(scores.argmax(1) + 1, batch.sparse.keys[:64])


@pytest.mark.parametrize(
    "spec",
    [
        YouTubeDNNSpec(**NEXT, width=8, hidden=(16,), loss="softmax"),  # type: ignore[arg-type]
        MultVAESpec(**NEXT, hidden=(16,), latent=8, dropout=0.0, beta=0.01, anneal_steps=0),  # type: ignore[arg-type]
    ],
    ids=["youtube_dnn", "mult_vae"],
)
def test_next_items_learn_which_item_belongs_to_a_history(spec: Any) -> None:
    """Items k and k + 1 belong together, k odd; a history has one of them."""

    def batches(seed: int) -> Batch:
        past = torch.randint(1, ROWS, (64,), generator=torch.Generator().manual_seed(seed))
        items = ((past - 1) ^ 1) + 1
        sparse = Jagged(names=("a", "past"), keys=torch.cat([items, past]), offsets=torch.arange(129))
        return Batch(dense=torch.empty(64, 0), label=torch.ones(64, 1), sparse=sparse)

    model = learned(spec, HISTORIES, batches)
    assert isinstance(model, NextItemModel)
    batch = batches(-1)
    with torch.no_grad():
        scores = model.user_vectors(batch) @ model.vectors_of_items(torch.arange(1, ROWS)).t()
    scores[torch.arange(64), batch.sparse.keys[64:] - 1] = -torch.inf  # what the user has
    assert (scores.argmax(1) + 1 == batch.sparse.keys[:64]).float().mean() > 0.95


def test_users_of_any_keys() -> None:
    columns = replace(
        COLUMNS, categorical=tuple(replace(one, rows=None if one.name == "b" else ROWS) for one in COLUMNS.categorical)
    )
    model = build_model(MFBPRSpec(**PAIR, tables=DynamicTablesSpec(), negatives=NegativesSpec(count=50)), columns)  # type: ignore[arg-type]
    big = 1 << 60
    users: Tensor = torch.tensor([big + 5, big + 5, -3])
    items = torch.tensor([1, 2, 3])
    sparse = Jagged(names=("a", "b"), keys=torch.cat([items, users]), offsets=torch.arange(7))
    batch = Batch(dense=torch.empty(3, 0), label=torch.ones(3, 1), sparse=sparse)
    assert isinstance(model, PairModel)
    assert model.training_loss(model(batch), batch).isfinite()
    model.learn_positives([replace(batch, label=torch.zeros(3, 1))])
    assert model._owners(batch).tolist() == [1, 1, 0]
    assert model.training_loss(model(batch), batch).isfinite()
    model.know_positives(torch.tensor([big + 5] * 6), torch.arange(3, ROWS))
    assert model._owners(batch).tolist() == [0, 0, 1]
    assert model.training_loss(model(batch), batch).isfinite()


ONE = dataset(categorical=("a", "b"), rows=3)
ERRORS: dict[str, tuple[Any, DatasetSpec, tuple[str, ...]]] = {
    "no such user": (MFBPRSpec(user="c", item="a"), COLUMNS, ("mf_bpr", "user: data set 'small' has no categorical")),
    "a list as item": (NCFSpec(user="b", item="tags"), COLUMNS, ("ncf", "item: 'tags' is a list of up to 3 keys")),
    "any items": (
        MFBPRSpec(user="b", item="a", tables=DynamicTablesSpec()),
        dataset(categorical=("a", "b"), rows=None),
        ("mf_bpr", "column 'a' has any keys"),
    ),
    "one item": (NCFSpec(user="b", item="a"), dataset(categorical=("a", "b"), rows=2), ("ncf", "has 1 items")),
    "one item and rare values": (
        NCFSpec(user="b", item="a"),
        replace(ONE, categorical=tuple(replace(column, vocabulary="steps[0] a") for column in ONE.categorical)),
        ("ncf", "has 1 items"),
    ),
    "one item and several ids of rare values": (
        NCFSpec(user="b", item="a"),
        replace(
            COLUMNS,
            categorical=tuple(
                replace(column, vocabulary="steps[0] a", rare_ids=ROWS - 2) for column in COLUMNS.categorical
            ),
        ),
        ("ncf", "has 1 items"),
    ),
    "two labels": (MFBPRSpec(user="b", item="a"), dataset(labels=2), ("mf_bpr", "got 2 labels")),
    "no such shown items": (
        MFBPRSpec(user="b", item="a", negatives=NegativesSpec(draw="column", column="shown")),
        COLUMNS,
        ("mf_bpr", "negatives.column: data set 'small' has no"),
    ),
    "no such history": (YouTubeDNNSpec(item="a", history="pats"), HISTORIES, ("youtube_dnn", "did you mean 'past'?")),
    "no such column of the user": (
        YouTubeDNNSpec(item="a", history="past", user=("age",)),
        HISTORIES,
        ("youtube_dnn", "user: data set 'small' has no column 'age'"),
    ),
    "one item of a history": (
        MultVAESpec(item="a", history="past"),
        dataset(categorical=("a", "past"), rows=2),
        ("mult_vae", "has 1 items"),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_rejected(case: str) -> None:
    spec, columns, place = ERRORS[case]
    with pytest.raises(ConfigError, check=at(*place)):
        build_model(spec, columns)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: MFBPRSpec(user="a", item="a"), ("MFBPRSpec.item", "which is the user")),
        (
            lambda: MFBPRSpec(user="b", item="a", loss="sampled_softmax", negatives=NegativesSpec(draw="hard")),
            ("MFBPRSpec.negatives", "'hard'"),
        ),
        (lambda: NCFSpec(user="b", item="a", form="gmlp"), ("NCFSpec.form",)),  # type: ignore[arg-type]
        (lambda: NCFSpec(user="b", item="a", mlp_width=0), ("NCFSpec.mlp_width",)),
        (lambda: NCFSpec(user="b", item="a", form="gmf", mlp_width=2), ("NCFSpec.mlp_width", "has no MLP")),
        (lambda: YouTubeDNNSpec(item="a", history="a"), ("YouTubeDNNSpec.history", "which is the item")),
        (lambda: YouTubeDNNSpec(item="a", history="b", user=("b",)), ("YouTubeDNNSpec.user", "twice")),
        (lambda: MultVAESpec(item="a", history="b", loss="bpr"), ("MultVAESpec.loss",)),  # type: ignore[arg-type]
        (lambda: MultVAESpec(item="a", history="b", anneal_steps=-1), ("MultVAESpec.anneal_steps",)),
    ],
)
def test_a_spec_checks_itself(make: Callable[[], object], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make()
