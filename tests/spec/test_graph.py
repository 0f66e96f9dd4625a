# SPDX-License-Identifier: Apache-2.0
"""Graphs as data: they come back from JSON, and names that do not fit are reported with what is there."""

import json

import pytest

from terarec.errors import ConfigError
from terarec.spec import (
    DynamicTableSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    TableSpec,
    from_data,
    to_data,
)
from tests.errors import at

CLICK = GraphLabel(name="click")
LOSS = GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "click"), tops=("loss",))


def logit(**fields):
    return GraphLayer(**{"kind": "inner_product", "bottoms": ("dense",), "tops": ("logit",), **fields})


def embedding(**fields):
    table = TableSpec(name="t", rows=10, width=4)
    return GraphEmbedding(
        **{"name": "e", "tables": (table,), "features": (GraphFeature(name="a", table="t"),), **fields}
    )


def test_a_graph_comes_back_from_json():
    tables = (TableSpec(name="s", rows=3, width=4), DynamicTableSpec(name="d", width=2, default=(0.5, -0.5)))
    features = (
        GraphFeature(name="a", table="s", pooling="mean"),
        GraphFeature(name="b", table="d", pooling="concat", column="a", max_keys=3),
    )
    spec = GraphSpec(
        labels=(CLICK, GraphLabel(name="buy", dim=2, weight=0.5)),
        dense_name="numbers",
        dense_dim=5,
        embeddings=(embedding(tables=tables, features=features, output="apart", optimizer="slow"),),
        layers=(
            GraphLayer(kind="slice", bottoms=("numbers",), tops=("x", "y"), options={"ranges": [[0, 2], [1, 5]]}),
            logit(bottoms=("x",), options={"num_output": 1}),
            LOSS,
        ),
    )
    data = json.loads(json.dumps(to_data(spec)))
    assert [table["kind"] for table in data["embeddings"][0]["tables"]] == ["static", "dynamic"]
    assert from_data(GraphSpec, data) == spec


def test_an_option_of_a_layer_given_as_a_list_is_kept_as_a_tuple():
    assert logit(options={"sizes": [1, [2, 3]]}).options == {"sizes": (1, (2, 3))}


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (
            (logit(bottoms=("densee",)), LOSS),
            "inner_product 'logit' reads 'densee', which no input, embedding or earlier layer gives",
        ),
        ((logit(), logit(), LOSS), "the tensor 'logit' is there already"),
        ((logit(tops=("click",)), LOSS), "the tensor 'click' is there already"),
        ((LOSS, logit()), "'loss' reads 'logit', which no input"),
    ],
)
def test_tensors_that_do_not_fit_are_named(layers, problem):
    with pytest.raises(ConfigError, check=at("GraphSpec.layers", problem)):
        GraphSpec(labels=(CLICK,), dense_dim=2, layers=layers)


def test_there_is_no_dense_tensor_without_dense_inputs():
    with pytest.raises(ConfigError, check=at("GraphSpec.layers")):
        GraphSpec(labels=(CLICK,), layers=(logit(), LOSS))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": ()}, "GraphEmbedding.features"),
        ({"features": (GraphFeature(name="a", table="u"),)}, "GraphEmbedding.features"),
        ({"features": (GraphFeature(name="a", table="t"),) * 2}, "GraphEmbedding.features"),
        ({"output": "wide"}, "GraphEmbedding.output"),
        ({"name": "e.f"}, "GraphEmbedding.name"),
        (
            {
                "features": (
                    GraphFeature(name="a", table="t"),
                    GraphFeature(name="b", table="t", pooling="concat", max_keys=2),
                )
            },
            "GraphEmbedding.output",
        ),
    ],
)
def test_embeddings_that_cannot_be_are_rejected(fields, message):
    with pytest.raises(ConfigError, check=at(message)):
        embedding(**fields)


def test_side_by_side_needs_to_know_how_many():
    with pytest.raises(ConfigError, check=at("GraphFeature.max_keys")):
        GraphFeature(name="a", table="t", pooling="concat")


def test_tables_have_one_name_in_the_whole_graph():
    with pytest.raises(ConfigError, check=at("GraphSpec.embeddings")):
        GraphSpec(labels=(CLICK,), embeddings=(embedding(), embedding(name="f")))
