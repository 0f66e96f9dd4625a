# SPDX-License-Identifier: Apache-2.0
"""Embeddings of graphs in files: every pooling and output, static and dynamic tables, bags of any length."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.export import NO_KEY, KeyInput, export_model, export_onnx
from terarec.export.inputs import padded_keys
from terarec.export.lookups import TableLookup
from terarec.models import GraphModel
from terarec.spec import (
    DynamicTableSpec,
    FeatureSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    TableSpec,
)
from terarec.spec.dataset import MISSING_KEY
from tests.errors import at
from tests.export.samples import close, run, run_export
from tests.params import examples, in_every_run

KEYS = torch.tensor([7, -3, 0, 2**63 - 1, 12, 2**40])
ANY = KeyInput(name="keys", columns=("a", "b", "c", "d"), max_keys=4)


def graph(*embeddings: GraphEmbedding) -> GraphModel:
    """The tops of each embedding side by side as the logits of a label of its name."""
    embeddings = tuple(map(with_own_tables, embeddings))
    layers, widths = [], {}
    for embedding in embeddings:
        name = embedding.name
        widths[f"of {name}"] = elements = sum(map(embedding.width_of, embedding.features))
        logits = name if embedding.output == "flat" else f"logits.{name}"
        if embedding.output != "flat":
            joined = GraphLayer(kind="concat", bottoms=embedding.tops, tops=(f"joined.{name}",), options={})
            options = {"leading_dim": elements}
            layers += [joined, GraphLayer(kind="reshape", bottoms=joined.tops, tops=(logits,), options=options)]
        layers += [
            GraphLayer(
                kind="multi_cross_entropy",
                bottoms=(logits, f"of {name}"),
                tops=(f"loss.{name}",),
                options={"target_weights": [1.0] * elements},
            ),
        ]
    labels = tuple(GraphLabel(name=name, dim=dim) for name, dim in widths.items())
    model = GraphModel(GraphSpec(labels=labels, embeddings=embeddings, layers=tuple(layers)), seed=1)
    for embedding in embeddings:
        for table in model.collection(embedding.name).tables.values():
            if table.is_dynamic:
                table.rows(KEYS, train=True)
    return model.eval()


def with_own_tables(embedding: GraphEmbedding) -> GraphEmbedding:
    """`embedding` with its name before those of its tables, which are distinct in a graph."""
    own = f"{embedding.name}." + "{}"
    return replace(
        embedding,
        tables=tuple(replace(table, name=own.format(table.name)) for table in embedding.tables),
        features=tuple(replace(one, table=own.format(one.table)) for one in embedding.features),
    )


def jagged(bags: dict[str, list[list[int]]]) -> Jagged:
    every = [bag for column in bags.values() for bag in column]
    return Jagged(
        names=tuple(bags),
        keys=torch.tensor([key for bag in every for key in bag], dtype=torch.int64),
        offsets=torch.tensor([0, *map(len, every)]).cumsum(0),
    )


def check(model: GraphModel, found: dict[str, np.ndarray], bags: dict[str, list[list[int]]]) -> None:
    """Compare the scores of a file for `bags` with the model's."""
    expected = model.predictions(model(batch(model, bags)))
    assert list(found) == list(expected)
    for name, scores in expected.items():
        close(found[name], scores, name)


def batch(model: GraphModel, bags: dict[str, list[list[int]]]) -> Batch:
    size = len(next(iter(bags.values())))
    labels = torch.zeros(size, sum(label.dim for label in model.spec.labels))
    return Batch(dense=torch.empty(size, 0), label=labels, sparse=jagged(bags))


def padded(bags: dict[str, list[list[int]]], length: int) -> np.ndarray:
    rows = [[bag + [NO_KEY] * (length - len(bag)) for bag in column] for column in bags.values()]
    return np.ascontiguousarray(np.array(rows, np.int64).transpose(1, 0, 2))


def feature(name, table="t", pooling="sum", **options):
    return GraphFeature(name=name, table=table, pooling=pooling, **options)


def tables(*widths: int) -> tuple[DynamicTableSpec, ...]:
    return tuple(DynamicTableSpec(name=name, width=width) for name, width in zip("tuv", widths, strict=False))


E = GraphEmbedding(name="e", tables=tables(4), features=tuple(map(feature, "abc")))
EMBEDDINGS = (
    E,
    GraphEmbedding(name="averaged", tables=tables(4), features=tuple(feature(name, pooling="mean") for name in "abc")),
    GraphEmbedding(
        name="a table a feature, flat",
        tables=tables(4, 2, 3),
        features=(feature("a"), feature("b", "u", "mean"), feature("c", "v")),
        output="flat",
    ),
    GraphEmbedding(
        name="in another order, apart",
        tables=tables(4, 4),
        features=(feature("c"), feature("a", "u"), feature("first", column="a", max_keys=1)),
        output="apart",
    ),
    GraphEmbedding(
        name="side by side",
        tables=tables(4),
        features=(feature("a", pooling="concat", max_keys=2), feature("b", pooling="concat", max_keys=2)),
    ),
    GraphEmbedding(
        name="side by side and summed",
        tables=(TableSpec(name="t", rows=9, width=4), DynamicTableSpec(name="u", width=3)),
        features=(feature("d", pooling="concat", max_keys=3), feature("c", "u"), feature("b", "u", "mean")),
        output="flat",
    ),
    GraphEmbedding(
        name="with a default",
        tables=(DynamicTableSpec(name="t", width=2, default=(0.5, -2.0)),),
        features=(feature("a"), feature("b", pooling="mean")),
    ),
)
BAGS = {
    "a": [[7, 0, 12], [], [5, 7], [2**63 - 1]],
    "b": [[-3], [6, -3], [-(2**62)], [12, 12]],
    "c": [[], [2**40], [0], [-3, 1, 7]],
    "d": [[8, 0], [], [3, 3, 1, 2], [5]],
}


FORMATS = ["onnx", "torchscript", "torch", "aotinductor"]


# torch's exporter of ONNX files takes seconds for all.
FEW = EMBEDDINGS[-2:]


@pytest.mark.parametrize(
    ("embeddings", "file_format"),
    in_every_run([(EMBEDDINGS, "torchscript")], [(FEW, "onnx"), *((EMBEDDINGS, name) for name in FORMATS)]),
)
def test_lookups_are_the_models(tmp_path, embeddings, file_format):
    model = graph(*embeddings)
    export_model(model, tmp_path / "out", format=file_format, key_inputs=[ANY])
    check(model, run_export(tmp_path / "out", {"keys": padded(BAGS, 4)}), BAGS)


@pytest.mark.parametrize("file_format", in_every_run(["torchscript"], FORMATS))
def test_an_input_for_each_column_by_default(tmp_path, file_format):
    model = graph(*EMBEDDINGS)
    export_model(model, tmp_path / "out", format=file_format)
    feed = {name: padded({name: BAGS[name]}, length) for name, length in zip("abcd", (3, 2, 5, 4), strict=True)}
    check(model, run_export(tmp_path / "out", feed), BAGS)


@given(keys=st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=9, unique=True), absent=st.integers(-20, 20))
@settings(max_examples=examples(100))
def test_any_set_of_keys_is_found(keys, absent):
    collection = EmbeddingCollection(tables(4), [FeatureSpec(name="a", table="t")], seed=1).eval()
    table = collection.tables["t"]
    table.rows(torch.tensor(keys, dtype=torch.int64), train=True)
    wanted = torch.tensor([*keys, absent, 0, 2**63 - 1])
    found = TableLookup(table)(wanted[:, None], torch.ones(len(wanted), 1, dtype=torch.bool))
    assert torch.equal(found[:, 0], collection(jagged({"a": wanted[:, None].tolist()})).pooled)


@pytest.mark.slow
def test_static_tables_need_no_search(tmp_path):
    import onnx

    model = graph(GraphEmbedding(name="e", tables=(TableSpec(name="t", rows=9, width=4),), features=(feature("d"),)))
    export_onnx(model, tmp_path / "x.onnx")
    check(model, run(tmp_path / "x.onnx", {"d": padded({"d": BAGS["d"]}, 4)}), {"d": BAGS["d"]})
    file = onnx.load(tmp_path / "x.onnx").graph
    constants = {constant.name for constant in file.initializer}
    assert [node.op_type for node in file.node if node.op_type == "Gather" and node.input[0] in constants] == ["Gather"]
    assert all(dim.dim_param == "batch" for dim in (item.type.tensor_type.shape.dim[0] for item in file.output))


@pytest.mark.parametrize("file_format", in_every_run(["torchscript"], FORMATS))
def test_without_embeddings_their_tops_are_inputs(tmp_path, file_format):
    model = graph(*EMBEDDINGS)
    export_model(model, tmp_path / "out", format=file_format, tables=False)
    tensors = model(batch(model, BAGS))
    feed = {top: tensors[top].detach().contiguous().numpy() for embedding in EMBEDDINGS for top in embedding.tops}
    check(model, run_export(tmp_path / "out", feed), BAGS)


@pytest.mark.slow
def test_large_constants_are_next_to_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 10)
    # A file holds constants of less than 1 KiB itself.
    model = graph(GraphEmbedding(name="e", tables=(TableSpec(name="t", rows=9, width=64),), features=(feature("d"),)))
    export_onnx(model, tmp_path / "x.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]
    check(model, run(tmp_path / "x.onnx", {"d": padded({"d": BAGS["d"]}, 4)}), {"d": BAGS["d"]})


def test_key_inputs_that_lack_something_are_rejected(tmp_path):
    model = graph(E)
    two = KeyInput(name="k", columns=("a", "c"), max_keys=2)
    with pytest.raises(ConfigError, check=at("key inputs", "got column 'b' 0 times")):
        export_onnx(model, tmp_path / "x.onnx", key_inputs=[two])
    twice = KeyInput(name="l", columns=("a", "b"), max_keys=2)
    with pytest.raises(ConfigError, check=at("key inputs", "got column 'a' 2 times")):
        export_onnx(model, tmp_path / "x.onnx", key_inputs=[two, twice])
    assert list(tmp_path.iterdir()) == []


def test_c5_a_model_that_is_not_a_graph_is_rejected(tmp_path):
    with pytest.raises(ConfigError, check=at("export_onnx")):
        export_onnx(torch.nn.Linear(2, 1), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_key_that_pads_is_no_key_of_a_list() -> None:
    """Finding N8: padding differs from the key of a missing value, and is not taken for a key."""
    part = KeyInput(name="a", columns=("a",))
    assert padded_keys(jagged({"a": [[MISSING_KEY], [5, 6]]}), part).tolist() == [[[MISSING_KEY, NO_KEY]], [[5, 6]]]
    with pytest.raises(ConfigError, check=at("column 'a'")):
        padded_keys(jagged({"a": [[NO_KEY, 5]]}), part)
