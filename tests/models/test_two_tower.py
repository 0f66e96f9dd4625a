"""The training loss of the two towers: queries, weights and frequencies."""

from dataclasses import replace

import torch

from terarec.models import TwoTower
from terarec.nn.retrieval import in_batch_softmax
from tests.models.every import TWO_TOWER_MODELS, dataset, random_batch

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
    for row in is_query.nonzero()[:, 0].tolist():  # one query at a time, all items as candidates
        only = torch.zeros(12, dtype=torch.bool)
        only[row] = True
        log_q = model.frequency.log_probability(keys)
        losses.append(in_batch_softmax(output.user, output.item, keys, log_q=log_q, queries=only) * batch.weight[row])
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
