"""Embeddings in ONNX files: every pooling and output, static and dynamic tables, bags of any length."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export import NO_KEY, KeyInput, export_onnx
from terarec.models import GraphModel
from terarec.spec import DynamicTableSpec, GraphEmbedding, GraphFeature, GraphLabel, GraphSpec, TableSpec
from tests.errors import at
from tests.export.samples import close, layer, run
from tests.params import examples

KEYS = torch.tensor([7, -3, 0, 2**63 - 1, 12, 2**40])
ANY = KeyInput(name="keys", columns=("a", "b", "c"), max_keys=3)


def graph(embedding: GraphEmbedding, *, elements: int) -> GraphModel:
    """The embedding's tops side by side as logits."""
    tops = embedding.tops
    joined = layer("concat", " ".join(tops), "joined") if len(tops) > 1 else layer("elu", tops[0], "joined")
    flat = layer("reshape", "joined", "logits", leading_dim=elements)
    loss = layer("multi_cross_entropy", "logits label", "loss", target_weights=[1.0] * elements)
    spec = GraphSpec(
        labels=(GraphLabel(name="label", dim=elements),), embeddings=(embedding,), layers=(joined, flat, loss)
    )
    model = GraphModel(spec, seed=1)
    for table in model.collection(embedding.name).tables.values():
        if table.is_dynamic:
            table.rows(KEYS, train=True)
    return model.eval()


def jagged(bags: dict[str, list[list[int]]]) -> Jagged:
    every = [bag for column in bags.values() for bag in column]
    return Jagged(
        names=tuple(bags),
        keys=torch.tensor([key for bag in every for key in bag], dtype=torch.int64),
        offsets=torch.tensor([0, *map(len, every)]).cumsum(0),
    )


def batch(bags: dict[str, list[list[int]]], elements: int) -> Batch:
    size = len(next(iter(bags.values())))
    return Batch(dense=torch.empty(size, 0), label=torch.zeros(size, elements), sparse=jagged(bags))


def padded(bags: dict[str, list[list[int]]], length: int) -> np.ndarray:
    rows = [[bag + [NO_KEY] * (length - len(bag)) for bag in column] for column in bags.values()]
    return np.array(rows, np.int64).transpose(1, 0, 2)


def feature(name, table="t", pooling="sum", **options):
    return GraphFeature(name=name, table=table, pooling=pooling, **options)


DYNAMIC = DynamicTableSpec(name="t", width=4)
EMBEDDINGS = {
    "one table, summed": GraphEmbedding(name="e", tables=(DYNAMIC,), features=tuple(map(feature, "abc"))),
    "one table, averaged": GraphEmbedding(
        name="e", tables=(DYNAMIC,), features=tuple(feature(name, pooling="mean") for name in "abc")
    ),
    "a table a feature, flat": GraphEmbedding(
        name="e",
        tables=tuple(DynamicTableSpec(name=name, width=width) for name, width in zip("tuv", (4, 2, 3), strict=True)),
        features=(feature("a"), feature("b", "u", "mean"), feature("c", "v")),
        output="flat",
    ),
    "in another order, apart": GraphEmbedding(
        name="e",
        tables=(DYNAMIC, DynamicTableSpec(name="u", width=4)),
        features=(feature("c"), feature("a", "u"), feature("first", column="a", max_keys=1)),
        output="apart",
    ),
    "side by side": GraphEmbedding(
        name="e",
        tables=(DYNAMIC,),
        features=(feature("a", pooling="concat", max_keys=2), feature("b", pooling="concat", max_keys=2)),
    ),
}
BAGS = {
    "a": [[7, 0, 12], [], [5, 7], [2**63 - 1]],
    "b": [[-3], [6, -3], [-(2**62)], [12, 12]],
    "c": [[], [2**40], [0], [-3, 1, 7]],
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_lookups_are_the_models(tmp_path, name):
    embedding = EMBEDDINGS[name]
    elements = sum(embedding.width_of(one) for one in embedding.features)
    model = graph(embedding, elements=elements)
    export_onnx(model, tmp_path / "x.onnx", key_inputs=[ANY])
    found = run(tmp_path / "x.onnx", {"keys": padded(BAGS, 3)})["label"]
    close(found, model.predict(batch(BAGS, elements)))


def test_an_input_for_each_column_by_default(tmp_path):
    model = graph(EMBEDDINGS["one table, averaged"], elements=12)
    export_onnx(model, tmp_path / "x.onnx")
    feed = {name: padded({name: BAGS[name]}, length) for name, length in (("a", 3), ("b", 2), ("c", 5))}
    close(run(tmp_path / "x.onnx", feed)["label"], model.predict(batch(BAGS, 12)))


@given(keys=st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=9, unique=True), absent=st.integers(-20, 20))
@settings(max_examples=examples(25))
def test_any_set_of_keys_is_found(tmp_path_factory, keys, absent):
    embedding = GraphEmbedding(name="e", tables=(DYNAMIC,), features=(feature("a"),))
    model = graph(embedding, elements=4)
    table = model.collection("e").tables["t"]
    table.clear()
    table.rows(torch.tensor(keys, dtype=torch.int64), train=True)
    path = tmp_path_factory.mktemp("onnx") / "x.onnx"
    export_onnx(model, path)
    bags = {"a": [[key] for key in [*keys, absent, 0, 2**63 - 1]]}
    close(run(path, {"a": padded(bags, 1)})["label"], model.predict(batch(bags, 4)))


def test_an_absent_key_gives_the_tables_default(tmp_path):
    table = DynamicTableSpec(name="t", width=2, default=(0.5, -2.0))
    model = graph(GraphEmbedding(name="e", tables=(table,), features=(feature("a"),)), elements=2)
    export_onnx(model, tmp_path / "x.onnx")
    bags = {"a": [[7], [5, 6], [], [5, 7, -3]]}
    close(run(tmp_path / "x.onnx", {"a": padded(bags, 3)})["label"], model.predict(batch(bags, 2)))


def test_static_tables_need_no_search(tmp_path):
    import onnx

    embedding = GraphEmbedding(name="e", tables=(TableSpec(name="t", rows=6, width=4),), features=(feature("a"),))
    model = graph(embedding, elements=4)
    export_onnx(model, tmp_path / "x.onnx")
    bags = {"a": [[0], [5, 5], []]}
    close(run(tmp_path / "x.onnx", {"a": padded(bags, 2)})["label"], model.predict(batch(bags, 4)))
    operators = [node.op_type for node in onnx.load(tmp_path / "x.onnx").graph.node]
    assert operators.count("Gather") == 1


def test_without_embeddings_their_tops_are_inputs(tmp_path):
    model = graph(EMBEDDINGS["one table, summed"], elements=12)
    export_onnx(model, tmp_path / "x.onnx", embeddings=False)
    samples = batch(BAGS, 12)
    found = run(tmp_path / "x.onnx", {"e": model.tensor(samples, "e").detach().numpy()})
    close(found["label"], model.predict(samples))


def test_large_constants_are_next_to_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("terarec.export.graph_models.MOST_BYTES", 10)
    wide = DynamicTableSpec(name="t", width=64)  # ONNX leaves constants of less than 1 KiB where they are
    model = graph(GraphEmbedding(name="e", tables=(wide,), features=(feature("a"),)), elements=64)
    export_onnx(model, tmp_path / "x.onnx", key_inputs=[ANY])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]
    close(run(tmp_path / "x.onnx", {"keys": padded(BAGS, 3)})["label"], model.predict(batch(BAGS, 64)))


def test_key_inputs_that_lack_something_are_rejected(tmp_path):
    model = graph(EMBEDDINGS["side by side"], elements=16)
    with pytest.raises(ConfigError, check=at("key inputs", "none has column 'b'")):
        export_onnx(model, tmp_path / "x.onnx", key_inputs=[KeyInput(name="k", columns=("a",), max_keys=2)])
    short = KeyInput(name="k", columns=("a", "b"), max_keys=1)
    with pytest.raises(ConfigError, check=at("key inputs", "'a' has max_keys=1")):
        export_onnx(model, tmp_path / "x.onnx", key_inputs=[short])
    assert list(tmp_path.iterdir()) == []


def test_c5_a_model_that_is_not_a_graph_is_rejected(tmp_path):
    with pytest.raises(ConfigError, check=at("export_onnx")):
        export_onnx(torch.nn.Linear(2, 1), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
