# SPDX-License-Identifier: Apache-2.0
"""`replace_embeddings` in models with ties, hooks, optimizers and modules that it must leave alone."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import terarec

KEYS = torch.tensor([[1, 2, 2], [0, 4, 1]])


class Model(nn.Module):
    """Two modules in three places, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(5, 4, mode="sum", padding_idx=2)
        self.words = nn.Sequential(nn.Embedding(6, 4), nn.Tanh())
        self.again = self.words[0]
        self.tied = nn.Embedding(6, 4)
        self.tied.weight = self.words[0].weight
        self.dense = nn.Linear(4, 1)

    def forward(self, keys: Tensor) -> Tensor:
        return self.dense(self.bag(keys) + self.words(keys).sum(1) + self.again(keys).sum(1) + self.tied(keys).mean(1))


def test_a_model_trains_on_as_if_nothing_had_happened():
    model = Model()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, plain)]
    words, weight = model.words[0], model.words[0].weight
    for step in range(4):
        if step == 1:
            assert terarec.replace_embeddings(model) is model
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(KEYS).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert type(model.bag) is terarec.EmbeddingBag
    assert type(model.tied) is terarec.Embedding
    assert model.words[0] is model.again is words
    assert model.tied.weight is words.weight is weight


def test_hooks_and_flags_stay():
    model = Model()
    seen: list[str] = []
    model.bag.register_forward_hook(lambda *_: seen.append("forward"))
    model.bag.weight.register_hook(lambda _: seen.append("backward"))
    model.tied.eval()
    model.words[0].weight.requires_grad_(False)
    terarec.replace_embeddings(model)
    model(KEYS).sum().backward()
    assert seen == ["forward", "backward"]
    assert not model.tied.training
    assert model.bag.training
    assert model.words[0].weight.grad is None


def test_a_model_that_is_itself_an_embedding():
    model = nn.EmbeddingBag(5, 4)
    expected = model(KEYS)
    assert type(terarec.replace_embeddings(model)) is terarec.EmbeddingBag
    torch.testing.assert_close(model(KEYS), expected)


class Shifted(nn.Embedding):
    def forward(self, keys: Tensor) -> Tensor:
        return super().forward(keys + 1)


def test_modules_that_are_not_replaced_are_logged(caplog: pytest.LogCaptureFixture):
    patched = nn.Embedding(5, 4)
    patched.forward = lambda keys: keys
    wide = nn.Embedding(5, 4, dtype=torch.float64)
    model = nn.ModuleDict({"shifted": Shifted(5, 4), "patched": patched, "wide": wide, "good": nn.Embedding(5, 4)})
    with caplog.at_level(logging.INFO):
        terarec.replace_embeddings(model)
    said = [(record.levelname, record.getMessage().removeprefix("replace_embeddings: ")) for record in caplog.records]
    assert said == [
        ("WARNING", "shifted is not replaced: Shifted is a subclass, which may compute something else"),
        ("WARNING", "patched is not replaced: its forward was patched"),
        ("WARNING", "wide is not replaced: its weights are float64, not float32, bfloat16 or float16"),
        ("INFO", "1 modules replaced: good"),
    ]
    assert type(model["shifted"]) is Shifted


def test_replacing_again_changes_nothing(caplog: pytest.LogCaptureFixture):
    model = terarec.replace_embeddings(Model())
    with caplog.at_level(logging.INFO):
        terarec.replace_embeddings(model)
    assert [record.getMessage() for record in caplog.records] == ["replace_embeddings: 0 modules replaced: none"]
