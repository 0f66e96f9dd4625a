"""`export_onnx`: a model as an ONNX file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from terarec.errors import ConfigError
from terarec.export.embeddings import emit_embedding
from terarec.export.graph_inputs import default_key_inputs, graph_inputs, needed_layers, read_embeddings
from terarec.export.key_input import KeyInput
from terarec.export.layers import emit
from terarec.export.onnx_graph import OnnxGraph, onnx_library
from terarec.formats.flush import flush, flush_tree
from terarec.models.graph import GraphModel
from terarec.nn.layer import Layer
from terarec.nn.registry import LAYERS
from terarec.spec import GraphLayer

_MOST_BYTES = 2**31 - 2**20
"""A protobuf message holds 2 GiB; constants beyond go into a file of their own."""


def export_onnx(
    model: GraphModel,
    path: Path,
    *,
    embeddings: bool = True,
    key_inputs: Sequence[KeyInput] = (),
    name: str = "terarec",
) -> None:
    """Write the predictions of `model` in evaluation as an ONNX file, in float32.

    Inputs, in this order: the dense tensor float32[batch, F] if there is one; with `embeddings` the key inputs
    int64[batch, n, K], else the embeddings' tops float32[batch, ...], each under its own name. A bag of fewer than K
    keys is filled up with `NO_KEY`. Outputs: the predictions of each label under its name. The length of the batch is
    open. Constants of more than 2 GiB lie beside the file, in ``<path>.data``.

    Args:
        model: its weights as they are now.
        path: the file.
        embeddings: whether the tables are in the file.
        key_inputs: where keys come from; by default an input for each column that an embedding reads.
        name: of the graph.

    Raises:
        ConfigError: a model that is no graph, a layer that ONNX files cannot hold, or key inputs that lack a column.
        MissingDependencyError: ``onnx`` is not installed.
        StorageError: the disk is full; nothing is left behind.
    """
    if not isinstance(model, GraphModel):
        raise ConfigError(
            f"export_onnx: got a {type(model).__name__}, expected a GraphModel; terarec.export.export_model takes any "
            "model"
        )
    graph = OnnxGraph()
    needed = needed_layers(model.spec)
    values: dict[str, str] = {}
    sources = key_inputs or default_key_inputs(model.spec) if embeddings else ()
    for given in graph_inputs(model, sources if embeddings else None):
        values[given.name] = graph.input(given.name, np.dtype(given.dtype).type, given.dims)
    if embeddings:
        for embedding in read_embeddings(model.spec):
            values |= emit_embedding(graph, embedding, model.collection(embedding.name), sources)
    _emit_layers(graph, model, needed, values)
    _save(graph.model(name), path)


def _emit_layers(graph: OnnxGraph, model: GraphModel, needed: list[GraphLayer], values: dict[str, str]) -> None:
    modules = dict(zip((layer.tops[0] for layer in model.spec.layers), model.layers, strict=True))
    for layer in needed:
        graph.scope = layer.tops[0]
        module = cast(Layer, modules[layer.tops[0]])
        is_loss = LAYERS[layer.kind].is_loss
        bottoms = layer.bottoms[:1] if is_loss else layer.bottoms
        absent = [bottom for bottom in bottoms if bottom not in values]
        if absent:
            raise ConfigError(f"layer {layer.tops[0]!r}: reads the label {absent[0]!r}, which predictions do not have")
        found = emit(graph, layer.kind, module, [values[bottom] for bottom in bottoms])
        if is_loss:
            graph.output(layer.bottoms[1], found[0], model.shapes[bottoms[0]].dims)
        else:
            values.update(zip(layer.tops, found, strict=True))


def _save(model: Any, path: Path) -> None:
    onnx = onnx_library()
    onnx.checker.check_model(model)
    with _beside(path) as folder:
        data = f"{path.name}.data"
        is_large = model.ByteSize() > _MOST_BYTES
        onnx.save_model(model, folder / path.name, save_as_external_data=is_large, location=data)
        flush_tree(folder)
        for written in sorted(folder.iterdir(), key=lambda file: file.name == path.name):  # the model last
            os.replace(written, path.parent / written.name)
        flush(path.parent)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A directory on the disk of `path` for what will be renamed."""
    folder = path.with_name(f"{path.name}.partial-{os.getpid()}")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
