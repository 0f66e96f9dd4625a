# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the facade: one for each member of `Error_t` that can occur here.

Each is a `HugeCTRError` with its member as ``error``, a RuntimeError (what scripts for HugeCTR expect), and the
class of `terarec.errors` that has the same meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from terarec.errors import (
    ConfigError,
    DamagedFileError,
    DataNotFoundError,
    FormatError,
    KeyOutOfRangeError,
    MissingDependencyError,
    NoSpaceError,
    StorageError,
    TerarecError,
    TrainingError,
    UnreachableError,
)
from terarec.hugectr.enums import Error_t


class HugeCTRError(TerarecError, RuntimeError):
    """Base of the errors of the facade.

    Attributes:
        error: The member of `Error_t` with the same meaning.
    """

    error: ClassVar[Error_t] = Error_t.UnspecificError


class WrongInputError(HugeCTRError, ConfigError):
    """An argument, or a clause of a JSON file, that HugeCTR does not accept, or that terarec does not support.

    Attributes:
        field: Name of the parameter or key; empty if several are wrong together.
        received: The received value, or None.
    """

    error = Error_t.WrongInput

    def __init__(self, *parts: object, field: str = "", received: object = None) -> None:
        super().__init__(*parts)
        self.field = field
        self.received = received


class MissingKeyError(WrongInputError):
    """The keyset of a pass lacks a key that one of its samples has.

    Attributes:
        slot: Name of the feature, such as "data.0".
        key: The first key that is missing.
        sample: Number of its sample in the order in which the pass reads them, from 0.
    """

    def __init__(self, *parts: object, slot: str, key: int, sample: int) -> None:
        super().__init__(*parts)
        self.slot = slot
        self.key = key
        self.sample = sample


class IllegalCallError(HugeCTRError):
    """A call that is not allowed in the present state."""

    error = Error_t.IllegalCall


class OutOfBoundError(HugeCTRError, StorageError):
    """More keys than a table has room for, or a key outside its table."""

    error = Error_t.OutOfBound


class OutOfMemoryError(HugeCTRError, NoSpaceError):
    """A table, memory or a disk is full."""

    error = Error_t.OutOfMemory


class StoreError(HugeCTRError, StorageError):
    """A store that cannot be opened, read or written, though there is space."""


class ServerUnreachableError(HugeCTRError, UnreachableError):
    """A server of a database cannot be reached, or did not answer in time; the message has its host and port."""


class FileCannotOpenError(HugeCTRError, DataNotFoundError):
    """A file that was named does not exist, or cannot be read or written."""

    error = Error_t.FileCannotOpen


class BrokenFileError(HugeCTRError, FormatError):
    """A file does not hold what its format promises."""

    error = Error_t.BrokenFile


class InvalidEnvError(HugeCTRError, MissingDependencyError):
    """A package that is not installed, such as that of a remote file system."""

    error = Error_t.InvalidEnv


class LossCannotConvergeError(HugeCTRError, TrainingError):
    """The loss is no longer a number."""

    error = Error_t.DataCheckError


# The first that fits counts: a missing file is a FormatError, too.
_MEANINGS: tuple[tuple[type[TerarecError], type[HugeCTRError]], ...] = (
    (MissingDependencyError, InvalidEnvError),
    (DataNotFoundError, FileCannotOpenError),
    (FormatError, BrokenFileError),
    (KeyOutOfRangeError, OutOfBoundError),
    (UnreachableError, ServerUnreachableError),
    (DamagedFileError, BrokenFileError),
    (NoSpaceError, OutOfMemoryError),
    (StorageError, StoreError),
    (ConfigError, WrongInputError),
)


@contextmanager
def as_hugectr_errors(call: str) -> Iterator[None]:
    """Convert errors of terarec to those of the facade with the same meaning, prefixed with the name of the `call`."""
    try:
        yield
    # Calls nest: the inner one has named itself already.
    except HugeCTRError:
        raise
    except TerarecError as error:
        for kind, meaning in _MEANINGS:
            if isinstance(error, kind):
                raise meaning(call, error.where, error.problem) from error
        raise
    except OSError as error:  # a folder that is a file, or one that may not be written to
        what = " ".join(str(error).split())  # drivers of file systems write many lines
        raise FileCannotOpenError(call, f"{what}, expected a path that can be used") from error
