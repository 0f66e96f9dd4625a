"""What the predictions of a graph model read: its layers, embeddings, and the inputs of its exported form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.batch import Batch
from terarec.export.inputs import ModelInput, dense_input, key_input
from terarec.export.key_input import KeyInput
from terarec.models.graph import GraphModel
from terarec.nn.registry import LAYERS
from terarec.spec import GraphEmbedding, GraphLayer, GraphSpec


def needed_layers(spec: GraphSpec) -> list[GraphLayer]:
    """The layers that predictions depend on, the losses among them."""
    wanted: set[str] = set()
    needed = []
    for layer in reversed(spec.layers):
        if LAYERS[layer.kind].is_loss:
            wanted.add(layer.bottoms[0])
        elif wanted.isdisjoint(layer.tops):
            continue
        else:
            wanted.update(layer.bottoms)
        needed.append(layer)
    return needed[::-1]


def read_embeddings(spec: GraphSpec) -> list[GraphEmbedding]:
    """The embeddings that predictions depend on."""
    read = {bottom for layer in needed_layers(spec) for bottom in layer.bottoms}
    return [embedding for embedding in spec.embeddings if not read.isdisjoint(embedding.tops)]


def default_key_inputs(spec: GraphSpec) -> list[KeyInput]:
    """An input for each column; its length is fixed where vectors are laid side by side."""
    most: dict[str, int | None] = {}
    for embedding in read_embeddings(spec):
        for feature in embedding.features:
            limit = feature.vectors if feature.pooling == "concat" else None
            known = most.get(feature.read_column)
            most[feature.read_column] = max(limit, known) if limit and known else limit or known
    return [KeyInput(name=column, columns=(column,), max_keys=limit) for column, limit in most.items()]


def graph_inputs(
    model: GraphModel, sources: Sequence[KeyInput] | None, *, dense: Sequence[str] = ()
) -> list[ModelInput]:
    """The inputs of an exported graph model: the dense tensor, then the keys or what the embeddings give.

    Args:
        model: the model.
        sources: where keys come from; None for tables outside the file, whose tops are inputs.
        dense: names of the dense columns, where they are known.
    """
    spec = model.spec
    found = []
    if spec.dense_dim:
        found.append(dense_input(spec.dense_name, dense, width=spec.dense_dim))
    if sources is not None:
        return found + [key_input(source) for source in sources]
    read = {bottom for layer in needed_layers(spec) for bottom in layer.bottoms}
    for embedding in spec.embeddings:
        columns = tuple(feature.read_column for feature in embedding.features)
        found += [
            ModelInput(
                name=top,
                dtype="float32",
                dims=model.shapes[top].dims,
                columns=columns,
                read=_reader(model, top),
            )
            for top in embedding.tops
            if top in read
        ]
    return found


def _reader(model: GraphModel, top: str) -> Callable[[Batch], NDArray[np.generic]]:
    return lambda batch: model.tensor(batch, top).detach().cpu().numpy()
