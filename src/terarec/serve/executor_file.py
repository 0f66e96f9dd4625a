# SPDX-License-Identifier: Apache-2.0
"""The stored choice of a model's executors: the fastest for each batch size, by machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from terarec.errors import ConfigError, FormatError, StorageError
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.io.locks import file_lock
from terarec.kernels.processor import processor_generation
from terarec.spec import checks, from_data
from terarec.spec.checks import FieldError
from terarec.spec.serving import EXECUTOR_MODES, EXECUTOR_NAMES

EXECUTORS_FILE = "executors.json"
"""Name of the file in a run. The one of a graph file ``NAME.json`` is `graph_executors_file`."""
_NAME, _VERSION = "terarec.executors", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeChoice:
    """The executor for batches of one size.

    Attributes:
        batch: Samples of a batch.
        executor: Name of the executor.
        seconds: Executor -> median time of the dense part, for all that were measured.
    """

    batch: int
    executor: str
    seconds: Mapping[str, float]

    def __post_init__(self) -> None:
        checks.positive_int(self, "batch", maximum=checks.MOST_BATCH)
        checks.one_of(self, "executor", EXECUTOR_NAMES)
        if not all(map(checks.number(0.0).accepts, self.seconds.values())):
            checks.fail(self, "seconds", "finite numbers >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorChoice:
    """Executors chosen on one kind of machine.

    Attributes:
        torch: Version of torch.
        processor: Name of the processor.
        threads: Threads of the measurement.
        sizes: The choice for each size, the smallest first.
        rejected: Executor -> why it cannot be used.
    """

    torch: str
    processor: str
    threads: int
    sizes: tuple[SizeChoice, ...]
    rejected: Mapping[str, str]

    def __post_init__(self) -> None:
        checks.positive_int(self, "threads", maximum=checks.MOST_THREADS)
        if not self.sizes:
            checks.fail(self, "sizes", "the choice for one size at least")

    def is_of(self, other: Mapping[str, object]) -> bool:
        """Return whether both choices are from the same kind of machine."""
        return all(getattr(self, name) == value for name, value in other.items())


def this_machine() -> dict[str, object]:
    """Return the properties of this machine on which a choice depends, as in `ExecutorChoice`."""
    return {"torch": torch.__version__, "processor": processor_generation(), "threads": torch.get_num_threads()}


def graph_executors_file(graph: Path) -> Path:
    """Return the file next to a graph file that stores the choices for its model."""
    return graph.with_name(f"{graph.name}.{EXECUTORS_FILE}")


def wants_programs(executor: str, file: Path, *, device: torch.device, is_fp32: bool) -> bool:
    """Return whether a model needs programs at all, without importing the exporters, which takes seconds.

    Args:
        executor: "auto", "measure" or the name of an executor.
        file: The file that stores the choice for the model.
        device: Device of the model.
        is_fp32: Whether it computes in float32, with rows as they are.

    Raises:
        ConfigError: An unknown name, or an executor that is named for a model that only eager torch computes.
    """
    checks.argument("executor", executor, checks.choice(EXECUTOR_MODES))
    # Before anything is opened: by default most runs have no such file, and torch's exporters take seconds to import.
    if executor == "eager" or (executor == "auto" and not file.is_file()):
        return False
    if device.type == "cpu" and is_fp32:
        return True
    # A choice by itself falls back to eager torch; an executor that was named runs or raises.
    if executor in ("auto", "measure"):
        return False
    got = f"{executor!r} on {device.type!r}" + ("" if is_fp32 else " for narrower numbers than fp32")
    raise FieldError("", "executor", f"got {got}, expected 'eager', or a model on the CPU in fp32")


def kept_choices(file: Path) -> list[ExecutorChoice]:
    """Return the choices in `file`; none where there is no such file.

    Raises:
        FormatError: A damaged file.
    """
    if not file.is_file():
        return []
    content = read_versioned_json(file, _NAME, _VERSION)
    try:
        return list(from_data(_Choices, content, where=f"{file}: $").choices)
    except ConfigError as error:
        raise FormatError(error.where, error.problem) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choices:
    """Content of the file."""

    choices: tuple[ExecutorChoice, ...]


def keep_choice(file: Path, choice: ExecutorChoice) -> None:
    """Write a choice to `file`, in place of a former one of this machine.

    Raises:
        FormatError: The file of other machines' choices is damaged.
        StorageError: It cannot be written, or another process writes it.
    """
    # The lock spans reading and writing, so that two processes that measured at once do not drop each other's choice.
    with file_lock(file.with_name(f".{file.name}.lock")) as is_held:
        if not is_held:
            raise StorageError(file, "another process writes it, expected to be the only one")
        # Machines of other kinds may use the same model: each replaces its own choice alone.
        others = [each for each in kept_choices(file) if not each.is_of(this_machine())]
        content = {"choices": [dataclasses.asdict(each) for each in (*others, choice)]}
        write_versioned_json(file, _NAME, _VERSION, content)
