"""A `Scoring` as a program of `torch.export`, and that as a file."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from terarec.errors import ConfigError
from terarec.export.onnx_graph import IR_VERSION, OPSET, onnx_library
from terarec.export.scoring import Scoring, exportable
from terarec.spec.quoting import one_line

_EXAMPLE_BATCH = 3
_EXAMPLE_KEYS = 5
"""Lengths of open axes while a model is traced: 0 and 1 would be fixed in the program."""


def trace(scoring: Scoring, *, tables: bool) -> ExportedProgram:
    """The program of `scoring`, for batches of any length.

    Args:
        scoring: of a model in evaluation mode.
        tables: as `Scoring` has it.

    Raises:
        ConfigError: the model computes something that a program cannot hold, with the layer.
    """
    is_open = torch.export.Dim.DYNAMIC
    examples, shapes = [], []
    for given in scoring.inputs:
        dims = [_EXAMPLE_BATCH, *(_EXAMPLE_KEYS if dim is None else dim for dim in given.dims)]
        examples.append(torch.zeros(dims, dtype=getattr(torch, given.dtype)))
        shapes.append({0: is_open} | {axis + 1: is_open for axis, dim in enumerate(given.dims) if dim is None})
    with exportable(scoring.model, tables=tables), torch.no_grad(), _quiet():
        try:
            program = torch.export.export(scoring, tuple(examples), dynamic_shapes=(tuple(shapes),), strict=False)
        except Exception as error:  # whatever the code of a model raises on tensors without values
            raise ConfigError(
                f"{type(scoring.model).__name__}: cannot be exported{_layer_of(error, scoring.model)}: "
                f"{_first_line(error)}"
            ) from error
    _forget_places(program.graph_module)
    return program


def save_onnx(program: ExportedProgram, scoring: Scoring, path: Path) -> None:
    """Write `program` as an ONNX file with the names of the inputs and outputs of `scoring`.

    Constants of more than 1.5 GiB lie beside it, in ``<path>.data``.

    Raises:
        ConfigError: an operation that ONNX files cannot hold.
        MissingDependencyError: ``onnxscript`` is not installed.
    """
    onnx_library("onnxscript")  # which the exporter of torch needs
    with _quiet():
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
            raise ConfigError(f"{type(scoring.model).__name__}: cannot be written as ONNX: {reason}") from error
    assert made is not None  # as it is for `dynamo`
    made.model.ir_version = IR_VERSION
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()
    made.save(str(path))


def save_torch(program: ExportedProgram, path: Path) -> None:
    """Write `program` as a file for `torch.export.load`."""
    with _quiet():
        torch.export.save(program, path)


def _forget_places(module: nn.Module) -> None:
    """Take out of a program where in the source code, with paths of this machine, its operations come from."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
    """The innermost module of `model` in which `error` was raised."""
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
