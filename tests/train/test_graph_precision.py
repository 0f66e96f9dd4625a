# SPDX-License-Identifier: Apache-2.0
"""Training a graph in 16 bits: what is multiplied in which format, and what a loss scale keeps."""

import dataclasses

import pytest
import torch

from terarec.spec import AdamSpec, SGDSpec
from tests.hugectr.graphs import batch, dynamic, embedding, layer, model, new_trainer
from tests.train.graph_cases import CASES

BATCH = batch(*[[[n % 5] for n in range(16)]] * 2)


def trained(precision, loss_scale, rule, *, steps=3):
    torch.manual_seed(0)
    made = model(embedding(dynamic("t"), slots=2), layers=[layer("mlp", "input", "x", num_outputs=[8, 4])])
    trainer = new_trainer(made, rule, {"default": rule}, precision=precision, loss_scale=loss_scale)
    losses = [float(trainer.train_step(BATCH)) for _ in range(steps)]
    return made, losses


@pytest.mark.parametrize("rule", [SGDSpec(lr=0.5), AdamSpec(lr=0.05)])
def test_a_power_of_two_as_loss_scale_changes_no_bit_in_float32(rule):
    plain, scaled = trained("fp32", 1.0, rule), trained("fp32", 1024.0, rule)
    assert plain[1] == scaled[1]
    for mine, theirs in zip(plain[0].layers.parameters(), scaled[0].layers.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_training_in_16_bits_follows_float32(precision):
    (_, expected), (made, found) = trained("fp32", 1.0, SGDSpec(lr=0.1)), trained(precision, 1024.0, SGDSpec(lr=0.1))
    assert found == pytest.approx(expected, abs=0.01)
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}


def first_gradient(loss_scale):
    """Return what the first of two layers learns in fp16 from a logit whose gradient, 3e-9, is below fp16's least."""
    made = model(layers=[layer("inner_product", "input", "x", num_output=4)])
    _, first, logit, _ = made.layers
    with torch.no_grad():
        logit.linear.bias.fill_(-17.0)
    sure = dataclasses.replace(BATCH, label=torch.zeros_like(BATCH.label))
    new_trainer(made, SGDSpec(lr=1e-3), {}, precision="fp16", loss_scale=loss_scale).train_step(sure)
    return first.linear.weight.grad.abs().sum()


def test_a_loss_scale_keeps_gradients_that_fp16_would_lose():
    assert first_gradient(1.0) == 0.0
    assert first_gradient(2.0**15) > 0.0


@pytest.mark.parametrize("case", CASES)
def test_cases_that_a_gpu_is_held_to(case):
    CASES[case](torch.device("cpu"))
