"""Executors of the dense part of a model on a CPU: torch, its compilers, ONNX Runtime and OpenVINO."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terarec.errors import ConfigError, MissingDependencyError
from terarec.export.dense_part import DensePart
from terarec.export.files import quiet, save_aotinductor, save_onnx, trace

EAGER = "eager"

Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Values of `DensePart.inputs` -> scores float32[B, n] of each label. Thread-safe."""


def build_program(executor: str, part: DensePart, folder: Path) -> Program:
    """Make the dense part run in an executor.

    Args:
        executor: A name in `EXECUTORS`.
        part: The dense part, with the weights that it computes with.
        folder: For its files. What was compiled there for other weights of the same model is used again.

    Raises:
        ConfigError: The executor cannot compute the model.
        MissingDependencyError: A library is not installed.
    """
    try:
        with quiet():
            return EXECUTORS[executor](part, folder)
    except (ConfigError, MissingDependencyError):
        raise
    except Exception as error:  # whatever a compiler or a runtime raises
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"executor {executor!r}", reason or type(error).__name__) from error


def _eager(part: DensePart, folder: Path) -> Program:
    del folder
    module = part.module
    return lambda values: module(*values)


def _compiled(part: DensePart, folder: Path) -> Program:
    del folder
    compiled = torch.compile(part.module)
    for size in (3, 5):  # a batch of another size than the first makes it compile for any
        values = part.random_values(size)
        for value in values:
            torch._dynamo.mark_dynamic(value, 0)
        with torch.inference_mode():
            compiled(*values)
    return lambda values: compiled(*values)


def _aotinductor(part: DensePart, folder: Path) -> Program:
    from torch._inductor.package.package import load_package  # loads the compiler

    file = folder / "compiled.pt2"
    if not file.is_file():
        save_aotinductor(trace(part.module, tables=False), file, loads_weights=True)
    loaded = load_package(str(file), num_runners=torch.get_num_threads())
    wanted = set(loaded.get_constant_fqns())
    weights = {name: value for name, value in part.module.state_dict().items() if name in wanted}
    loaded.load_constants(weights, check_full_update=False)
    return lambda values: loaded(*values)


def _onnxruntime(part: DensePart, folder: Path) -> Program:
    library = _library("onnxruntime", "onnx")
    options = library.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # what it warns of is no concern of those who score
    session = library.InferenceSession(str(_onnx_file(part, folder)), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in part.inputs]

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.from_numpy(scores) for scores in session.run(None, feed)]

    return run


def _openvino(part: DensePart, folder: Path) -> Program:
    library = _library("openvino", "openvino")
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = library.Core().compile_model(str(_onnx_file(part, folder)), "CPU", options)

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        found = model.create_infer_request().infer([value.numpy() for value in values], share_inputs=True)
        return [torch.from_numpy(found[output]) for output in model.outputs]

    return run


EXECUTORS: Mapping[str, Callable[[DensePart, Path], Program]] = {
    EAGER: _eager,
    "compile": _compiled,
    "aotinductor": _aotinductor,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
"""Name -> what makes the program."""


def _onnx_file(part: DensePart, folder: Path) -> Path:
    file = folder / "model.onnx"
    save_onnx(trace(part.module, tables=False), part.module, file)
    return file


def _library(name: str, extra: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(name, f"not installed, expected pip install 'terarec[{extra}]'")
    return importlib.import_module(name)
