# SPDX-License-Identifier: Apache-2.0
"""Executors of the dense part of a model on a CPU, and `Programs`: the fastest of them for each size of batches."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from terarec.batch import Batch
from terarec.closer import Closer
from terarec.errors import ConfigError, FormatError, MissingDependencyError, StorageError
from terarec.export.dense_part import DensePart
from terarec.export.files import TOLERANCE, quiet, save_aotinductor, trace
from terarec.export.onnx_file import save_onnx
from terarec.io.owned import OwnedDirectory
from terarec.serve.executor_file import ExecutorChoice, SizeChoice, keep_choice, kept_choices, this_machine

SIZES = (1, 16, 256, 4096)
"""Sizes of the measured batches; the choice for a size applies to batches up to that size."""
_ROUNDS = 3  # in turns, so that a slow phase of the machine meets all executors alike
_BLOCK_SECONDS = 0.02
_GAIN = 0.95
"""A program is chosen before eager torch if it takes at most this share of the time; below that lies noise."""
_SCALES = (1.0, 0.05)  # of the compared values: large ones saturate scores, which would hide differences
_LOGGER = logging.getLogger(__name__)

EAGER = "eager"

Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Values of `DensePart.inputs` -> scores float32[B, n] of each label. Thread-safe."""


def build_program(executor: str, part: DensePart, folder: Path) -> Program:
    """Build the program of the dense part for an executor.

    Args:
        executor: A name in `EXECUTORS`.
        part: The dense part, with the weights that it computes with.
        folder: Directory of its files; code that was compiled for other weights of the same model is reused.

    Raises:
        ConfigError: The executor cannot compute the model.
        MissingDependencyError: A library is not installed.
    """
    try:
        with quiet():
            return EXECUTORS[executor](part, folder)
    except (ConfigError, MissingDependencyError):
        raise
    # Only the first line: compilers append whole programs and stacks.
    except Exception as error:  # any error of a compiler or a runtime
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"executor {executor!r}", reason or type(error).__name__) from error


def _eager(part: DensePart, folder: Path) -> Program:
    del folder
    module = part.module
    return lambda values: module(*values)


def _compiled(part: DensePart, folder: Path) -> Program:
    del folder
    compiled = torch.compile(part.module)
    # Compiled here and not at the first request, which would wait for seconds.
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
        save_aotinductor(trace(part.module), file, loads_weights=True)
    # A runner computes one call at a time, and threads of a server call at once.
    loaded = load_package(str(file), num_runners=torch.get_num_threads())
    wanted = set(loaded.get_constant_fqns())
    weights = {name: value for name, value in part.module.state_dict().items() if name in wanted}
    # Not all constants: indices and the like are not state of the module, and equal for all weights.
    loaded.load_constants(weights, check_full_update=False)
    return lambda values: loaded(*values)


def _onnxruntime(part: DensePart, folder: Path) -> Program:
    library = _library("onnxruntime", "onnx")
    options = library.SessionOptions()
    # As many as torch has: by default the pool of a session is as large as the machine.
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that wait actively take the cores from torch's, which look rows up before, and from those of a server.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # its warnings are not useful to users who score
    session = library.InferenceSession(str(_onnx_file(part, folder)), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in part.inputs]
    outputs = [each.name for each in session.get_outputs()]

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        # Neither direction copies: arrays and tensors share their memory.
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.from_numpy(scores) for scores in session.run(outputs, feed)]

    return run


def _openvino(part: DensePart, folder: Path) -> Program:
    library = _library("openvino", "openvino")
    # Without the hint OpenVINO computes in bfloat16 where the processor has it.
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = library.Core().compile_model(str(_onnx_file(part, folder)), "CPU", options)

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        # A request for each call: one of them serves one thread at a time.
        results = model.create_infer_request().infer([value.numpy() for value in values], share_inputs=True)
        return [torch.from_numpy(results[output]) for output in model.outputs]

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
    # Written again for each runtime and each set of weights: an ONNX file holds the weights, other than compiled.pt2.
    file = folder / "model.onnx"
    save_onnx(trace(part.module), part.module, file)
    return file


def _library(name: str, extra: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(name, f"not installed, expected pip install 'terarec[{extra}]'")
    # Found before it is imported, as an import that fails inside is another error, with a message of its own.
    return importlib.import_module(name)


class Programs:
    """The dense part of a model in the executors that were chosen for it.

    Attributes:
        chosen: Largest batch -> executor, the smallest first; the last one is that of larger batches, too.

    Args:
        part: The dense part.
        programs: Executor -> program.
        chosen: Largest batch -> executor, the smallest first.
        folder: Directory of their files.
    """

    def __init__(
        self,
        part: DensePart,
        programs: Mapping[str, Program],
        chosen: Mapping[int, str],
        folder: _Folder,
    ) -> None:
        self.chosen = dict(chosen)
        self._part = part
        self._programs = {name: programs[name] for name in set(self.chosen.values()) if name != EAGER}
        # Held for `moved`, which uses compiled files again; the folder is removed with the last reference.
        self._folder = folder

    @classmethod
    def of(cls, part: DensePart, chosen: Mapping[int, str]) -> Self:
        """Create the programs of the given executors.

        Raises:
            ConfigError: An executor cannot compute the model, or computes other scores.
            MissingDependencyError: The library of one is not installed.
        """
        folder = _Folder()
        programs = {name: build_program(name, part, folder.path) for name in sorted(set(chosen.values()) - {EAGER})}
        for name, program in programs.items():
            _check_scores(name, program, part)
        return cls(part, programs, chosen, folder)

    @classmethod
    def measured(cls, part: DensePart) -> tuple[Self, ExecutorChoice]:
        """Choose the fastest executor for each of `SIZES`, among those that give the scores of eager torch."""
        folder = _Folder()
        programs: dict[str, Program] = {}
        rejected: dict[str, str] = {}
        for name in EXECUTORS:
            try:
                program = build_program(name, part, folder.path)
                _check_scores(name, program, part)
                programs[name] = program
            except (ConfigError, MissingDependencyError) as error:
                rejected[name] = str(error)
        sizes = tuple(_measured(programs, part.random_values(size), size) for size in SIZES)
        choice = ExecutorChoice(**this_machine(), sizes=sizes, rejected=rejected)  # type: ignore[arg-type]
        return cls(part, programs, {one.batch: one.executor for one in sizes}, folder), choice

    def scores(self, batch: Batch) -> Tensor | None:
        """Return the scores float32[B, C] of a batch; None where the model itself is the choice."""
        # Exported programs assume at least one sample.
        if not batch.batch_size:
            return None
        # `chosen` is ordered by size, so that the first bound that holds is the nearest one.
        name = next((name for size, name in self.chosen.items() if batch.batch_size <= size), None)
        program = self._programs.get(name or self.chosen[max(self.chosen)])
        if program is None:
            return None
        # Compiled programs read values by their address, and the tops of an embedding may be parts of a wider tensor.
        outputs = program([value.contiguous() for value in self._part.look_up(batch)])
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=1)

    def moved(self, part: DensePart) -> Programs:
        """Return these programs for the same layers with other weights."""
        names = sorted(self._programs)
        programs = {name: build_program(name, part, self._folder.path) for name in names}
        return Programs(part, programs, self.chosen, self._folder)


def open_programs(split: Callable[[], DensePart], file: Path, executor: str) -> Programs | None:
    """Return the programs of a model on the CPU in fp32.

    Args:
        split: Function that returns its dense part; it raises `ConfigError` for a model that has none.
        file: The file that keeps the choice.
        executor: "auto" for the stored choice for this machine, eager torch if there is none; "measure" to choose and
            store the choice, unless one is stored; or the name of an executor, for all batches.

    Returns:
        None for eager torch.

    Raises:
        ConfigError: An executor that was named and cannot compute the model.
        MissingDependencyError: The library of such an executor is not installed.
    """
    try:
        part = split()
    except ConfigError as error:
        if executor in EXECUTORS:
            raise
        _LOGGER.info("%s; the model runs in eager torch", error)
        return None
    if executor in EXECUTORS:
        return Programs.of(part, {SIZES[-1]: executor})
    try:
        kept = next((choice for choice in kept_choices(file) if choice.is_of(this_machine())), None)
    except FormatError as error:
        _LOGGER.warning("%s; the model runs in eager torch", error)
        kept = None
    if kept is not None:
        try:
            # Compared again at each start: a library may have been updated since the choice was made.
            return Programs.of(part, {one.batch: one.executor for one in kept.sizes})
        except (ConfigError, MissingDependencyError) as error:
            _LOGGER.warning("%s; the model runs in eager torch", error)
            return None
    if executor == "auto":
        return None
    programs, choice = Programs.measured(part)
    try:
        keep_choice(file, choice)
    except (FormatError, StorageError) as error:
        _LOGGER.warning("the choice of executors is not kept: %s", error)
    return programs


def _check_scores(name: str, program: Program, part: DensePart) -> None:
    """Raise `ConfigError` unless a program gives the scores of eager torch, as exports are compared."""
    # Programs were not built with 7 samples, so this size reveals a size that was compiled in.
    for size, scale in ((size, scale) for size in (*SIZES, 7) for scale in _SCALES):
        values = [value * scale if value.is_floating_point() else value for value in part.random_values(size, seed=1)]
        with torch.inference_mode():
            outputs, expected = program(values), part.module(*values)
        for got, want in zip(outputs, expected, strict=True):
            bound = TOLERANCE * max(1.0, float(want.abs().max()))
            difference = float((got - want).abs().max()) if got.shape == want.shape else float("nan")
            # Negated, so that NaN fails, too.
            if not difference <= bound:
                problem = f"its scores are {difference:.3g} off those of eager torch, expected at most {bound:.3g}"
                raise ConfigError(f"executor {name!r}", problem)


def _measured(programs: Mapping[str, Program], values: Sequence[Tensor], size: int) -> SizeChoice:
    times: dict[str, list[float]] = {name: [] for name in programs}
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for name, program in programs.items():
                program(values)  # the threads of the previous one may still wait actively
                times[name] += _block(program, values)
    seconds = {name: statistics.median(durations) for name, durations in times.items()}
    best = min(seconds, key=seconds.__getitem__)
    chosen = best if seconds[best] <= _GAIN * seconds[EAGER] else EAGER
    return SizeChoice(batch=size, executor=chosen, seconds=seconds)


def _block(program: Program, values: Sequence[Tensor]) -> Iterator[float]:
    spent = 0.0
    while spent < _BLOCK_SECONDS:
        begun = time.perf_counter()
        program(values)
        took = time.perf_counter() - begun
        spent += took
        yield took


class _Folder:
    """A directory that is removed when nothing refers to it any more; that of a killed process, with the next one."""

    def __init__(self) -> None:
        folder = OwnedDirectory(Path(tempfile.gettempdir()), "terarec-executors").__enter__()
        self.path = folder.files
        self._closer = Closer(self, folder.close)
