# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's converter of trained models to ONNX files, the package ``hugectr2onnx`` that scripts import."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from terarec.export import KeyInput, export_onnx
from terarec.hugectr.dense_weights import load_dense
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import read_graph
from terarec.hugectr.json_files import read_json
from terarec.hugectr.layers import layer_formats
from terarec.hugectr.network import Network
from terarec.hugectr.objects import Input, OptParamsPy, Solver, SparseEmbedding
from terarec.hugectr.sparse_weights import embedding_file, load_sparse
from terarec.models import GraphModel
from terarec.spec import DynamicTableSpec, GraphEmbedding, GraphSpec

# HugeCTR's package has two modules of these names, which scripts import in every way that Python has.
converter = hugectr_loader = sys.modules[__name__]
sys.modules |= {f"{__name__}.{name}": converter for name in ("converter", "hugectr_loader")}

EXEMPTION_LAYER_TYPES = {"Cast"}
"""Members of `Layer_t` that `convert` rejects, as HugeCTR's does."""

ONNX_LAYER_TYPES = {kind.name for kind in layer_formats()} - EXEMPTION_LAYER_TYPES
"""The others."""


@as_hugectr_errors("convert")
def convert(
    onnx_model_path: str,
    graph_config: str,
    dense_model: str,
    convert_embedding: bool = False,
    sparse_models: Sequence[str] | None = None,
    ntp_file: str | None = None,
    graph_name: str = "hugectr",
) -> None:
    """Write an ONNX file with the predictions of a trained model.

    Its inputs are the dense tensor, also where it has no numbers, then with `convert_embedding` the keys
    int64[batch, slots, most keys] of each sparse input, otherwise the vectors of each embedding,
    float32[batch, slots, width]. See docs/export.md.

    Args:
        onnx_model_path: The file.
        graph_config: File that `Model.graph_to_json` wrote.
        dense_model: The weights of its layers.
        convert_embedding: Whether the embeddings are in the file.
        sparse_models: The folder of each `SparseEmbedding`, with `convert_embedding`.
        ntp_file: Statistics of BatchNorm layers; None takes those next to `dense_model`.
        graph_name: Name of the graph in the file.

    Raises:
        WrongInputError: Another number of folders than embeddings, an embedding collection with `convert_embedding`, a
            clause of the graph that is not accepted, or a Cast layer.
        FileCannotOpenError: A missing file.
        BrokenFileError: A file of another model.
        InvalidEnvError: ``onnxscript`` is not installed.
    """
    # Solver and optimizer matter to training alone; predictions depend on neither.
    network = Network(Solver(), OptParamsPy())
    for part in read_graph(read_json(graph_config)).parts:
        network.add(part)
    spec = network.plan({}).spec
    if any(layer.kind == "cast" for layer in spec.layers):
        raise WrongInputError("convert: layer cast", "has no form in the files of HugeCTR's converter, expected others")
    # Tables that are left out of the file may be larger than the memory of this machine.
    model = GraphModel(spec if convert_embedding else _without_rows(spec), seed=0).eval()
    # BatchNorm predicts by its running statistics: without their file it would be a layer that never trained.
    load_dense(model, Path(dense_model), statistics=None if ntp_file is None else Path(ntp_file), needs_statistics=True)
    if convert_embedding:
        _load_embeddings(network, model, list(sparse_models or ()))
    export_onnx(
        model,
        Path(onnx_model_path),
        embeddings=convert_embedding,
        key_inputs=_key_inputs(network.inputs) if convert_embedding else (),
        name=graph_name,
        has_empty_dense=True,
    )


def _without_rows(spec: GraphSpec) -> GraphSpec:
    """Return `spec` with tables that take no memory."""

    def without(embedding: GraphEmbedding) -> GraphEmbedding:
        tables = tuple(DynamicTableSpec(name=table.name, width=table.width) for table in embedding.tables)
        return dataclasses.replace(embedding, tables=tables)

    return dataclasses.replace(spec, embeddings=tuple(map(without, spec.embeddings)))


def _load_embeddings(network: Network, model: GraphModel, folders: Sequence[str]) -> None:
    if network.of_type(EmbeddingCollectionConfig):
        raise WrongInputError("convert", "got an embedding collection, expected convert_embedding=False with one")
    embeddings = network.of_type(SparseEmbedding)
    if len(folders) != len(embeddings):
        raise WrongInputError(
            "convert: sparse_models",
            f"got {len(folders)} folders, expected one for each of {len(embeddings)} embeddings",
        )
    for part, folder in zip(embeddings, folders, strict=True):
        load_sparse(embedding_file(part, model.collection(part.sparse_embedding_name)), Path(folder))


def _key_inputs(inputs: Input) -> list[KeyInput]:
    return [
        KeyInput(
            name=slots.top_name,
            columns=tuple(f"{slots.top_name}.{slot}" for slot in range(slots.slot_num)),
            max_keys=max(slots.nnz_per_slot),
        )
        for slots in inputs.data_reader_sparse_param_array
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m terarec.hugectr.hugectr2onnx``, whose options are the parameters of `convert`."""
    parser = argparse.ArgumentParser(description="Write an ONNX file with the predictions of a HugeCTR model.")
    for name in ("onnx_model_path", "graph_config", "dense_model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--convert_embedding", action="store_true")
    parser.add_argument("--sparse_models", nargs="*")
    parser.add_argument("--ntp_file")
    parser.add_argument("--graph_name", default="hugectr")
    convert(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
