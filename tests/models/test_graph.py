# SPDX-License-Identifier: Apache-2.0
"""Graphs of named tensors: what they compute, what they reject, and that they train like any module."""

import json
from dataclasses import replace

import pytest
import torch

from terarec.batch import Batch, Jagged, one_hot
from terarec.errors import ConfigError
from terarec.models import GraphModel
from terarec.optim import RowOptimizer, freeze, unfreeze
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTableSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    SGDSpec,
    TableSpec,
    from_data,
    to_data,
)
from tests.errors import at
from tests.hugectr.graphs import evaluated, new_trainer
from tests.models.planted import planted_batch

CLICK = GraphLabel(name="click")


def layer(kind, bottoms, tops, **options):
    return GraphLayer(kind=kind, bottoms=tuple(bottoms.split()), tops=tuple(tops.split()), options=options)


def loss_of(logit, label="click", top="loss", **options):
    return layer("binary_cross_entropy", f"{logit} {label}", top, **options)


def features(*names, **fields):
    return tuple(GraphFeature(name=name, table="t", **fields) for name in names)


def planted_graph(table=None, **fields):
    """Two categories and two numbers, as `planted_batch` has them."""
    table = table or DynamicTableSpec(name="t", width=4)
    return GraphSpec(
        labels=(CLICK,),
        dense_dim=2,
        embeddings=(GraphEmbedding(name="e", tables=(table,), features=features("a", "b"), **fields),),
        layers=(
            layer("reshape", "e", "flat", leading_dim=8),
            layer("concat", "flat dense", "all"),
            layer("mlp", "all", "deep", num_outputs=[16, 8]),
            layer("multi_cross", "all", "cross", num_layers=1),
            layer("concat", "deep cross", "both"),
            layer("inner_product", "both", "logit", num_output=1),
            loss_of("logit"),
        ),
    )


def train(model, steps=60, **options):
    trainer = new_trainer(model, AdamSpec(lr=0.02), {"default": AdamSpec(lr=0.02)}, **options)
    return trainer, [float(trainer.train_step(planted_batch(seed=seed))) for seed in range(steps)]


def test_a_tensor_read_twice_has_the_sum_of_both_gradients():
    spec = GraphSpec(
        labels=(CLICK,),
        dense_dim=2,
        layers=(
            layer("inner_product", "dense", "x", num_output=1),
            layer("add", "x x", "twice"),
            loss_of("twice"),
        ),
    )
    model, batch = GraphModel(spec, seed=1), planted_batch(8)
    model.loss(batch).backward()
    weight, bias = model.layers[0].file_parameters()
    probability = (2 * (batch.dense @ weight + bias)).sigmoid()
    expected = (2 * (probability - batch.label) * batch.dense).mean(0)
    torch.testing.assert_close(model.layers[0].linear.weight.grad[0], expected)


def test_the_same_seed_gives_the_same_curve_bit_for_bit_and_another_does_not():
    first, second, third = (train(GraphModel(planted_graph(), seed=seed), 5)[1] for seed in (3, 3, 4))
    assert first == second != third


def test_a_graph_from_json_is_the_same_model():
    spec = from_data(GraphSpec, json.loads(json.dumps(to_data(planted_graph()))))
    assert train(GraphModel(spec, seed=3), 5)[1] == train(GraphModel(planted_graph(), seed=3), 5)[1]


def test_it_learns_and_evaluation_leaves_dynamic_tables_alone():
    model = GraphModel(planted_graph(), seed=1)
    _, losses = train(model, 200)
    assert losses[-1] < 0.25 < 0.5 < losses[0]
    strange = one_hot(["a", "b"], torch.full((2, 3), 10**12))
    batch = Batch(dense=torch.zeros(3, 2), label=torch.ones(3, 1), sparse=strange)
    loss, tensors = evaluated(model, batch)
    assert len(model.embeddings["e"].tables["t"]) == 6
    assert not tensors["e"].any()
    assert loss.item() > 0
    assert model.predict(batch).shape == (3, 1)


def test_a_custom_loop_equals_the_trainer():
    model = GraphModel(planted_graph(TableSpec(name="t", rows=6, width=4)), seed=1)
    dense, rows = torch.optim.SGD(model.parameters(), lr=0.1), RowOptimizer(model, AdaGradSpec(lr=0.1))
    losses = []
    for seed in range(4):
        dense.zero_grad()
        loss = model.loss(planted_batch(seed=seed))
        loss.backward()
        dense.step()
        rows.step()
        losses.append(float(loss.detach()))
    twin = GraphModel(planted_graph(TableSpec(name="t", rows=6, width=4)), seed=1)
    trainer = new_trainer(twin, SGDSpec(lr=0.1), {"default": AdaGradSpec(lr=0.1)})
    assert losses == pytest.approx([float(trainer.train_step(planted_batch(seed=seed))) for seed in range(4)], abs=1e-6)


def test_outputs_of_embeddings_are_the_same_vectors_in_other_shapes():
    batch, stacked = planted_batch(5), GraphModel(planted_graph(), seed=1)
    wide = (layer("concat", "e dense", "all"), layer("inner_product", "all", "logit", num_output=1), loss_of("logit"))
    flat = GraphSpec(
        labels=(CLICK,),
        dense_dim=2,
        embeddings=(
            GraphEmbedding(
                name="e", tables=(DynamicTableSpec(name="t", width=4),), features=features("a", "b"), output="flat"
            ),
        ),
        layers=wide,
    )
    vectors = stacked.tensor(batch, "e")
    assert vectors.shape == (5, 2, 4)
    assert torch.equal(GraphModel(flat, seed=1).tensor(batch, "e"), vectors.flatten(1))
    apart = from_data(
        GraphSpec,
        {
            **to_data(flat),
            "embeddings": [{**to_data(flat.embeddings[0]), "output": "apart"}],
            "layers": [
                to_data(layer("reshape", "b", "x", leading_dim=4)),
                *[to_data(item) for item in (layer("inner_product", "x", "logit", num_output=1), loss_of("logit"))],
            ],
        },
    )
    assert torch.equal(GraphModel(apart, seed=1).tensor(batch, "b"), vectors[:, 1:])


@pytest.mark.parametrize("lengths", [(2, 2, 2), (0, 2, 1)], ids=["full", "ragged"])
def test_concat_pads_with_zeros_and_a_column_may_be_read_twice(lengths):
    table = TableSpec(name="t", rows=9, width=3)
    both = (
        GraphFeature(name="side", table="t", pooling="concat", column="a", max_keys=2),
        GraphFeature(name="sum", table="t", column="a"),
    )
    spec = GraphSpec(
        labels=(CLICK,),
        embeddings=(GraphEmbedding(name="e", tables=(table,), features=both, output="flat"),),
        layers=(layer("inner_product", "e", "logit", num_output=1), loss_of("logit")),
    )
    model = GraphModel(spec, seed=2)
    keys = torch.arange(sum(lengths)) + 1
    sparse = Jagged(names=("a",), keys=keys, offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0)]))
    batch = Batch(dense=torch.empty(3, 0), label=torch.ones(3, 1), sparse=sparse)
    bags = keys.split(list(lengths))
    rows = model.collection("e").table("t")
    expected = torch.stack(
        [torch.cat([rows[bag].flatten(), torch.zeros(6 - 3 * len(bag)), rows[bag].sum(0)]) for bag in bags]
    )
    torch.testing.assert_close(model.tensor(batch, "e"), expected)
    optimizer = RowOptimizer(model, SGDSpec(lr=1.0))
    before = rows.clone()
    model.loss(batch).backward()
    optimizer.step()
    assert set((rows != before).any(1).nonzero()[:, 0].tolist()) == set(keys.tolist())


@pytest.mark.parametrize("name", ["keys", "values", "items", "forward"])
def test_an_embedding_may_be_named_like_a_method(name):
    model, twin = (GraphModel(graph_of_one_embedding(name), seed=seed) for seed in (1, 2))
    assert list(model.embeddings) == list(model.embeddings.keys()) == [name]
    twin.load_state_dict(model.state_dict())
    batch = planted_batch()
    assert torch.equal(model.predict(batch), twin.predict(batch))


def test_an_embedding_may_not_be_named_like_what_every_module_has():
    with pytest.raises(ConfigError, check=at("embedding name")):
        GraphModel(graph_of_one_embedding("training"))


def graph_of_one_embedding(name):
    tables = (TableSpec(name="t", rows=6, width=4),)
    return GraphSpec(
        labels=(CLICK,),
        dense_dim=2,
        embeddings=(GraphEmbedding(name=name, tables=tables, features=features("a", "b")),),
        layers=(
            layer("reshape", name, "flat", leading_dim=8),
            layer("inner_product", "flat", "logit", num_output=1),
            loss_of("logit"),
        ),
    )


def test_several_labels_are_cut_in_order_and_weighed():
    spec = GraphSpec(
        labels=(GraphLabel(name="first", weight=0.25), GraphLabel(name="second", weight=4.0)),
        dense_dim=2,
        layers=(
            layer("inner_product", "dense", "x", num_output=1),
            layer("inner_product", "dense", "y", num_output=1),
            loss_of("y", "second", "b"),
            loss_of("x", "first", "a"),
        ),
    )
    model = GraphModel(spec, seed=1)
    batch = planted_batch(16, num_labels=2)
    batch.label[:, 1] = 1.0
    tensors = model(batch)
    assert torch.equal(tensors["second"], torch.ones(16, 1))
    losses = model.losses(tensors)
    torch.testing.assert_close(model.loss(batch), 0.25 * losses["a"] + 4 * losses["b"])
    # In the order of the label columns, not of the losses.
    torch.testing.assert_close(model.predict(batch), torch.cat([tensors["x"], tensors["y"]], dim=1).sigmoid())
    assert list(model.logits().items()) == [("first", "x"), ("second", "y")]
    again = GraphModel(replace(spec, layers=(*spec.layers, loss_of("y", "first", "c"))), seed=1)
    assert again.logits() == {"first": "y", "second": "y"}
    assert again.predict(batch).shape == (16, 2)
    torch.testing.assert_close(again.probabilities(tensors), {name: tensors[name].sigmoid() for name in ("x", "y")})


def test_a_penalty_counts_every_weight_of_the_layers():
    def with_penalty(**options):
        layers = (layer("inner_product", "dense", "x", num_output=1), loss_of("x", **options))
        return GraphModel(GraphSpec(labels=(CLICK,), dense_dim=2, layers=layers), seed=1)

    batch = planted_batch(8)
    plain, squared = with_penalty(), with_penalty(regularizer="l2", strength=0.5)
    weights = torch.cat([weight.flatten() for weight in plain.parameters()])
    torch.testing.assert_close(squared.loss(batch) - plain.loss(batch), 0.5 / 16 * weights.square().sum())


def test_frozen_parts_keep_weights_and_state_and_a_rate_reaches_the_others():
    model = GraphModel(planted_graph(), seed=1)
    trainer, _ = train(model, 2)
    table = model.embeddings["e"].tables["t"]
    held = table.export(torch.arange(6))
    freeze(model, ["t"], rows=trainer.optimizers.rows)
    weight = model.layers[5].linear.weight.detach().clone()
    trainer.train_step(planted_batch(seed=9))
    assert torch.equal(table.export(torch.arange(6)).weights, held.weights)
    assert not torch.equal(model.layers[5].linear.weight, weight)
    freeze(model, ["layers.*"])
    unfreeze(model, ["t"], rows=trainer.optimizers.rows)
    weight = model.layers[5].linear.weight.detach().clone()
    trainer.train_step(planted_batch(seed=9))
    assert torch.equal(model.layers[5].linear.weight, weight)
    assert not torch.equal(table.export(torch.arange(6)).weights, held.weights)
    trainer.optimizers.lr = 0.0
    held = table.export(torch.arange(6))
    trainer.train_step(planted_batch(seed=9))
    assert torch.equal(table.export(torch.arange(6)).weights, held.weights)


def test_a_scaled_loss_gives_the_same_steps():
    plain, scaled = (
        train(GraphModel(planted_graph(), seed=1), 4),
        train(GraphModel(planted_graph(), seed=1), 4, loss_scale=64.0),
    )
    assert plain[1] == scaled[1]


def test_half_precision_of_the_layers_follows_the_full_one():
    full = train(GraphModel(planted_graph(), seed=1), 5)[1]
    half = train(GraphModel(planted_graph(), seed=1), 5, precision="bf16")[1]
    assert half != full
    assert half == pytest.approx(full, abs=0.03)


def test_its_state_makes_another_one_the_same():
    model, other = GraphModel(planted_graph(), seed=1), GraphModel(planted_graph(), seed=2)
    train(model, 3)
    assert {"embeddings.e.tables.t.keys", "layers.5.linear.weight"} <= set(model.state_dict())
    other.load_state_dict(model.state_dict())
    batch = planted_batch(16, seed=50)
    assert torch.equal(other.eval().predict(batch), model.eval().predict(batch))


@pytest.mark.parametrize(
    ("layers", "where"),
    [
        ((layer("inner_product", "dense", "x", num_output=1),), "graph"),
        ((loss_of("dense", "dense"),), "binary_cross_entropy 'loss'"),
        (
            (layer("inner_product", "dense", "x", num_output=3), loss_of("x")),
            "layer 'loss' (bottoms x, click): layer binary_cross_entropy",
        ),
        ((layer("inner_products", "dense", "x", num_output=3), loss_of("x")), "layer 'x' (bottoms dense): layer"),
        (
            (layer("inner_product", "dense", "x", num_out=3), loss_of("x")),
            "layer 'x' (bottoms dense): layer inner_product",
        ),
        ((layer("inner_product", "dense", "x y", num_output=1), loss_of("x")), "inner_product"),
        ((loss_of("dense"), layer("relu", "loss", "x")), "relu 'x'"),
    ],
)
def test_layers_that_do_not_fit_are_rejected_with_names_and_shapes(layers, where):
    spec = GraphSpec(labels=(CLICK,), dense_dim=1, layers=layers)
    with pytest.raises(ConfigError, check=at(where)):
        GraphModel(spec)


def test_batches_and_names_that_do_not_fit_are_rejected():
    model = GraphModel(planted_graph(), seed=1)
    with pytest.raises(ConfigError, check=at("batch")):
        model.loss(planted_batch(4, num_labels=2))
    with pytest.raises(ConfigError, check=at("tensor")):
        model.tensor(planted_batch(4), "flatt")
    with pytest.raises(ConfigError, check=at("row optimizer")):
        new_trainer(model, SGDSpec(), {"fast": SGDSpec()})
