"""Models as files: traced programs as ONNX or `torch.export` files, and graph models as ONNX files layer by layer."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from terarec.errors import ConfigError
from terarec.export.embeddings import emit_embedding
from terarec.export.inputs import KeyInput, default_key_inputs, graph_inputs, needed_layers, read_embeddings
from terarec.export.layers import emit
from terarec.export.onnx_graph import IR_VERSION, OPSET, OnnxGraph, onnx_library
from terarec.export.scoring import Scoring, exportable
from terarec.io import atomic_entries
from terarec.models.graph import GraphModel
from terarec.nn.layer import Layer
from terarec.nn.registry import LAYERS
from terarec.spec import GraphLayer
from terarec.spec.quoting import one_line

_EXAMPLE_BATCH = 3
_EXAMPLE_KEYS = 5
"""Lengths of open axes while a model is traced: 0 and 1 would be fixed in the program."""


def trace(scoring: Scoring, *, tables: bool) -> ExportedProgram:
    """Return the program of `scoring`, for batches of any length.

    Args:
        scoring: Scoring of a model in evaluation mode.
        tables: Tables as in `Scoring`.

    Raises:
        ConfigError: The model computes something that a program cannot hold, with the layer.
    """
    is_open = torch.export.Dim.DYNAMIC
    examples = _examples(scoring)
    shapes = [
        {0: is_open} | {axis + 1: is_open for axis, dim in enumerate(given.dims) if dim is None}
        for given in scoring.inputs
    ]
    with exportable(scoring.model, tables=tables), torch.no_grad(), quiet():
        try:
            program = torch.export.export(scoring, examples, dynamic_shapes=(tuple(shapes),), strict=False)
        except Exception as error:  # whatever the code of a model raises on tensors without values
            raise ConfigError(
                type(scoring.model).__name__,
                f"cannot be exported{_layer_of(error, scoring.model)}: {_first_line(error)}",
            ) from error
    _forget_places(program.graph_module)
    return program


def _examples(scoring: Scoring) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(
            [_EXAMPLE_BATCH, *(_EXAMPLE_KEYS if dim is None else dim for dim in given.dims)],
            dtype=getattr(torch, given.dtype),
        )
        for given in scoring.inputs
    )


def save_onnx(program: ExportedProgram, scoring: Scoring, path: Path) -> None:
    """Write `program` as an ONNX file with the names of the inputs and outputs of `scoring`.

    Constants of more than 1.5 GiB are in a file next to it, ``<path>.data``.

    Raises:
        ConfigError: An operation that ONNX files cannot hold.
        MissingDependencyError: ``onnxscript`` is not installed.
    """
    onnx_library("onnxscript")  # which the exporter of torch needs
    with quiet():
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[given.name for given in scoring.inputs],
                output_names=list(scoring.outputs),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            operation = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(error))
            reason = f"operation {operation[1]} has no form there" if operation else _first_line(error)
            raise ConfigError(type(scoring.model).__name__, f"cannot be written as ONNX: {reason}") from error
    assert made is not None  # as it is for `dynamo`
    made.model.ir_version = IR_VERSION
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()
    made.save(str(path))


def save_torch(program: ExportedProgram, path: Path) -> None:
    """Write `program` as a file for `torch.export.load`."""
    with quiet():
        torch.export.save(program, path)


def save_aotinductor(program: ExportedProgram, path: Path, *, loads_weights: bool = False) -> None:
    """Compile `program` for this machine and write it as a package of AOTInductor.

    Args:
        program: The program.
        path: The package.
        loads_weights: Whether other weights can be loaded into it: no constant becomes part of the code.

    Raises:
        ConfigError: The compiler fails, or there is none.
    """
    from torch._inductor import aoti_compile_and_package  # loads the compiler

    with quiet():
        try:
            options = {"always_keep_tensor_constants": True} if loads_weights else None
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
        except Exception as error:  # whatever the compiler raises
            raise ConfigError("aotinductor", f"the program cannot be compiled: {_first_line(error)}") from error


def save_torchscript(scoring: Scoring, path: Path, *, tables: bool) -> None:
    """Trace `scoring` and write it as a TorchScript file, for servers that load nothing else.

    Raises:
        ConfigError: The model computes something that a trace cannot hold.
    """
    with exportable(scoring.model, tables=tables), torch.no_grad(), quiet():
        try:
            traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                scoring, _examples(scoring), strict=False, check_trace=False
            )
        except Exception as error:  # whatever the code of a model raises
            where = type(scoring.model).__name__
            raise ConfigError(where, f"cannot be traced by TorchScript: {_first_line(error)}") from error
        torch.jit.save(traced, path)


def _forget_places(module: nn.Module) -> None:
    """Take out of a program where in the source code, with paths of this machine, its operations come from."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporters log and warn of on the way: libraries that are not there, and their own code."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # graphs that failed are printed
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _layer_of(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module of `model` in which `error` was raised."""
    names = {module: name for name, module in model.named_modules()}
    found, place = "", error.__traceback__
    while place is not None:
        module = place.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            found = f" in its layer {names[module]!r} ({type(module).__name__})"
        place = place.tb_next
    return found


def _first_line(error: BaseException) -> str:
    return one_line(str(error).strip().partition("\n")[0]) or type(error).__name__


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
    open. Constants of more than 2 GiB are in a file next to it, ``<path>.data``.

    Args:
        model: Its weights as they are now.
        path: The file.
        embeddings: Whether the tables are in the file.
        key_inputs: Sources of the keys; by default an input for each column that an embedding reads.
        name: Name of the graph.

    Raises:
        ConfigError: A model that is no graph, a layer that ONNX files cannot hold, or key inputs that lack a column.
        MissingDependencyError: ``onnx`` is not installed.
        StorageError: The disk is full; nothing is left behind.
    """
    if not isinstance(model, GraphModel):
        raise ConfigError(
            "export_onnx",
            f"got a {type(model).__name__}, expected a GraphModel; terarec.export.export_model takes any model",
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
            raise ConfigError(
                f"layer {layer.tops[0]!r}", f"reads the label {absent[0]!r}, which predictions do not have"
            )
        found = emit(graph, layer.kind, module, [values[bottom] for bottom in bottoms])
        if is_loss:
            graph.output(layer.bottoms[1], found[0], model.shapes[bottoms[0]].dims)
        else:
            values.update(zip(layer.tops, found, strict=True))


def _save(model: Any, path: Path) -> None:
    onnx = onnx_library()
    onnx.checker.check_model(model)
    with atomic_entries(path.parent) as folder:
        data = f"{path.name}.data"
        is_large = model.ByteSize() > _MOST_BYTES
        onnx.save_model(model, folder / path.name, save_as_external_data=is_large, location=data)
