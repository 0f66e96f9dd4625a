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

OPSET = 18
"""The first in which every reduction takes its axes as an input; ONNX Runtime 1.14 and later run it."""
IR_VERSION = 8
"""The one that came with opset 18, so that runtimes of its time open the file."""
_MOST_BYTES = 2**31 - 2**20
"""A protobuf message holds 2 GiB; constants beyond go into a file of their own."""


def onnx_library(name: str = "onnx") -> ModuleType:
    """Return a package that the extra ``onnx`` brings: "onnx", "onnxruntime" or "onnxscript".

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingDependencyError(name, "not installed, expected pip install 'terarec[onnx]'") from None


def save_onnx(program: ExportedProgram, scoring: Scoring, path: Path, *, name: str = "terarec") -> None:
    """Write `program` as an ONNX file with the names of the inputs and outputs of `scoring`.

    Constants of more than 1.5 GiB are in a file next to it, ``<path>.data``.

    Args:
        program: The program.
        scoring: What it was made of.
        path: The file.
        name: Name of the graph in the file.

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
    """Compute the fully connected layers of an ONNX file in integers, with scales of the inputs found by the call.

    Weights have 7 bits and a scale for each output: sums of two products of 8 bits overflow the 16 bits in which
    processors without VNNI add them.

    Raises:
        ConfigError: A layer that ONNX Runtime cannot quantize.
    """
    quantization = onnx_library("onnxruntime.quantization")
    onnx = onnx_library()
    data = path.with_name(f"{path.name}.data")
    # Loaded with its external data, so that both files can be removed before the result takes their names.
    model = onnx.load(str(path))
    del model.graph.value_info[:]  # shapes of weights that the library transposes
    for file in (path, data):
        file.unlink(missing_ok=True)
    with quiet():
        try:
            quantization.quantize_dynamic(
                model,
                path,
                per_channel=True,
                reduce_range=True,
                weight_type=quantization.QuantType.QInt8,
                op_types_to_quantize=["Gemm", "MatMul"],
                use_external_data_format=model.ByteSize() > _MOST_BYTES,
            )
        except Exception as error:  # any error of the library
            raise ConfigError("precision", f"the layers cannot be quantized: {first_line(error)}") from error


def onnx_runner(path: Path) -> Runner:
    """Run the ONNX file `path` with ONNX Runtime.

    Raises:
        MissingDependencyError: ``onnxruntime`` is not installed.
    """
    session = onnx_library("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feed: [np.asarray(scores) for scores in session.run(None, dict(feed))]
