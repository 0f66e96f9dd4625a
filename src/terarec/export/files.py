"""Traced models as files of other runtimes: written, run, and compared with the model on random batches."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export.graph_scoring import GraphScoring
from terarec.export.inputs import NO_KEY, ModelInput
from terarec.export.lookups import exportable
from terarec.export.onnx_graph import IR_VERSION, MOST_BYTES, OPSET, onnx_library
from terarec.export.scoring import Scoring
from terarec.spec import CategoricalColumn
from terarec.spec.checks import one_line
from terarec.storage import Store

_EXAMPLE_BATCH = 3
_EXAMPLE_KEYS = 5
"""Lengths of open axes while a model is traced: 0 and 1 would be fixed in the program."""
BATCH_SIZES = (1, 7, 64, 9_928)
"""Sizes of the compared batches: 10,000 samples in all."""
TOLERANCE = 1e-4
"""Largest accepted difference, for scores up to 1; more for larger ones."""
NARROW_TOLERANCES = {"bf16": 0.02, "fp16": 0.005, "int8": 0.05}
"""The same for layers in narrower numbers, whose intermediate values runtimes round differently."""
_ABSENT_KEYS = 8
_MOST_KEYS = 4

AnyScoring = Scoring | GraphScoring

Runner = Callable[[Mapping[str, NDArray[np.generic]]], Sequence[NDArray[np.generic]]]
"""Name of each input -> its value, to the value of each output."""


def trace(scoring: AnyScoring, *, tables: bool) -> ExportedProgram:
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
    with exportable(scoring.model, tables=tables, row_type=scoring.row_type), torch.no_grad(), quiet():
        try:
            # Not strict: torch's bytecode interpreter, which strict tracing uses, rejects more models.
            program = torch.export.export(scoring, examples, dynamic_shapes=(tuple(shapes),), strict=False)
        except Exception as error:  # any error of a model's code on tensors without values
            raise ConfigError(
                type(scoring.model).__name__,
                f"cannot be exported{_layer_of(error, scoring.model)}: {_first_line(error)}",
            ) from error
    _forget_places(program.graph_module)
    return program


def _examples(scoring: AnyScoring) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(
            [_EXAMPLE_BATCH, *(_EXAMPLE_KEYS if dim is None else dim for dim in given.dims)],
            dtype=getattr(torch, given.dtype),
        )
        for given in scoring.inputs
    )


def save_onnx(program: ExportedProgram, scoring: AnyScoring, path: Path) -> None:
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
    # These hold the source lines of each operation, with paths of this machine.
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()
    made.save(str(path))


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
                use_external_data_format=model.ByteSize() > MOST_BYTES,
            )
        except Exception as error:  # any error of the library
            raise ConfigError("precision", f"the layers cannot be quantized: {_first_line(error)}") from error


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
        except Exception as error:  # any error of the compiler
            raise ConfigError("aotinductor", f"the program cannot be compiled: {_first_line(error)}") from error


def save_torchscript(scoring: AnyScoring, path: Path, *, tables: bool) -> None:
    """Trace `scoring` and write it as a TorchScript file, for servers that load nothing else.

    Raises:
        ConfigError: The model computes something that a trace cannot hold.
    """
    with exportable(scoring.model, tables=tables, row_type=scoring.row_type), torch.no_grad(), quiet():
        try:
            traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                # torch would trace a second time to check; the file is compared with the model on more batches anyway.
                scoring,
                _examples(scoring),
                strict=False,
                check_trace=False,
            )
        except Exception as error:  # any error of a model's code
            where = type(scoring.model).__name__
            raise ConfigError(where, f"cannot be traced by TorchScript: {_first_line(error)}") from error
        torch.jit.save(traced, path)


def _forget_places(module: nn.Module) -> None:
    """Remove the source locations of operations, which have paths of this machine, from a program."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and warnings of torch's exporters about absent libraries and their own code."""
    # For all loggers: the exporters log under many names, and through several libraries.
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
    # torch's error names the operation, not the layer; the frames of the traceback still have it as `self`.
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


def max_difference(
    run: Runner,
    inputs: Sequence[ModelInput],
    expected: Callable[[Batch], Sequence[Tensor]],
    batches: Iterable[Batch],
    tolerance: float = TOLERANCE,
) -> float:
    """Return the largest absolute difference between scores of a file and those of a model.

    Args:
        run: Runs the file.
        inputs: Inputs of the file.
        expected: The model's scores for each output of the file.
        batches: Batches to compare.
        tolerance: Largest difference of scores up to 1.

    Raises:
        ConfigError: One beyond `tolerance`, or a score that is not a number in one of them alone.
    """
    largest = 0.0
    for batch in batches:
        found = run({given.name: given.read(batch) for given in inputs})
        with torch.no_grad():
            wanted = [scores.float().cpu().numpy() for scores in expected(batch)]
        for got, want in zip(found, wanted, strict=True):
            if got.shape != want.shape:
                raise ConfigError("export", f"got scores {list(got.shape)} of the file, expected {list(want.shape)}")
            difference = float(np.abs(got - want).max(initial=0.0))
            bound = tolerance * max(1.0, float(np.abs(want).max(initial=0.0)))
            # Negated, so that NaN fails, too.
            if not difference <= bound:
                raise ConfigError(
                    "export", f"the file's scores are {difference:.3g} off the model's, expected at most {bound:.3g}"
                )
            largest = max(largest, difference)
    return largest


def onnx_runner(path: Path) -> Runner:
    """Run the ONNX file `path` with ONNX Runtime.

    Raises:
        MissingDependencyError: ``onnxruntime`` is not installed.
    """
    session = onnx_library("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feed: [np.asarray(scores) for scores in session.run(None, dict(feed))]


def torch_runner(path: Path, inputs: Sequence[ModelInput]) -> Runner:
    """Run the program in the file `path`."""
    return _torch_run(torch.export.load(path).module(), inputs)


def torchscript_runner(path: Path, inputs: Sequence[ModelInput]) -> Runner:
    """Run the TorchScript file `path`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        return _torch_run(torch.jit.load(path), inputs)  # type: ignore[no-untyped-call]


def aotinductor_runner(path: Path, inputs: Sequence[ModelInput]) -> Runner:
    """Run the package of AOTInductor in the file `path`."""
    from torch._inductor import aoti_load_package  # loads the compiler

    return _torch_run(aoti_load_package(str(path)), inputs)


def _torch_run(module: Callable[..., Sequence[Tensor]], inputs: Sequence[ModelInput]) -> Runner:
    def run(feed: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        with torch.no_grad():
            found = module(*(torch.from_numpy(feed[given.name]) for given in inputs))
        return [scores.numpy() for scores in found]

    return run


def random_batches(
    columns: Sequence[CategoricalColumn], readers: Mapping[str, Sequence[Store]], *, num_dense: int, num_labels: int
) -> list[Batch]:
    """Return batches of `BATCH_SIZES` samples, always the same ones.

    Args:
        columns: The categorical columns; a list has 0 to `hotness` keys, at most a few.
        readers: Column -> the tables that its keys are looked up in.
        num_dense: Number F of dense columns, which are normally distributed.
        num_labels: Number of label columns, which are zeros.
    """
    generator = torch.Generator().manual_seed(0)
    known = {column.name: _known_keys(readers.get(column.name, ()), column, generator) for column in columns}
    return [_batch(columns, known, size, num_dense, num_labels, generator) for size in BATCH_SIZES]


def _batch(
    columns: Sequence[CategoricalColumn],
    known: Mapping[str, Tensor],
    size: int,
    num_dense: int,
    num_labels: int,
    generator: torch.Generator,
) -> Batch:
    keys, lengths = [], []
    for column in columns:
        if column.hotness == 1:
            count = torch.ones(size, dtype=torch.int64)
        else:
            count = torch.randint(min(column.hotness, _MOST_KEYS) + 1, (size,), generator=generator)
        choices = known[column.name]
        keys.append(choices[torch.randint(len(choices), (int(count.sum()),), generator=generator)])
        lengths.append(count)
    none = torch.empty(0, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat([none, *lengths]).cumsum(0)])
    return Batch(
        dense=torch.randn(size, num_dense, generator=generator),
        label=torch.zeros(size, num_labels),
        sparse=Jagged(names=tuple(column.name for column in columns), keys=torch.cat([none, *keys]), offsets=offsets),
    )


def _known_keys(tables: Sequence[Store], column: CategoricalColumn, generator: torch.Generator) -> Tensor:
    """Return the keys that all static tables hold, or those of dynamic tables with some absent ones."""
    static = [len(table) for table in tables if not table.is_dynamic]
    if static:
        return torch.arange(min(static))
    # Absent keys give the default row, which the file has to give, too.
    absent = torch.randint(column.rows or 2**62, (_ABSENT_KEYS,), generator=generator)
    keys = torch.cat([absent, *(table.keys().cpu() for table in tables)])
    return keys if column.hotness == 1 else keys[keys != NO_KEY]
