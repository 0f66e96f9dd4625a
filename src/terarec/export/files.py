# SPDX-License-Identifier: Apache-2.0
"""Traced models as files of other runtimes: written, run, and compared with the model on random batches."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram
from typing_extensions import override

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export.inputs import NO_KEY, ModelInput
from terarec.export.lookups import exportable
from terarec.export.scoring import BatchColumns, Scoring
from terarec.spec import CategoricalColumn
from terarec.spec.checks import one_line
from terarec.storage.store import TableRows

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

Runner = Callable[[Mapping[str, NDArray[np.generic]]], Sequence[NDArray[np.generic]]]
"""Name of each input -> its value, to the value of each output."""


def trace(scoring: Scoring) -> ExportedProgram:
    """Return the program of the scoring of a model in evaluation mode, for batches of any length that it takes.

    Raises:
        ConfigError: The model computes something that a program cannot hold, with the layer.
    """
    is_open = torch.export.Dim.DYNAMIC
    examples = _examples(scoring)
    shapes = [
        ({} if scoring.batch_size else {0: is_open})
        | {axis + 1: is_open for axis, dim in enumerate(one.dims) if dim is None}
        for one in scoring.inputs
    ]
    with exportable(scoring.model, tables=scoring.tables, row_type=scoring.row_type), torch.no_grad(), quiet():
        try:
            # Not strict: torch's bytecode interpreter, which strict tracing uses, rejects more models.
            program = torch.export.export(scoring, examples, dynamic_shapes=(tuple(shapes),), strict=False)
        except Exception as error:  # any error of a model's code on tensors without values
            raise ConfigError(
                type(scoring.model).__name__,
                f"cannot be exported{_layer_of(error, scoring.model)}: {first_line(error)}",
            ) from error
    _forget_places(program.graph_module)
    return program


def _examples(scoring: Scoring) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(
            [scoring.batch_size or _EXAMPLE_BATCH, *(_EXAMPLE_KEYS if dim is None else dim for dim in one.dims)],
            dtype=getattr(torch, one.dtype),
        )
        for one in scoring.inputs
    )


def save_torch(program: ExportedProgram, path: Path) -> None:
    """Write `program` as a file for `torch.export.load`."""
    # Without a buffer, which would keep an error until the file is closed.
    with path.open("wb", buffering=0) as stream, quiet():
        file = _ArchiveFile(stream)
        torch.export.save(program, cast(IO[bytes], file))
    if file.error is not None:
        raise file.error


class _ArchiveFile:
    """File that accepts bytes which the disk does not take: torch ends the process where a write of an archive fails.

    Its writer writes the end of the archive when it is destroyed, after an error, too, and an error there is fatal.

    Attributes:
        error: First error of the disk, with which the file is worth nothing.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        if self.error is None:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[self._stream.write(rest) :]
            except OSError as error:
                self.error = error
        return len(content)

    def flush(self) -> None:
        pass


def save_aotinductor(program: ExportedProgram, path: Path, *, loads_weights: bool = False) -> None:
    """Compile `program` for this machine and write it as a package of AOTInductor.

    Args:
        program: The program.
        path: The package.
        loads_weights: Whether other weights can be loaded into it: no constant becomes part of the code.
    """
    from torch._inductor import aoti_compile_and_package  # loads the compiler

    with quiet():
        try:
            options = {"always_keep_tensor_constants": True} if loads_weights else None
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
        except Exception as error:  # any error of the compiler
            raise ConfigError("aotinductor", f"the program cannot be compiled: {first_line(error)}") from error


def save_torchscript(scoring: Scoring, path: Path) -> None:
    """Trace `scoring` and write it as a TorchScript file, for servers that load nothing else."""
    with exportable(scoring.model, tables=scoring.tables, row_type=scoring.row_type), torch.no_grad(), quiet():
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
            raise ConfigError(where, f"cannot be traced by TorchScript: {first_line(error)}") from error
        # By way of memory: where the disk is full, torch's own writing of a file ends the process.
        with path.open("wb") as file:
            torch.jit.save(traced, file)


def _forget_places(module: nn.Module) -> None:
    """Remove the source locations of operations, which have paths of this machine, from a program.

    Also the modules that they came from: torch cannot load files in which the name of one has a comma.
    """
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)
                node.meta.pop("nn_module_stack", None)


class _Silence(logging.Filter):
    """Drops what one thread logs, and what it writes to the stream of errors; both of other threads pass."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self._stream = stream

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.ERROR or threading.get_ident() != self.thread

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.thread else self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


_EXPORTING = threading.RLock()
_LOOK_SECONDS = 0.1


@contextlib.contextmanager
def exporting(is_over: threading.Event) -> Iterator[bool]:
    """Wait until no other thread exports, and keep others away in the block; yield False once `is_over` is set."""
    while not is_over.is_set():
        if _EXPORTING.acquire(timeout=_LOOK_SECONDS):
            try:
                yield not is_over.is_set()
            finally:
                _EXPORTING.release()
            return
    yield False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporters, in this thread, about absent libraries and their own code; one thread at a time.

    The exporters change the process while they run (torch's modules, the filters of warnings) and put back what they
    found: of two that overlapped, the last one would leave the changes of the other for good.
    """
    with _EXPORTING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # At the handlers: the exporters log under many names, and through several libraries.
        loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
        handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
        handlers |= {logging.lastResort} if logging.lastResort is not None else set()
        silence = _Silence(sys.stderr)
        for handler in handlers:
            handler.addFilter(silence)
        try:
            with contextlib.redirect_stderr(cast(TextIO, silence)):  # graphs that failed are printed
                yield
        finally:
            silence.thread = 0  # for whoever has taken the stream meanwhile
            for handler in handlers:
                handler.removeFilter(silence)


def _layer_of(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module of `model` in which `error` was raised."""
    # torch's error names the operation, not the layer; the frames of the traceback still have it as `self`.
    names = {module: name for name, module in model.named_modules()}
    layer, place = "", error.__traceback__
    while place is not None:
        module = place.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            layer = f" in its layer {names[module]!r} ({type(module).__name__})"
        place = place.tb_next
    return layer


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error`; its type where there is none."""
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
        outputs = run({one.name: one.read(batch) for one in inputs})
        with torch.no_grad():
            wanted = [scores.float().cpu().numpy() for scores in expected(batch)]
        for got, want in zip(outputs, wanted, strict=True):
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


def torch_runner(path: Path, inputs: Sequence[ModelInput]) -> Runner:
    """Run the program in the file `path`."""
    return _torch_run(torch.export.load(path).module(), inputs)


def torchscript_runner(path: Path, inputs: Sequence[ModelInput]) -> Runner:
    """Run the TorchScript file `path`."""
    with quiet():  # TorchScript as a whole is deprecated
        return _torch_run(torch.jit.load(path), inputs)  # type: ignore[no-untyped-call]


def aotinductor_runner(path: Path, inputs: Sequence[ModelInput]) -> Runner:
    """Run the package of AOTInductor in the file `path`."""
    from torch._inductor import aoti_load_package  # loads the compiler

    return _torch_run(aoti_load_package(str(path)), inputs)


def _torch_run(module: Callable[..., Sequence[Tensor]], inputs: Sequence[ModelInput]) -> Runner:
    def run(feed: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(feed[one.name]) for one in inputs))
        return [scores.numpy() for scores in outputs]

    return run


def random_batches(columns: BatchColumns, sizes: Sequence[int] = BATCH_SIZES) -> list[Batch]:
    """Return batches of these sizes, always the same ones.

    A list has 0 to `hotness` keys, at most a few; dense columns are normally distributed, labels zeros.
    """
    generator = torch.Generator().manual_seed(0)
    known = {
        column.name: _known_keys(columns.tables.get(column.name, ()), column, generator)
        for column in columns.categorical
    }
    return [_batch(columns, known, size, generator) for size in sizes]


def _batch(columns: BatchColumns, known: Mapping[str, Tensor], size: int, generator: torch.Generator) -> Batch:
    keys, lengths = [], []
    of_lists: dict[str, Tensor] = {}
    for column in columns.categorical:
        name = columns.beside.get(column.name, column.name)
        if name in of_lists:
            count = of_lists[name]
        elif column.hotness == 1:
            count = torch.ones(size, dtype=torch.int64)
        else:
            count = torch.randint(min(column.hotness, _MOST_KEYS) + 1, (size,), generator=generator)
            of_lists[name] = count
        choices = known[column.name]
        keys.append(choices[torch.randint(len(choices), (int(count.sum()),), generator=generator)])
        lengths.append(count)
    none = torch.empty(0, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat([none, *lengths]).cumsum(0)])
    return Batch(
        dense=torch.randn(size, columns.num_dense, generator=generator),
        label=torch.zeros(size, columns.num_labels),
        sparse=Jagged(
            names=tuple(column.name for column in columns.categorical), keys=torch.cat([none, *keys]), offsets=offsets
        ),
    )


def _known_keys(tables: Sequence[TableRows], column: CategoricalColumn, generator: torch.Generator) -> Tensor:
    """Return the keys that all static tables hold, or those of dynamic tables with some absent ones."""
    static = [len(table) for table in tables if not table.is_dynamic]
    if static:
        return torch.arange(min(static))
    # Absent keys give the default row, which the file has to give, too.
    absent = torch.randint(column.rows or 2**62, (_ABSENT_KEYS,), generator=generator)
    keys = torch.cat([absent, *(table.keys().cpu() for table in tables)])
    return keys if column.hotness == 1 else keys[keys != NO_KEY]
