# SPDX-License-Identifier: Apache-2.0

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from terarec.checkpoint.state import flatten, unflatten
from terarec.errors import ConfigError, FormatError
from tests.errors import at

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1, fused=True),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.1, fused=True),
    "amsgrad, tensor rate": lambda parameters: optim.AdamW(parameters, lr=torch.tensor(0.1), amsgrad=True),
}


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_resumes_to_the_bit(make):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    step(model, optimizer)
    twin = copy.deepcopy(model)
    twin_optimizer = make(twin.parameters())
    tensors, text = flatten(optimizer.state_dict())
    twin_optimizer.load_state_dict(unflatten({name: tensor.clone() for name, tensor in tensors.items()}, text))
    for _ in range(3):
        step(model, optimizer)
        step(twin, twin_optimizer)
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


@given(st.dictionaries(st.text(), FLOATS | st.none() | st.booleans() | st.integers() | st.tuples(FLOATS, FLOATS)))
def test_options_keep_value_and_type(options):
    state = {"state": {0: {"count": 3}}, "param_groups": [{**options, "params": [0]}]}
    assert unflatten(*flatten(state)) == state


def test_what_cannot_be_carried_is_named():
    with pytest.raises(ConfigError, check=at("optimizer state")):
        flatten({"state": {}, "param_groups": [{"params": {1, 2}}]})
    with pytest.raises(ConfigError, check=at("optimizer option 'lr'")):
        flatten({"state": {}, "param_groups": [{"lr": torch.zeros(2, dtype=torch.float64)}]})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"groups": 3, "plain": {}}', '{"groups": [], "plain": {"x": {}}}'])
def test_damaged_text_is_one_error(text):
    with pytest.raises(FormatError, check=at("optimizer state")):
        unflatten({}, text)
