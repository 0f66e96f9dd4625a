# SPDX-License-Identifier: Apache-2.0
"""The training loss of the two towers: queries, weights, frequencies, and the in-batch softmax by brute force."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from terarec.models import TwoTower
from terarec.models.two_tower import ItemFrequency
from terarec.nn.losses import in_batch_softmax, mean_of_counted
from tests.models.every import TWO_TOWER_MODELS, dataset, random_batch
from tests.models.formulas import Sample, Weights, logits
from tests.models.gradients import check_gradients
from tests.models.test_formulas import random_model, samples_of, weights_of

COLUMNS = dataset()


def small_model() -> TwoTower:
    return TwoTower(TWO_TOWER_MODELS["two_tower"], COLUMNS, seed=1)


def test_positive_samples_are_the_queries_and_weights_multiply_their_losses() -> None:
    model = small_model().eval()
    batch = replace(random_batch(COLUMNS, 12), weight=torch.rand(12))
    output = model(batch)
    keys, is_query = batch.sparse.keys[:12], batch.label[:, 0] > 0
    assert 0 < is_query.sum() < 12
    losses = []
    for row in is_query.nonzero()[:, 0].tolist():  # all items are candidates
        log_q = model.frequency.log_probability(keys)
        losses.append(in_batch_softmax(output.user, output.item, keys, log_q=log_q)[row] * batch.weight[row])
    torch.testing.assert_close(model.training_loss(output, batch), torch.stack(losses).mean())


def test_frequencies_are_learned_in_training_alone_and_change_the_loss() -> None:
    model, batch = small_model(), random_batch(COLUMNS, 12)
    model.eval().training_loss(model(batch), batch)
    assert model.frequency.num_batches == 0
    before = model.training_loss(model(batch), batch)
    model.train()
    for seed in range(20):
        other = random_batch(COLUMNS, 2, seed=seed)  # of few items, so that these are not equally frequent
        model.training_loss(model(other), other)
    assert model.frequency.num_batches == 20
    assert not torch.allclose(model.eval().training_loss(model(batch), batch), before)
    plain = TwoTower(replace(TWO_TOWER_MODELS["two_tower"], correct_sampling=False), COLUMNS, seed=1)
    assert plain.frequency is None
    torch.testing.assert_close(plain.training_loss(plain(batch), batch), before)  # all equal, so no correction


def test_the_vectors_of_users_and_items_give_the_logits() -> None:
    for spec in TWO_TOWER_MODELS.values():
        model, batch = TwoTower(spec, COLUMNS, seed=1).eval(), random_batch(COLUMNS, 12)
        scores = model.user_vectors(batch) @ model.item_vectors(batch).t()
        torch.testing.assert_close(model.output_logits(model(batch)), scores.diagonal()[:, None])


def brute_force(score, keys, log_q, queries, weights):
    """Sample by sample, candidate by candidate, for the score of a user and an item."""
    losses = []
    for i in np.flatnonzero(queries):
        candidates = [j for j in range(len(keys)) if j == i or keys[j] != keys[i]]
        scores = [score(i, j) - log_q[j] for j in candidates]
        own = scores[candidates.index(i)]
        losses.append(weights[i] * (math.log(sum(map(math.exp, scores))) - own))
    return np.mean(losses)


@pytest.mark.parametrize("has_log_q", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("has_queries", [False, True])
def test_the_loss_equals_brute_force(has_log_q: bool, has_weights: bool, has_queries: bool) -> None:
    source = np.random.default_rng(0)
    users, items = source.normal(size=(2, 12, 5))
    keys = source.integers(0, 6, 12)  # many occur twice
    log_q = np.log(source.uniform(0.01, 1, 12)) if has_log_q else np.zeros(12)
    weights = source.integers(0, 3, 12) * 0.5 if has_weights else np.ones(12)
    queries = source.random(12) < 0.5 if has_queries else np.ones(12, dtype=bool)
    losses = in_batch_softmax(
        torch.from_numpy(users),
        torch.from_numpy(items),
        torch.from_numpy(keys),
        log_q=torch.from_numpy(log_q) if has_log_q else None,
    )
    found, _ = mean_of_counted(
        losses, torch.from_numpy(queries), torch.from_numpy(weights) if has_weights else None, None
    )
    wanted = brute_force(lambda i, j: float(users[i] @ items[j]), keys, log_q, queries, weights)
    assert found.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", TWO_TOWER_MODELS)
def test_the_loss_of_a_model_and_its_gradients_equal_the_formula(name: str) -> None:
    spec, batch = TWO_TOWER_MODELS[name], replace(random_batch(COLUMNS, 7, seed=3), weight=torch.rand(7))
    model = random_model(spec, COLUMNS)
    assert isinstance(model, TwoTower)
    model.frequency.update(batch.sparse.keys[:3])  # so that items are not equally frequent
    batch, samples = replace(batch, dense=batch.dense.double()), samples_of(batch)
    keys = batch.sparse.keys[:7].numpy()
    log_q = model.frequency.log_probability(batch.sparse.keys[:7]).tolist()
    is_user = np.array([column.name in spec.user for column in COLUMNS.dense])

    def of_both(i: int, j: int) -> Sample:
        """The user of one sample with the item of another."""
        dense = np.where(is_user, samples[i].dense, samples[j].dense)
        return Sample(dense, {name: samples[i if name in spec.user else j].keys[name] for name in samples[i].keys})

    def loss(weights: Weights) -> float:
        return brute_force(
            lambda i, j: float(logits(spec, weights, of_both(i, j), COLUMNS)[0]),
            keys,
            log_q,
            batch.label[:, 0].numpy() > 0,
            batch.weight.double().numpy(),
        )

    check_gradients(model, weights_of(model), model.training_loss(model(batch), batch), loss, tolerance=1e-4)


def test_scores_of_16_bits_are_added_up_in_float32() -> None:
    users, items = torch.randn(2, 64, 5).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        losses, scores = in_batch_softmax(users, items, torch.arange(64)), (users @ items.t()).double()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), scores.logsumexp(1) - scores.diagonal(), rtol=1e-6, atol=1e-6)


def test_a_batch_without_queries_has_no_loss_and_no_gradient() -> None:
    users = torch.randn(4, 3, requires_grad=True)
    losses = in_batch_softmax(users, torch.randn(4, 3), torch.arange(4))
    loss, number = mean_of_counted(losses, torch.zeros(4, dtype=torch.bool), None, None)
    loss.backward()
    assert number == 0
    assert loss.item() == 0
    assert users.grad is not None
    assert not users.grad.any()


def test_a_sample_that_is_not_a_query_is_a_candidate() -> None:
    users, items, keys = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4)
    without = in_batch_softmax(users[:3], items[:3], keys[:3])
    assert (in_batch_softmax(users, items, keys)[:3] > without).all()


def test_the_correction_of_equal_frequencies_changes_nothing() -> None:
    users, items, keys = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4)
    corrected = in_batch_softmax(users, items, keys, log_q=torch.full((4,), -3.0))
    torch.testing.assert_close(corrected, in_batch_softmax(users, items, keys))


def intervals(batches, decay):
    """The mean interval of each item, kept in dictionaries."""
    last, seen, mean = {}, {}, {}
    for step, batch in enumerate(batches, start=1):
        for item in set(batch):
            passed = step - last.get(item, 0)
            seen[item] = seen.get(item, 0) + 1
            weight = max(decay, 1 / seen[item])
            mean[item] = (1 - weight) * mean.get(item, 0.0) + weight * passed
            last[item] = step
    return mean


@pytest.mark.parametrize("num_items", [20, None])
def test_frequencies_equal_brute_force(num_items: int | None) -> None:
    source = np.random.default_rng(1)
    batches = [source.zipf(1.5, 8).clip(max=19).tolist() for _ in range(200)]
    frequency = ItemFrequency(num_items, buckets=1 << 16, decay=0.05)
    for batch in batches:
        frequency.update(torch.tensor(batch))
    expected = intervals(batches, 0.05)
    items = sorted(expected)
    found = (-frequency.log_probability(torch.tensor(items))).exp().tolist()
    assert found == pytest.approx([expected[item] for item in items], rel=1e-4)


def test_an_item_in_every_third_batch_has_a_third() -> None:
    frequency = ItemFrequency(5, buckets=1, decay=0.01)
    for step in range(1, 301):
        frequency.update(torch.tensor([0, 0, 1 if step % 3 == 0 else 2]))
    found = frequency.log_probability(torch.tensor([0, 1, 4])).exp().tolist()
    assert found == pytest.approx([1, 1 / 3, 1 / 300], rel=1e-4)


def test_frequencies_follow_a_change() -> None:
    frequency = ItemFrequency(2, buckets=1, decay=0.1)
    for _ in range(100):
        frequency.update(torch.tensor([0]))
    for step in range(200):
        frequency.update(torch.tensor([0 if step % 4 == 0 else 1]))
    assert frequency.log_probability(torch.tensor([0])).exp().item() == pytest.approx(0.25, rel=0.05)


def test_frequencies_are_in_the_state() -> None:
    first, second = (ItemFrequency(None, buckets=64, decay=0.05) for _ in range(2))
    for step in range(20):
        first.update(torch.tensor([step % 3, -(2**62) + step]))
    second.load_state_dict(first.state_dict())
    keys = torch.tensor([0, 1, 2, 3])
    assert torch.equal(first.log_probability(keys), second.log_probability(keys))


def test_keys_spread_over_the_buckets() -> None:
    frequency = ItemFrequency(None, buckets=1 << 12, decay=0.05)
    for keys in (torch.arange(4096), torch.arange(4096) << 40, torch.arange(4096) * 4096):
        frequency.sightings.zero_()
        frequency.update(keys)
        used = (frequency.sightings > 0).float().mean().item()
        assert used > 0.55  # 1 - 1/e at random
