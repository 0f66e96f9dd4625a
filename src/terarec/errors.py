# SPDX-License-Identifier: Apache-2.0
"""The exception tree.

Every error that a user can cause derives from `TerarecError` and from the builtin that fits it, so that both
``except terarec.errors.TerarecError`` and ``except ValueError`` work. A message is one line: what was received,
where (argument, JSON path, or file with row group, line or column: `TerarecError.where`), and what is accepted.
"""

from __future__ import annotations

from pathlib import Path


class TerarecError(Exception):
    """Base of all errors that terarec raises on purpose.

    Attributes:
        where: Argument, JSON path, or file with row group, line or column; "" if the message alone says it.
        problem: Received value and accepted ones.

    Args:
        parts: The message alone; or the place, from the outermost part to the innermost, and `problem` last. Empty
            parts of the place are left out.
    """

    # In a function of TensorFlow AutoGraph would raise an error of its own type in place of one without this.
    ag_pass_through = True

    def __init__(self, *parts: object) -> None:
        # The last part is the problem, so that each calling layer can put its own place before it.
        *where, self.problem = map(str, parts or ("",))
        self.where = ": ".join(filter(None, where))
        super().__init__(f"{self.where}: {self.problem}" if self.where else self.problem)


class ConfigError(TerarecError, ValueError):
    """An argument, a spec field or a configuration file is wrong."""


class FormatError(TerarecError, ValueError):
    """A file does not hold what its format promises."""


class DataNotFoundError(FormatError, FileNotFoundError):
    """A file or directory that was named does not exist."""

    # OSError has an own spelling, with a number and a file that this error does not have.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class KeysetError(FormatError):
    """The keyset of a part lacks a key that one of its samples has.

    Attributes:
        part: Number of the part, from 0.
        column: Name of the categorical column.
        key: The first key that is missing.
        row: Number of its sample in the split, from 0.
    """

    def __init__(self, *parts: object, part: int, column: str, key: int, row: int) -> None:
        super().__init__(*parts)
        self.part = part
        self.column = column
        self.key = key
        self.row = row


class StorageError(TerarecError, RuntimeError):
    """A store or a table cannot be read or written as requested."""


class NoSpaceError(StorageError):
    """A table, memory or disk is full."""


class DamagedFileError(StorageError):
    """A file of a store does not hold what was written to it.

    Attributes:
        file: The file.
        page: Number of the damaged page in it, from 0; None if it is not one page.
        table: Name of the table.
    """

    def __init__(self, *parts: object, file: Path, page: int | None, table: str) -> None:
        super().__init__(*parts)
        self.file = file
        self.page = page
        self.table = table


class StaleRowsError(StorageError):
    """A server holds rows of another state of a table than this process left there.

    Attributes:
        is_later: Whether another process changed them since, or does so now; else they are of an earlier time, or of a
            change whose writer died.
    """

    def __init__(self, *parts: object, is_later: bool) -> None:
        super().__init__(*parts)
        self.is_later = is_later


class UnreachableError(StorageError, ConnectionError):
    """A server that keeps rows cannot be reached, or did not answer in time."""


class KeyOutOfRangeError(StorageError, IndexError):
    """A key lies outside its static table."""


class KernelError(TerarecError, RuntimeError):
    """A kernel that was requested by name cannot run."""


class ClusterError(TerarecError, RuntimeError):
    """A cluster cannot be reached, or failed.

    Attributes:
        phases: Phases of a preparation that are complete and kept.
    """

    def __init__(self, *parts: object, phases: tuple[str, ...] = ()) -> None:
        super().__init__(*parts)
        self.phases = phases


class CollectiveError(TerarecError, RuntimeError):
    """Ranks cannot connect, differ in data that must be equal, or a collective failed.

    Attributes:
        collective: Name of the collective, such as "exchange of keys"; `where` has it with the step.
        step: Number of the training step in which it failed; 0 before the first.
        rank: The rank that failed or did not take part; None if it is not known.
        pairs: Pairs of ranks that cannot connect, where they are known.
        differences: Ranks, and paths in their JSON data, that differ from rank 0.
    """

    def __init__(
        self,
        problem: str,
        *,
        collective: str,
        step: int = 0,
        rank: int | None = None,
        pairs: tuple[tuple[int, int], ...] = (),
        differences: tuple[tuple[int, str], ...] = (),
    ) -> None:
        super().__init__(f"{collective} in step {step}" if step else collective, problem)
        self.collective = collective
        self.step = step
        self.rank = rank
        self.pairs = pairs
        self.differences = differences


class UserCodeError(TerarecError, RuntimeError):
    """Code that the user provides raised an exception: `where` names it, `problem` the exception with file and line."""


class MissingDependencyError(TerarecError, ImportError):
    """An optional library is not installed: `where` is its name, and `problem` has the extra that brings it."""


class TrainingError(TerarecError, ArithmeticError):
    """Training cannot continue: the loss, or a weight to save, is no longer a finite number.

    Attributes:
        layer: The first layer of the model whose output is not finite, its name and kind, or its parameter; None where
            it is unknown.
    """

    def __init__(self, *parts: object, layer: str | None = None) -> None:
        super().__init__(*parts)
        self.layer = layer


class RunInterruptedError(TerarecError):
    """A signal (Ctrl-C, SIGTERM) stopped the work; what is complete is kept.

    Attributes:
        signal: Name of the signal in a training, such as "SIGINT".
        step: Number of the last step of a training; None for a preparation.
        checkpoint: Directory of the checkpoint from which a run resumes.
        phases: Phases of a preparation that are complete and kept.
    """

    def __init__(
        self,
        problem: str,
        *,
        signal: str = "",
        step: int | None = None,
        checkpoint: Path | None = None,
        phases: tuple[str, ...] = (),
    ) -> None:
        super().__init__(problem)
        self.signal = signal
        self.step = step
        self.checkpoint = checkpoint
        self.phases = phases
