# SPDX-License-Identifier: Apache-2.0
"""Layers and losses that compare the samples of a batch give on ranks what they give in one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, one_hot, select
from terarec.dist import Ranks, RowWise, same_for_all, shard
from terarec.dist.shard import ShardedCollection
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.nn import MLP
from terarec.nn.activations import Dice
from terarec.nn.attention import TargetAttention
from terarec.nn.layer import TensorShape
from terarec.nn.negatives import Sampler
from terarec.nn.objectives import Objective, PairwiseObjective
from terarec.nn.registry import build_layer
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    GraphLabel,
    GraphLayer,
    GraphModelSpec,
    GraphSpec,
    LabelColumn,
    MFBPRSpec,
    NegativesSpec,
    SASRecSpec,
    SGDSpec,
    StaticTablesSpec,
    TrainingSpec,
    TwoTowerSpec,
    YouTubeDNNSpec,
)
from terarec.spec.run import PairwiseSpec
from terarec.train import Optimizers, Trainer
from terarec.train.evaluation import Evaluator
from terarec.train.ranks_step import share_batches
from tests.dist.launch import Raised, run_ranks
from tests.errors import at

SIZES = (7, 2, 1, 12)  # of three ranks, one gets nothing of a batch of two samples
RATE = SGDSpec(lr=0.3)
DATASET = DatasetSpec(
    name="pairs",
    storage="parquet",
    labels=(LabelColumn(name="label"),),
    dense=tuple(DenseColumn(name=f"x{number}") for number in range(3)),
    categorical=(CategoricalColumn(name="user", rows=11), CategoricalColumn(name="item", rows=5)),
)
TOWERS = TwoTowerSpec(
    width=4, user=("x0", "user"), item=("x1", "item"), hidden=(6,), vector_width=5, correct_sampling=True
)
SHARED = replace(TOWERS, tables=StaticTablesSpec(shared={"user": "item"}))
EQUAL = replace(DATASET, categorical=tuple(replace(column, rows=11) for column in DATASET.categorical))
PENALTY = GraphSpec(
    labels=(GraphLabel(name="label"),),
    dense_dim=3,
    layers=(
        GraphLayer(kind="mlp", bottoms=("dense",), tops=("x",), options={"num_outputs": [4]}),
        GraphLayer(kind="batch_norm", bottoms=("x",), tops=("y",), options={"factor": 0.3}),
        GraphLayer(kind="mlp", bottoms=("y",), tops=("z",), options={"num_outputs": [1], "activations": ["none"]}),
        GraphLayer(
            kind="binary_cross_entropy",
            bottoms=("z", "label"),
            tops=("loss",),
            options={"regularizer": "l2", "strength": 0.5},
        ),
    ),
)


class Net(nn.Module):
    """Layers over the dense columns."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Batch) -> Tensor:
        out: Tensor = self.layers(batch.dense)
        return out


def net(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    made = Net(nn.Linear(3, 4), *middle, nn.Linear(4, 1))
    for module in middle:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    return made


class Attending(Net):
    """Attention to histories of one vector, which samples with a label above 0 have."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1))
        inner = MLP(8, (5, 1), generator=torch.Generator().manual_seed(7), activation="dice")
        self.first, self.attention = nn.Linear(3, 4), TargetAttention(inner, 2)

    def forward(self, batch: Batch) -> Tensor:
        target, values = self.first(batch.dense).split(2, dim=1)
        has_history = batch.label[:, 0] > 0
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), has_history.cumsum(0)])
        out: Tensor = self.layers(torch.cat([target, self.attention(target, values[has_history], offsets)], dim=1))
        return out


def attending() -> nn.Module:
    torch.manual_seed(3)
    return Attending()


class Counting(Net):
    """Draws by popularity, the counts of which are no number of its loss; a further term of the loss in training."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(3, 1))
        self.sampler = Sampler(NegativesSpec(draw="popularity"), 1, 5, where="negatives")

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            self.sampler.observe(select(batch.sparse, ["item"]).keys)
        return super().forward(batch)

    def auxiliary_loss(self, output: Tensor, batch: Batch) -> Tensor:
        return output.square().mean()


def graph() -> nn.Module:
    return build_model(GraphModelSpec(graph=PENALTY), DATASET, num_outputs=1, seed=2)


CASES: dict[str, tuple[Callable[[], nn.Module], Objective | None]] = {
    "batch norm of torch": (lambda: net(nn.BatchNorm1d(4, momentum=0.2)), None),
    "its mean over all batches": (lambda: net(nn.BatchNorm1d(4, momentum=None, affine=False)), None),
    "dice": (lambda: net(Dice(4, momentum=0.3)), None),
    "prelu_dice": (
        lambda: net(build_layer("prelu_dice", [TensorShape(1, (4,))], {"alpha": 0.25}, generator=torch.Generator())),
        None,
    ),
    "pairs": (lambda: net(), PairwiseObjective(PairwiseSpec())),
    "pairs by key": (lambda: net(), PairwiseObjective(PairwiseSpec(group="item"))),
    "pairs by text": (lambda: net(), PairwiseObjective(PairwiseSpec(group="session"))),
    "pairs and a further term": (Counting, PairwiseObjective(PairwiseSpec())),
    "a further term": (Counting, None),
    "attention to histories that few ranks have": (attending, None),
    "two towers": (lambda: build_model(TOWERS, DATASET, num_outputs=1, seed=4), None),
    "two towers of one table": (lambda: build_model(SHARED, EQUAL, num_outputs=1, seed=4), None),
    "graph with a penalty": (graph, None),
}


def batch(step: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    keys = torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in (11, 5)])
    sessions = torch.randint(0, 3, (size,), generator=generator).tolist()
    return Batch(
        dense=torch.randn(size, 3, generator=generator),
        label=(torch.rand(size, 1, generator=generator) < 0.5).float(),
        sparse=one_hot(("user", "item"), keys),
        weight=torch.rand(size, generator=generator) + 0.5,
        metadata={"session": pa.array([None if n == 2 else f"s{n}" for n in sessions])},
    )


def trained(ranks: Ranks, case: str) -> dict[str, list[float]]:
    """Train on batches of all sizes; return losses, the loss of an evaluation, and the weights and statistics."""
    make, objective = CASES[case]
    model = make()
    tables = [spec for held in model.modules() if isinstance(held, EmbeddingCollection) for spec in held.specs]
    if ranks.size > 1 and tables:
        shard(model, same_for_all(tables, RowWise(), ranks.size), ranks)
    trainer = Trainer(model, TrainingSpec(), Optimizers.of(model, RATE, RATE), objective=objective, ranks=ranks)
    takes_one = not any(type(module) is nn.BatchNorm1d for module in make().modules())
    sizes = SIZES if takes_one else [max(2, size) for size in SIZES]
    found = [trainer.train_step(batch(step, size)) for step, size in enumerate(sizes)]
    evaluator = Evaluator(objective, metrics=("average_loss",), ranks=ranks)
    found.append(torch.tensor(evaluator.evaluate(model, [batch(50, 7), batch(51, 2)]).value("average_loss")))
    state = {name: held.clone() for name, held in model.state_dict().items() if held.numel() and "table" not in name}
    return {name: held.double().flatten().tolist() for name, held in {"losses": torch.stack(found), **state}.items()}


NEXT: dict[str, Any] = {
    "item": "item",
    "history": "past",
    "width": 4,
    "negatives": NegativesSpec(draw="batch", count=20),
}
DRAWS: dict[str, Any] = {
    "mf_bpr": MFBPRSpec(user="user", item="item", width=4, negatives=NegativesSpec(draw="batch")),
    "sasrec": SASRecSpec(**NEXT),
    "youtube_dnn": YouTubeDNNSpec(**NEXT, hidden=(4,), loss="sampled_softmax"),
}


def drawn(ranks: Ranks, case: str) -> float:
    """Return the loss of a batch of two samples, whose only negatives are the other's items."""
    past = CategoricalColumn(name="past", rows=5, hotness=2)
    columns = replace(DATASET, dense=(), categorical=(*DATASET.categorical, past))
    model = build_model(DRAWS[case], columns, seed=4)
    tables = [spec for held in model.modules() if isinstance(held, EmbeddingCollection) for spec in held.specs]
    if ranks.size > 1:
        shard(model, same_for_all(tables, RowWise(), ranks.size), ranks)
    trainer = Trainer(model, TrainingSpec(), Optimizers.of(model, RATE, RATE), ranks=ranks)
    keys = torch.tensor([1, 2, 1, 3, 2, 4])
    sparse = Jagged(names=("user", "item", "past"), keys=keys, offsets=torch.arange(7))
    return float(trainer.train_step(Batch(dense=torch.empty(2, 0), label=torch.ones(2, 1), sparse=sparse)))


def all_cases(ranks: Ranks) -> dict[str, dict[str, list[float]]]:
    of_draws = {case: {"losses": [drawn(ranks, case)]} for case in DRAWS}
    return {**{case: trained(ranks, case) for case in CASES}, **of_draws}


@pytest.mark.slow
def test_what_compares_samples_learns_from_those_of_all_ranks() -> None:
    expected = all_cases(Ranks())
    for found in run_ranks(3, all_cases):
        assert not isinstance(found, Raised | str), found
        for case in DRAWS:
            # Of mf_bpr each sample has one negative alone; of the others draws differ.
            (loss,) = found[case]["losses"]
            assert loss > 0.1, case
            assert case != "mf_bpr" or loss == pytest.approx(expected[case]["losses"][0], rel=1e-5)
        for case, state in ((case, expected[case]) for case in CASES):
            for name, wanted in state.items():
                if name not in found[case]:
                    assert "embedding" in name, name  # a table that is on several ranks
                    continue
                assert found[case][name] == pytest.approx(wanted, rel=2e-5, abs=2e-6), f"{case}: {name}"


class TwoRanks(Ranks):
    """Ranks of a process that has no other one, for what does not talk."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


def test_a_batch_norm_of_images_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("ranks", "BatchNorm2d")):
        share_batches(net(nn.BatchNorm2d(4)), PairwiseObjective(PairwiseSpec()), TwoRanks())


def test_a_module_of_two_names_is_replaced_under_both() -> None:
    """The second name kept the module of one process."""
    model: Any = net(nn.BatchNorm1d(4))
    tables = build_model(TOWERS, DATASET, num_outputs=1, seed=4).user.embedding
    model.first = model.second = nn.ModuleList([tables])
    model.third, model.again = tables, model.layers[1]
    shard(model, same_for_all(tables.specs, RowWise(), 1), Ranks())
    share_batches(model, PairwiseObjective(PairwiseSpec()), TwoRanks())
    assert isinstance(model.third, ShardedCollection)
    assert model.first[0] is model.third
    assert model.again is model.layers[1]
    assert model.again.batch_ranks is not None


def test_one_process_takes_what_several_trained() -> None:
    model: Any = net(nn.BatchNorm1d(4))
    share_batches(model, PairwiseObjective(PairwiseSpec()), TwoRanks())
    assert model.layers[1].batch_ranks is not None
    share_batches(model, PairwiseObjective(PairwiseSpec()), Ranks())
    assert model.layers[1].batch_ranks is None
    assert model(batch(0, 3)).shape == (3, 1)
