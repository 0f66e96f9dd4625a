# SPDX-License-Identifier: Apache-2.0
"""Weights of layers, BatchNorm statistics and optimizer states through HugeCTR's files."""

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError, FormatError
from terarec.hugectr.dense_weights import (
    load_dense,
    load_dense_optimizer_states,
    save_dense,
    save_dense_optimizer_states,
)
from terarec.models import GraphModel
from terarec.optim import build_dense_optimizer
from terarec.optim.dense import dense_states
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DenseOptimizerSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    SGDSpec,
)
from tests.errors import at
from tests.hugectr.graphs import batch, layer, model

LAYERS = [
    layer("batch_norm", "input", "normal"),
    layer("mlp", "normal", "deep", num_outputs=[4, 3], biases=[False, True]),
    layer("multi_cross", "deep", "x", num_layers=2),
]
OPTIMIZERS: dict[str, DenseOptimizerSpec] = {
    "sgd": SGDSpec(lr=0.1),
    "momentum": MomentumSpec(lr=0.1, lr_in_momentum=True),
    "nesterov": NesterovSpec(lr=0.1, lr_in_momentum=True),
    "adagrad": AdaGradSpec(lr=0.1, initial_accumulator=0.5),
    "rmsprop": RMSPropSpec(lr=0.1),
    "adam": AdamSpec(lr=0.1, eps_hat=True),
    "ftrl": FTRLSpec(lr=0.1, initial_accumulator=0.25),
}
SAMPLES = batch([[]] * 5, [[]] * 5)


def make(seed: int = 1) -> GraphModel:
    return model(layers=LAYERS, seed=seed)


def train(net: GraphModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net.loss(SAMPLES).backward()
        optimizer.step()


def test_the_file_holds_the_layers_in_order_row_by_row(tmp_path):
    net = make()
    save_dense(net, tmp_path / "_dense_0.model")
    numbers = np.fromfile(tmp_path / "_dense_0.model", "<f4")
    normal, deep, cross, logit = (net.layers[place] for place in (1, 2, 3, 4))
    first, second = deep.mlp.layers
    expected = [normal.gamma, normal.beta, first.weight.t(), torch.zeros(4), second.weight.t(), second.bias]
    expected += [cross.weight[0], cross.bias[0], cross.weight[1], cross.bias[1], logit.linear.weight.t()]
    expected += [logit.linear.bias]
    np.testing.assert_array_equal(numbers, torch.cat([part.detach().reshape(-1) for part in expected]).numpy())


def test_a_model_resumes_elsewhere(tmp_path):
    net, other = make(), make(seed=2)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    save_dense(net, tmp_path / "m")
    load_dense(other, tmp_path / "m")
    assert torch.equal(net.eval().predict(SAMPLES), other.eval().predict(SAMPLES))
    save_dense(other, tmp_path / "again")
    for name in ("m", "m.ntp.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / name.replace("m", "again", 1)).read_bytes()


def test_a_model_without_batch_norm_has_no_statistics(tmp_path):
    save_dense(model(), tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_file_of_another_model_changes_nothing(tmp_path):
    net, small = make(), model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save_dense(small, tmp_path / "small")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/small")):
        load_dense(net, tmp_path / "small")
    save_dense(net, tmp_path / "m")
    (tmp_path / "m.ntp.json").write_text('{"layers": [{"type": "BatchNorm", "mean": [1], "var": [1]}]}')
    with pytest.raises(FormatError, check=at(f"{tmp_path}/m.ntp.json")):
        load_dense(net, tmp_path / "m")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_travel_with_the_weights(tmp_path, kind):
    net, other = make(), make(seed=2)
    optimizer = build_dense_optimizer(OPTIMIZERS[kind], net.parameters())
    second = build_dense_optimizer(OPTIMIZERS[kind], other.parameters())
    train(net, optimizer, 3)
    save_dense(net, tmp_path / "m")
    save_dense_optimizer_states(net, optimizer, tmp_path / "s")
    assert (tmp_path / "s").stat().st_size == len(dense_states(optimizer)) * (tmp_path / "m").stat().st_size
    load_dense(other, tmp_path / "m")
    load_dense_optimizer_states(other, second, tmp_path / "s")
    for mine, theirs in zip(dense_states(optimizer).values(), dense_states(second).values(), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))
    if kind != "adam":  # whose bias correction counts steps, which no file holds
        train(net, optimizer, 2)
        train(other, second, 2)
        assert all(torch.equal(one, two) for one, two in zip(net.parameters(), other.parameters(), strict=True))


def test_states_before_the_first_step(tmp_path):
    net = make()
    optimizer = build_dense_optimizer(OPTIMIZERS["ftrl"], net.parameters())
    save_dense_optimizer_states(net, optimizer, tmp_path / "s")
    total, linear = np.split(np.fromfile(tmp_path / "s", "<f4"), 2)
    assert set(total.tolist()) == {0.25, 0.0}  # zero for the bias that is switched off
    assert not linear.any()


def test_states_of_another_optimizer_change_nothing(tmp_path):
    net = make()
    adam = build_dense_optimizer(OPTIMIZERS["adam"], net.parameters())
    adagrad = build_dense_optimizer(OPTIMIZERS["adagrad"], net.parameters())
    train(net, adam, 1)
    save_dense_optimizer_states(net, adam, tmp_path / "s")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/s")):
        load_dense_optimizer_states(net, adagrad, tmp_path / "s")
    torch_momentum = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, check=at("optimizer states")):
        save_dense_optimizer_states(net, torch_momentum, tmp_path / "t")
