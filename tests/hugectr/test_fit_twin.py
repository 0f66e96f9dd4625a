# SPDX-License-Identifier: Apache-2.0
"""`Model.fit` against a plain loop over the same graph: weights, optimizer states and tables are the same bits."""

import itertools

import pytest
import torch

import terarec.hugectr as hugectr
from terarec.data.records import NormSource, RecordReader
from terarec.models import GraphModel
from terarec.optim import LearningRateSchedule, RowOptimizer, build_dense_optimizer
from terarec.spec import AdamSpec, FTRLSpec, RowOptions
from tests.hugectr.planted import layout
from tests.hugectr.scripts import ADAM, dcn

STEPS = 45  # more than an epoch
SCHEDULE = {"warmup_steps": 10, "decay_start": 20, "decay_steps": 30}
FTRL = {"optimizer_type": hugectr.Optimizer_t.Ftrl, "lambda1": 1e-4, "beta": 0.5}


def plain_loop(spec, source, dense_rule, row_rule):
    torch.manual_seed(5)
    model = GraphModel(spec, seed=5)
    dense = build_dense_optimizer(dense_rule, model.layers.parameters())
    rows = [RowOptimizer(collection, row_rule) for collection in model.embeddings.values()]
    schedule = LearningRateSchedule(base_lr=dense_rule.lr, **SCHEDULE)
    reader = RecordReader(NormSource(source, layout(), checksum=True), batch_size=500, repeat=True, drop_last=True)
    for step, batch in enumerate(itertools.islice(reader, STEPS), 1):
        for optimizer in (dense, *rows):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr(step)
        model.loss(batch).backward()
        for optimizer in (dense, *rows):
            optimizer.step()
    reader.close()
    return model, dense


@pytest.mark.parametrize(
    ("optimizer", "dense_rule", "row_rule"),
    [
        (
            ADAM,
            AdamSpec(lr=0.01, eps=1e-7, eps_hat=True),
            AdamSpec(lr=0.01, eps=1e-7, eps_hat=True, rows=RowOptions(mode="global")),
        ),
        (FTRL, FTRLSpec(lr=0.01, beta=0.5, l1=1e-4), FTRLSpec(lr=0.01, beta=0.5, l1=1e-4)),
    ],
    ids=["adam", "ftrl"],
)
def test_fit_equals_a_plain_loop(planted, optimizer, dense_rule, row_rule):
    made = dcn(*planted[:2], optimizer=optimizer, **SCHEDULE)
    made.fit(max_iter=20, display=0, eval_interval=7)
    for _ in range(5):
        made.set_learning_rate(made.get_learning_rate_scheduler().get_next())
        assert made.train()
    made.fit(max_iter=STEPS - 25, display=0, eval_interval=0)
    model, dense = plain_loop(made.module.spec, planted[0], dense_rule, row_rule)
    mine, theirs = made.module.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    states = zip(dense.state.values(), made._compiled("test").trainer.optimizers.dense.state.values(), strict=True)
    for expected, found in states:
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
    table, expected = (net.collection("embedding").tables["embedding"] for net in (made.module, model))
    keys = expected.keys()
    for name, value in expected.export(keys).state.items():
        assert torch.equal(table.export(keys).state[name], value), name
