# SPDX-License-Identifier: Apache-2.0
"""Sequence models equal their papers' formulas in plain torch and float64, one history after the other, and learn.

So do their losses, and the gradients of these.
"""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export.lookups import exportable
from terarec.export.scoring import BatchScoring
from terarec.models import build_model
from terarec.models.bert4rec import BERT4Rec
from terarec.models.sequences import SequenceModel
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import (
    AdamSpec,
    BERT4RecSpec,
    CategoricalColumn,
    DatasetSpec,
    DynamicTablesSpec,
    GRU4RecSpec,
    HSTUSpec,
    MultVAESpec,
    NegativesSpec,
    SASRecSpec,
    YouTubeDNNSpec,
)
from terarec.spec.sequences import SequenceLoss, SequenceSpec
from tests.errors import at
from tests.models.every import SEQUENCE_MODELS, dataset
from tests.models.gradients import gradients_of
from tests.params import in_every_run

ROWS = 9
COLUMNS = dataset(dense=0, categorical=("a", "past"), rows=ROWS)
HISTORIES = [[1, 2, 3], [4], [], [5, 1, 0, 2, 7], [0], [3, 3]]
ITEMS = [4, 2, 6, 8, 1, 7]


def batch_of(histories: list[list[int]], items: list[int], labels: list[float] | None = None) -> Batch:
    keys = [*items, *(key for history in histories for key in history)]
    lengths = [*[1] * len(items), *map(len, histories)]
    label = torch.ones(len(items)) if labels is None else torch.tensor(labels)
    return Batch(
        dense=torch.empty(len(items), 0),
        label=label[:, None],
        sparse=Jagged(names=("a", "past"), keys=torch.tensor(keys), offsets=torch.tensor([0, *lengths]).cumsum(0)),
    )


BATCH = batch_of(HISTORIES, ITEMS)


def model_of(spec: SequenceSpec, columns: DatasetSpec = COLUMNS) -> SequenceModel:
    """In float64, none of its weights near its first value."""
    model = build_model(spec, columns, seed=1)  # type: ignore[arg-type]
    assert isinstance(model, SequenceModel)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("rows"):
                parameter.normal_(0, 0.7, generator=generator)
        model.embedding.table("a").normal_(0, 0.7, generator=generator)
    return model.double().eval()


class ByHand:
    """The formulas over the weights of a model, for one sequence of vectors [n, D]."""

    def __init__(self, model: SequenceModel) -> None:
        self.model, self.spec = model, model.spec
        self.w = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        self.table = model.embedding.table("a").detach().double().requires_grad_()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def positions(self, x: Tensor) -> Tensor:
        from_end = [len(x) - 1 - place for place in range(len(x))]
        return x + self.w["encoder.positions.weight"][from_end]

    def sasrec(self, x: Tensor, *, causal: bool = True) -> Tensor:
        spec: Any = self.spec
        x = self.norm("encoder.norm", self.positions(x))
        for layer in range(spec.layers):
            at_layer = f"encoder.blocks.{layer}"
            query, key, value = self.linear(f"{at_layer}.projection", x).chunk(3, dim=1)
            heads = []
            for q, k, v in zip(*(part.chunk(spec.heads, dim=1) for part in (query, key, value)), strict=True):
                scores = q @ k.T / math.sqrt(q.shape[1])
                if causal:
                    scores = scores + torch.full_like(scores, -torch.inf).triu(1)
                heads.append(scores.softmax(1) @ v)
            x = self.norm(f"{at_layer}.norms.0", x + self.linear(f"{at_layer}.output", torch.cat(heads, dim=1)))
            inner = nn.functional.gelu(self.linear(f"{at_layer}.first", x))
            x = self.norm(f"{at_layer}.norms.1", x + self.linear(f"{at_layer}.second", inner))
        return x

    def bert4rec(self, x: Tensor) -> Tensor:
        return self.sasrec(x, causal=False)

    def hstu(self, x: Tensor, times: list[int] | None = None) -> Tensor:
        spec: Any = self.spec
        x = self.positions(x * math.sqrt(spec.width))
        for layer in range(spec.layers):
            at_layer = f"encoder.blocks.{layer}"
            parts = self.linear(f"{at_layer}.projection", self.norm(f"{at_layer}.norms.0", x))
            gate, value, query, key = (parts * parts.sigmoid()).chunk(4, dim=1)
            heads = []
            for head, (q, k, v) in enumerate(
                zip(*(part.chunk(spec.heads, dim=1) for part in (query, key, value)), strict=True)
            ):
                scores = q @ k.T
                for i in range(len(x)):
                    for j in range(len(x)):
                        scores[i, j] += self.w[f"{at_layer}.distances"][head, spec.max_length - 1 + i - j]
                        if times is not None:
                            bucket = int(math.log(max(1, abs(times[i] - times[j]))) / 0.301)
                            scores[i, j] += self.w[f"{at_layer}.gaps"][head, min(bucket, spec.time_buckets - 1)]
                heads.append((scores * scores.sigmoid()).tril() / spec.max_length @ v)
            mixed = self.norm(f"{at_layer}.norms.1", torch.cat(heads, dim=1)) * gate
            x = x + self.linear(f"{at_layer}.output", mixed)
        return x

    def gru4rec(self, x: Tensor) -> Tensor:
        spec: Any = self.spec
        for layer in range(spec.layers):
            state, states = torch.zeros(spec.state, dtype=torch.float64), []
            names = [f"encoder.gru.{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            of_input, of_state, input_bias, state_bias = (self.w[name] for name in names)
            for step in x:
                r, z, n = (of_input @ step + input_bias).chunk(3)
                state_r, state_z, state_n = (of_state @ state + state_bias).chunk(3)
                reset, update = (r + state_r).sigmoid(), (z + state_z).sigmoid()
                state = (1 - update) * (n + reset * state_n).tanh() + update * state
                states.append(state)
            x = torch.stack(states)
        return self.linear("encoder.output", x)

    def scaled(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True) if self.spec.similarity == "cosine" else x

    def hidden(self, history: list[int], *, masked: bool = False) -> Tensor:
        """The vectors that predict items, divided by the temperature: of each position, or of the mask alone."""
        keys = [key for key in history if key != 0][-self.spec.max_length :]
        x = self.table[keys]
        if masked:
            x = torch.cat([x, self.w["mask"].unsqueeze(0)])
        encoded = getattr(self, self.model.spec.kind)(x)  # type: ignore[attr-defined]
        return self.scaled(encoded) / self.spec.temperature

    def score(self, history: list[int], item: int) -> float:
        if not any(history):
            return 0.0
        last = self.hidden(history, masked=isinstance(self.spec, BERT4RecSpec))[-1]
        return (last @ self.scaled(self.table[item])).item()

    def check(self, expected: Tensor, found: Tensor) -> None:
        """Compare a loss of the model, and its gradients, with those of the formulas."""
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
        expected.backward()
        gradients = gradients_of(self.model, found)
        gradients.tables["a"] -= 0.0 if self.table.grad is None else self.table.grad.numpy()
        np.testing.assert_allclose(gradients.tables["a"], 0.0, atol=1e-4)
        for name, parameter in self.w.items():
            if not name.endswith("rows"):
                nothing = torch.zeros_like(parameter)
                of_formula = (nothing if parameter.grad is None else parameter.grad).numpy()
                of_model = gradients.dense.get(name, nothing.detach().numpy())
                np.testing.assert_allclose(of_model, of_formula, rtol=1e-4, atol=1e-4, err_msg=name)


SPECS: dict[str, SequenceSpec] = {
    "sasrec": SASRecSpec(item="a", history="past", width=4, max_length=3, inner=6, dropout=0.0),
    "bert4rec": BERT4RecSpec(item="a", history="past", width=4, max_length=3, inner=6, dropout=0.0),
    "gru4rec": GRU4RecSpec(item="a", history="past", width=4, max_length=3, layers=2, state=5, dropout=0.0),
    "hstu": HSTUSpec(item="a", history="past", width=4, max_length=3, dropout=0.0),
}


@pytest.mark.parametrize("kind", SPECS)
def test_scores_are_those_of_the_formula(kind: str) -> None:
    model = model_of(SPECS[kind])
    by_hand = ByHand(model)
    expected = [by_hand.score(history, item) for history, item in zip(HISTORIES, ITEMS, strict=True)]
    with torch.no_grad():
        output = model(BATCH)
        torch.testing.assert_close(
            model.output_logits(output)[:, 0], torch.tensor(expected).double(), atol=1e-5, rtol=1e-5
        )
        users, items = model.user_vectors(BATCH), model.item_vectors(BATCH)
    torch.testing.assert_close((users * items).sum(1, keepdim=True), model.output_logits(output))


def test_gaps_in_time_bias_the_attention_of_hstu() -> None:
    spec = replace(SPECS["hstu"], times="when", time_buckets=6, similarity="dot")  # type: ignore[call-arg]
    times = CategoricalColumn(name="when", rows=None, hotness=5)
    columns = replace(COLUMNS, categorical=(*COLUMNS.categorical, times))
    model = model_of(spec, columns)
    when = [[100, 103, 10_000], [7], [], [1, 2, 3, 50, 51], [9], [5, 5]]
    batch = batch_of(HISTORIES, ITEMS)
    sizes = [*batch.sparse.offsets.diff().tolist(), *map(len, when)]
    keys = torch.cat([batch.sparse.keys, torch.tensor([time for one in when for time in one])])
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    batch = replace(batch, sparse=Jagged(names=("a", "past", "when"), keys=keys, offsets=offsets))
    by_hand = ByHand(model)
    with torch.no_grad():
        users = model.user_vectors(batch)
    for row, (history, of_row) in enumerate(zip(HISTORIES, when, strict=True)):
        kept = [(key, time) for key, time in zip(history, of_row, strict=True) if key != 0][-spec.max_length :]
        expected = torch.zeros(4, dtype=torch.float64)
        if kept:
            expected = by_hand.hstu(by_hand.table[[key for key, _ in kept]], [time for _, time in kept])[-1]
        torch.testing.assert_close(users[row], expected / spec.temperature, atol=1e-5, rtol=1e-5)
    # As an exported program computes them, of padded lists.
    scoring = BatchScoring(model, columns, tables=True, key_inputs=(), scores=torch.sigmoid)
    with exportable(model, tables=True), torch.no_grad():
        (scores,) = scoring(*(torch.from_numpy(one.read(batch)) for one in scoring.inputs))
    with torch.no_grad():
        expected = model.output_logits(model(batch)).sigmoid().float()
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    short = Jagged(names=("a", "past", "when"), keys=keys[:-1], offsets=torch.tensor([0, *sizes[:-1], 1]).cumsum(0))
    with pytest.raises(ConfigError, check=at("column 'when', row 5", "got a list of 1 for 2 items")):
        model(replace(batch, sparse=short))


def pairs_of(history: list[int], item: int, longest: int) -> list[tuple[int, int]]:
    """The places in a history, from 0, and the item that each predicts."""
    keys = [key for key in history if key != 0][-longest:]
    return list(enumerate([*keys[1:], item])) if keys else []


@pytest.mark.parametrize(
    ("loss", "draw"),
    [
        ("bce", "uniform"),
        ("bce", "hard"),
        ("sampled_bce", "popularity"),
        ("softmax", "uniform"),
        ("sampled_softmax", "uniform"),
        ("sampled_softmax", "popularity"),
    ],
)
@pytest.mark.parametrize("kind", ["sasrec", "gru4rec", "hstu"])
def test_each_position_predicts_the_next_item(monkeypatch: pytest.MonkeyPatch, kind: str, loss: str, draw: str) -> None:
    negatives = NegativesSpec(count=2, draw=draw, power=1.0)  # type: ignore[arg-type]
    spec = replace(SPECS[kind], loss=loss, negatives=negatives)  # type: ignore[arg-type]
    model = model_of(spec).train()
    drawn: list[Tensor] = []

    def kept(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            drawn.append(result[0])
            return result

        return call

    for name in ("draw", "shared"):
        monkeypatch.setattr(model.sampler, name, kept(getattr(model.sampler, name)))
    labels = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]  # the last sample has no loss
    batch = batch_of(HISTORIES, ITEMS, labels)
    found = model.training_loss(model(batch), batch)
    by_hand, losses, number = ByHand(model), [], 0
    log_q = torch.ones(ROWS).double()
    if draw == "popularity":
        for history, item, label in zip(HISTORIES, ITEMS, labels, strict=True):
            for _, target in pairs_of(history, item, spec.max_length):
                log_q[target] += label
    log_q = (log_q / log_q[1:].sum()).log()
    for history, item, label in zip(HISTORIES, ITEMS, labels, strict=True):
        pairs = pairs_of(history, item, spec.max_length)
        hidden = by_hand.hidden(history) if pairs else torch.empty(0)
        for place, target in pairs:
            own = hidden[place] @ by_hand.scaled(by_hand.table[target])
            if loss == "softmax":
                every = by_hand.scaled(by_hand.table[1:]) @ hidden[place]
                value = every.logsumexp(0) - own
            elif loss == "bce":
                others = by_hand.scaled(by_hand.table[drawn[0][2 * number : 2 * number + 2]]) @ hidden[place]
                value = -own.sigmoid().log() - (1 - others.sigmoid()).log().mean()
            elif loss == "sampled_bce":
                # The probabilities that the item was not drawn, and that each of the others was.
                noise = 2 * log_q[drawn[0]].exp()
                odds = (by_hand.scaled(by_hand.table[drawn[0]]) @ hidden[place]).exp() / (ROWS - 1)
                own_odds, own_noise = own.exp() / (ROWS - 1), 2 * log_q[target].exp()
                is_other = drawn[0] != target
                value = -(own_odds / (own_odds + own_noise)).log()
                value = value - (noise / (odds + noise))[is_other].log().sum()
            else:
                others = by_hand.scaled(by_hand.table[drawn[0]]) @ hidden[place] - log_q[drawn[0]]
                others, own = others[drawn[0] != target], own - log_q[target]
                value = torch.cat([own[None], others]).logsumexp(0) - own
            number += 1
            if label:
                losses.append(value)
    by_hand.check(torch.stack(losses).mean(), found)


@pytest.mark.parametrize("loss", get_args(SequenceLoss))
@pytest.mark.parametrize("kind", SPECS)
def test_a_batch_of_users_without_history_has_no_loss(kind: str, loss: str) -> None:
    """It ended a training as a defect."""
    model = model_of(replace(SPECS[kind], loss=loss)).train()  # type: ignore[arg-type]
    batch = batch_of([[], [0]], [1, 2])
    found = model.training_loss(model(batch), batch)
    found.backward()
    # The mask of BERT4Rec predicts an item by itself.
    assert bool(found) is (kind == "bert4rec")
    assert found.isfinite()
    with torch.no_grad():
        assert not model.eval().user_vectors(batch).any()


def test_masked_items_are_predicted_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(replace(SPECS["bert4rec"], max_length=6)).train()
    assert isinstance(model, BERT4Rec)
    original, masks = model._masks, []

    def kept(*arguments: Tensor) -> Tensor:
        masks.append(original(*arguments))
        return masks[-1]

    monkeypatch.setattr(model, "_masks", kept)
    labels = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]  # the last sample has no loss
    batch, by_hand, losses = batch_of(HISTORIES, ITEMS, labels), ByHand(model), []
    torch.manual_seed(0)
    found = model.training_loss(model(batch), batch)
    sequences = [[*(key for key in history if key), item] for history, item in zip(HISTORIES, ITEMS, strict=True)]
    (of_batch,) = masks
    for sequence, is_masked, label in zip(sequences, of_batch.split(list(map(len, sequences))), labels, strict=True):
        assert is_masked.any()  # at least one in each sample
        x = torch.where(is_masked[:, None], by_hand.w["mask"], by_hand.table[sequence])
        hidden = by_hand.bert4rec(x)
        for place in is_masked.nonzero().flatten().tolist():
            every = by_hand.table[1:] @ hidden[place]
            if label:
                losses.append(every.logsumexp(0) - every[sequence[place] - 1])
    assert len(losses) > 5
    by_hand.check(torch.stack(losses).mean(), found)


@pytest.mark.parametrize(
    ("spec", "counted"),
    [
        (SASRecSpec(item="a", history="past", width=4), [2, 3, 4]),
        (SASRecSpec(item="a", history="past", width=4, loss="sampled_softmax"), [2, 3, 4]),
        (YouTubeDNNSpec(item="a", history="past", width=4), [4]),
        (MultVAESpec(item="a", history="past", loss="sampled_softmax"), [1, 2, 3, 4]),
    ],
)
def test_popularity_is_that_of_positive_items(spec: Any, counted: list[int]) -> None:
    """Items of samples with a label of 0 were counted, too."""
    by_popularity = replace(spec, negatives=NegativesSpec(draw="popularity"))
    model: Any = build_model(by_popularity, COLUMNS, seed=1).train()
    batch = batch_of(HISTORIES, ITEMS, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    model.training_loss(model(batch), batch)
    assert model.sampler.counts.nonzero().flatten().tolist() == counted


@pytest.mark.parametrize("probability", [0.2, 0.6])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_items_are_masked_alike(length: int, probability: float) -> None:
    """But the last one of a sample in which no other is: always, where it is the only one."""
    spec = replace(SPECS["bert4rec"], mask=probability)  # type: ignore[call-arg]
    model, count = build_model(spec, COLUMNS), 2000  # type: ignore[arg-type]
    assert isinstance(model, BERT4Rec)
    offsets = torch.arange(count + 1) * length
    torch.manual_seed(0)
    is_masked = model._masks(offsets, torch.arange(count).repeat_interleave(length), offsets[1:] - 1)
    shares = torch.full((length,), probability, dtype=torch.float64)
    shares[-1] += (1 - probability) ** length
    counts = is_masked.view(count, length).sum(0)
    assert not (counts - count * shares)[shares == 1].any()
    # The sum of squares of `length` normal numbers: 0.1 % of samples have more.
    deviations = (counts - count * shares).square() / (count * shares * (1 - shares)).clamp_min(1e-9)
    assert deviations.sum() < {1: 10.8, 2: 13.8, 40: 73.4}[length]


@pytest.mark.parametrize("kind", SPECS)
def test_evaluation_repeats_itself_and_leaves_the_draws_of_training(kind: str) -> None:
    model = model_of(SPECS[kind])
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.no_grad():
        first, second = (model.training_loss(model(BATCH), BATCH) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", SPECS)
def test_only_the_last_items_of_a_history_count(kind: str) -> None:
    model = model_of(SPECS[kind])
    with torch.no_grad():
        long, short = (model.user_vectors(batch_of([history], [1])) for history in ([8, 8, 1, 2, 3], [1, 2, 3]))
    torch.testing.assert_close(long, short)


@pytest.mark.parametrize("kind", in_every_run(["sasrec", "gru4rec"], SPECS))
def test_it_learns_who_follows_whom(kind: str) -> None:
    """Item k is followed by item k % 8 + 1."""
    spec = replace(SPECS[kind], width=16, max_length=5, loss="softmax", similarity="dot", temperature=1.0)
    if isinstance(spec, GRU4RecSpec):
        spec = replace(spec, state=32, layers=1)

    def histories(seed: int) -> tuple[list[list[int]], list[int]]:
        starts = torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(seed)).tolist()
        return [[(start + k) % 8 + 1 for k in range(1 + start % 4)] for start in starts], [
            (start + 1 + start % 4) % 8 + 1 for start in starts
        ]

    model = build_model(spec, COLUMNS, seed=1)  # type: ignore[arg-type]
    assert isinstance(model, SequenceModel)
    dense = build_dense_optimizer(AdamSpec(lr=0.01), model.parameters())
    rows = RowOptimizer(model, AdamSpec(lr=0.01))
    torch.manual_seed(0)
    for step in range(80):
        batch = batch_of(*histories(step))
        dense.zero_grad()
        model.training_loss(model(batch), batch).backward()
        dense.step()
        rows.step()
    past, items = histories(-1)
    with torch.no_grad():
        scores = model.eval().user_vectors(batch_of(past, items)) @ model.vectors_of_items(torch.arange(1, ROWS)).t()
    assert (scores.argmax(1) + 1 == torch.tensor(items)).float().mean() > 0.95


ERRORS: dict[str, tuple[SequenceSpec, DatasetSpec, tuple[str, ...]]] = {
    "no such item": (SASRecSpec(item="b", history="past"), COLUMNS, ("sasrec", "item: data set 'small' has no")),
    "a list as item": (
        SASRecSpec(item="past", history="a"),
        COLUMNS,
        ("sasrec", "item: 'past' is a list of up to 4 keys"),
    ),
    "other ids": (
        HSTUSpec(item="a", history="past"),
        replace(COLUMNS, categorical=(replace(COLUMNS.categorical[0], rows=5), COLUMNS.categorical[1])),
        ("hstu", "'past' has 9 ids, 'a' has 5 ids"),
    ),
    "times that are ids": (
        HSTUSpec(item="a", history="past", times="b"),
        dataset(dense=0, rows=ROWS),
        ("hstu", "times: 'b' has 9 ids"),
    ),
    "one item": (
        GRU4RecSpec(item="a", history="past"),
        dataset(dense=0, categorical=("a", "past"), rows=2),
        ("gru4rec", "has 1 items, expected at least 2"),
    ),
    "any keys": (
        SASRecSpec(item="a", history="past", tables=DynamicTablesSpec()),
        dataset(dense=0, categorical=("a", "past"), rows=None),
        ("sasrec", "has any keys, expected ids"),
    ),
    "two labels": (SASRecSpec(item="a", history="past"), dataset(labels=2), ("sasrec", "got 2 labels")),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_rejected(case: str) -> None:
    spec, columns, place = ERRORS[case]
    with pytest.raises(ConfigError, check=at(*place)):
        build_model(spec, columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"heads": 3, "width": 4}, ("SASRecSpec.width", "multiple of the heads (3)")),
        ({"history": "a"}, ("SASRecSpec.history", "which is the item")),
        ({"loss": "bpr"}, ("SASRecSpec.loss",)),
        ({"negatives": NegativesSpec(draw="column", column="b")}, ("SASRecSpec.negatives", "'column'")),
        ({"loss": "sampled_softmax", "negatives": NegativesSpec(draw="hard")}, ("SASRecSpec.negatives", "'hard'")),
        ({"loss": "sampled_bce", "negatives": NegativesSpec(draw="hard")}, ("SASRecSpec.negatives", "'hard'")),
        ({"temperature": 0.0}, ("SASRecSpec.temperature",)),
    ],
)
def test_a_spec_checks_itself(changes: dict[str, Any], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        SASRecSpec(**{"item": "a", "history": "past", **changes})


def test_each_kind_is_tested() -> None:
    assert {spec.kind for spec in SEQUENCE_MODELS.values()} == set(SPECS)
