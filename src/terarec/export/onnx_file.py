# SPDX-License-Identifier: Apache-2.0
"""ONNX files of traced models: written, quantized and run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from terarec.errors import ConfigError, MissingDependencyError
from terarec.export.files import Runner, first_line, quiet
from terarec.export.scoring import Scoring
from terarec.spec.checks import FieldError

OPSET = 18
"""The first in which every reduction takes its axes as an input; ONNX Runtime 1.14 and later run it."""
IR_VERSION = 8
"""The one that came with opset 18, so that runtimes of its time open the file."""
_MOST_BYTES = 2**31 - 2**20
"""A protobuf message holds 2 GiB; constants beyond go into a file of their own."""


def onnx_library(name: str = "onnx") -> ModuleType:
    """Return a package that the extra ``onnx`` brings: "onnx", "onnxruntime" or "onnxscript"."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingDependencyError(name, "not installed, expected pip install 'terarec[onnx]'") from None


def save_onnx(program: ExportedProgram, scoring: Scoring, path: Path, *, name: str = "terarec") -> None:
    """Write `program` as an ONNX file with the names of the inputs and outputs of `scoring`.

    Constants of more than 1.5 GiB are in a file next to it, ``<path>.data``.

    Raises:
        ConfigError: An operation that ONNX files cannot hold.
        MissingDependencyError: ``onnxscript`` is not installed.
    """
    # Before the export, whose own error would name a function inside torch.
    onnx_library("onnxscript")  # which the exporter of torch needs
    with quiet():
        try:
            program_of_onnx = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[one.name for one in scoring.inputs],
                # The axes of a program have names such as "s77".
                dynamic_shapes=None if scoring.batch_size else [{0: "batch"} for _ in scoring.inputs],
                output_names=list(scoring.outputs),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            operation = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(error))
            reason = f"operation {operation[1]} has no form there" if operation else first_line(error)
            raise ConfigError(type(scoring.model).__name__, f"cannot be written as ONNX: {reason}") from error
    assert program_of_onnx is not None  # as it is for `dynamo`
    program_of_onnx.model.ir_version = IR_VERSION
    program_of_onnx.model.graph.name = name
    # These hold the source lines of each operation, with paths of this machine.
    for node in program_of_onnx.model.graph.all_nodes():
        node.metadata_props.clear()
    _separate_names(program_of_onnx.model.graph)
    program_of_onnx.save(str(path))


def _separate_names(graph: Any) -> None:
    """Rename nodes, constants and values between them: inputs and outputs have the names of columns, such as "cat"."""
    taken = {value.name for value in (*graph.inputs, *graph.outputs)}
    for value in list(graph.initializers.values()):
        if value.name in taken and value not in graph.inputs:
            del graph.initializers[value.name]
            value.name = f"/{value.name}"
            graph.initializers[value.name] = value
    for number, node in enumerate(graph.all_nodes()):
        node.name = f"/{node.op_type}_{number}"
        for value in node.outputs:
            if value.name and not value.is_graph_output():
                value.name = f"/{value.name}"


def quantize_onnx(path: Path) -> None:
    """Compute the fully connected layers of an ONNX file in integers, as `terarec.models.narrow.Int8Linear` does.

    Weights have 7 bits and a scale for each output: sums of two products of 8 bits overflow the 16 bits in which
    processors without VNNI add them. Inputs have 8 bits, and a scale and an offset for each row: with one scale for all
    rows of a call, as the dynamic quantization of ONNX Runtime has, the scores of a record depend on those beside it.
    """
    onnx = onnx_library()
    data = path.with_name(f"{path.name}.data")
    # Loaded with its external data, so that both files can be removed before the result takes their names.
    model = onnx.load(str(path))
    graph = model.graph
    weights = {each.name: each for each in graph.initializer}
    nodes: list[Any] = []
    for node in graph.node:
        weight = weights.get(node.input[1]) if node.op_type in ("Gemm", "MatMul") else None
        nodes += [node] if weight is None or len(weight.dims) != 2 else _in_integers(onnx, graph, node, weight)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    kept = [each for each in graph.initializer if each.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for file in (path, data):
        file.unlink(missing_ok=True)
    is_large = model.ByteSize() > _MOST_BYTES
    onnx.save(model, str(path), save_as_external_data=is_large, location=data.name if is_large else None)


def _in_integers(onnx: ModuleType, graph: Any, layer: Any, weight: Any) -> list[Any]:
    """Return the nodes that compute a fully connected layer in integers; their constants are added to the graph."""
    options = {one.name: onnx.helper.get_attribute_value(one) for one in layer.attribute}
    values = onnx.numpy_helper.to_array(weight).astype(np.float32)
    if options.get("transA", 0):
        return [layer]
    if options.get("transB", 0):
        values = values.T
    if not np.isfinite(values).all():
        raise FieldError("", "precision", "got 'int8' for weights that are not finite, expected finite ones")
    values = values * np.float32(options.get("alpha", 1.0))
    least = np.finfo(np.float32).tiny  # zeros would divide by zero; their codes are zeros
    scales = np.maximum(np.abs(values).max(0, initial=0.0) / 63, least).astype(np.float32)
    codes = np.rint(values / scales).astype(np.int8)
    constants = {
        "axes": np.array([-1]),
        "least": np.array(least, np.float32),
        "steps": np.array(255, np.float32),
        "codes": codes,
        "scales": scales,
        "sums": (codes.sum(0, dtype=np.int64) * scales).astype(np.float32),
    }
    nodes: list[Any] = []

    def named(name: str) -> str:
        return f"{layer.name}/{name}"

    def add(kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        output = layer.output[0] if not name else named(name)
        nodes.append(onnx.helper.make_node(kind, inputs, [output], name=named(name or "result"), **attributes))
        return output

    for name, value in constants.items():
        graph.initializer.append(onnx.numpy_helper.from_array(value, named(name)))
    rows, bias = layer.input[0], layer.input[2] if len(layer.input) > 2 else ""
    if bias and options.get("beta", 1.0) != 1.0:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(options["beta"], np.float32), named("beta")))
        bias = add("Mul", "bias", bias, named("beta"))
    lowest = add("ReduceMin", "lowest", rows, named("axes"))
    highest = add("ReduceMax", "highest", rows, named("axes"))
    extent = add("Max", "extent", add("Sub", "range", highest, lowest), named("least"))
    step = add("Div", "step", extent, named("steps"))
    parts = add("Round", "parts", add("Div", "scaled", add("Sub", "shifted", rows, lowest), step))
    bytes_ = add("Cast", "bytes", parts, to=onnx.TensorProto.UINT8)
    product = add("Cast", "product", add("MatMulInteger", "sum", bytes_, named("codes")), to=onnx.TensorProto.FLOAT)
    scaled = add("Mul", "scaled_product", product, add("Mul", "scale", step, named("scales")))
    offset = add("Mul", "offset", lowest, named("sums"))
    add("Add", "", scaled, add("Add", "offset_bias", offset, bias) if bias else offset)
    return nodes


def onnx_runner(path: Path) -> Runner:
    """Run the ONNX file `path` with ONNX Runtime."""
    session = onnx_library("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feed: [np.asarray(scores) for scores in session.run(None, dict(feed))]
