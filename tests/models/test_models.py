from dataclasses import replace

import pytest
import torch
from torch import nn

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.models import DLRM, WideDeep, build_model
from terarec.nn import logistic_loss
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import AdaGradSpec, AdamSpec, DLRMSpec, ModelSpec, WideDeepSpec
from tests.models.planted import planted_batch, planted_dataset

SPECS: list[ModelSpec] = [DLRMSpec(width=8, bottom=(16, 8), top=(32, 16)), WideDeepSpec(width=8, hidden=(32, 16))]
each_model = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)


@each_model
def test_learns_the_planted_answer(spec: ModelSpec) -> None:
    model = build_model(spec, planted_dataset(), seed=1)
    dense, rows = build_dense_optimizer(AdamSpec(lr=0.01), model.parameters()), RowOptimizer(model, AdaGradSpec(lr=0.1))
    for step in range(150):
        batch = planted_batch(seed=step)
        loss = logistic_loss(model(batch), batch.label)
        dense.zero_grad()
        loss.backward()
        dense.step()
        rows.step()
    held_out = planted_batch(2000, seed=-1)
    with torch.no_grad():
        right = ((model.eval()(held_out) > 0).float() == held_out.label).float().mean().item()
    assert right > 0.95


@each_model
def test_bfloat16_training_stays_near_float32(spec: ModelSpec) -> None:
    losses = []
    for enabled in (False, True):
        model = build_model(spec, planted_dataset(), seed=1)
        dense, rows = build_dense_optimizer(AdamSpec(lr=0.01), model.parameters()), RowOptimizer(model, AdaGradSpec())
        for step in range(20):
            batch = planted_batch(seed=step)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits = model(batch)
            loss = logistic_loss(logits, batch.label)
            dense.zero_grad()
            loss.backward()
            dense.step()
            rows.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=0.03)


@each_model
def test_several_labels_and_a_state_dict_that_restores(spec: ModelSpec) -> None:
    dataset, batch = planted_dataset(num_labels=3), planted_batch(num_labels=3)
    model, other = (build_model(spec, dataset, seed=seed).eval() for seed in (1, 2))
    assert model(batch).shape == (256, 3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch), model(batch))


@each_model
def test_the_seed_alone_decides_the_first_weights(spec: ModelSpec) -> None:
    torch.manual_seed(5)
    first = build_model(spec, planted_dataset(), seed=3).state_dict()
    torch.manual_seed(6)
    second = build_model(spec, planted_dataset(), seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dlrm_equals_its_formula() -> None:
    model = DLRM(DLRMSpec(width=4, bottom=(5, 4), top=(6,)), planted_dataset())
    batch = planted_batch(9)
    keys = batch.sparse.keys.view(2, 9)
    x, a, b = model.bottom(batch.dense), model.embedding.table("a")[keys[0]], model.embedding.table("b")[keys[1]]
    dots = torch.stack([(a * x).sum(1), (b * x).sum(1), (b * a).sum(1)], dim=1)
    padded = nn.functional.pad(torch.cat([x, dots], dim=1), (0, 9))
    torch.testing.assert_close(model(batch), model.top(padded))


def test_wide_and_deep_equals_its_formula() -> None:
    model = WideDeep(WideDeepSpec(width=4, hidden=(6,)), planted_dataset())
    assert model.wide is not None
    assert model.embedding is not None
    model.wide.table("a.wide").uniform_()
    nn.init.normal_(model.linear_weight)
    batch = planted_batch(9)
    keys = batch.sparse.keys.view(2, 9)
    wide = (
        model.wide.table("a.wide")[keys[0]] + model.wide.table("b.wide")[keys[1]] + batch.dense @ model.linear_weight.T
    )
    vectors = [model.embedding.table(name)[part] for name, part in zip("ab", keys, strict=True)]
    torch.testing.assert_close(model(batch), wide + model.deep(torch.cat([batch.dense, *vectors], dim=1)))


def test_wide_and_deep_without_dense_or_without_categories() -> None:
    batch = planted_batch(9)
    no_dense = WideDeep(WideDeepSpec(), planted_dataset(num_dense=0))
    assert no_dense(Batch(dense=torch.empty(9, 0), label=batch.label, sparse=batch.sparse)).shape == (9, 1)
    no_keys = WideDeep(WideDeepSpec(), replace(planted_dataset(), categorical=()))
    empty = Jagged(names=(), keys=batch.sparse.keys[:0], offsets=torch.zeros(1, dtype=torch.int64))
    assert no_keys(Batch(dense=batch.dense, label=batch.label, sparse=empty)).shape == (9, 1)


def test_one_vector_has_no_pair() -> None:
    dataset = replace(planted_dataset(num_dense=0), categorical=planted_dataset().categorical[:1])
    with pytest.raises(ConfigError, match="'planted' has one categorical and no dense column"):
        DLRM(DLRMSpec(), dataset)
    DLRM(DLRMSpec(interaction="cat"), dataset)
