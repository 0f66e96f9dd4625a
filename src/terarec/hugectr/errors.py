"""The exceptions of the facade: one for each member of `Error_t` that can occur here.

Each is a `HugeCTRError` with its member as ``error``, a RuntimeError (what scripts for HugeCTR expect), and the
class of `terarec.errors` that has the same meaning.
"""

from __future__ import annotations

from typing import ClassVar

from terarec.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    StorageError,
    TerarecError,
    TrainingError,
)
from terarec.hugectr.enums import Error_t


class HugeCTRError(TerarecError, RuntimeError):
    """Base of the errors of the facade.

    Attributes:
        error: the member of `Error_t` with the same meaning.
    """

    error: ClassVar[Error_t] = Error_t.UnspecificError


class WrongInputError(HugeCTRError, ConfigError):
    """An argument, or a clause of a JSON file, is not what HugeCTR accepts, or asks for what terarec does not do."""

    error = Error_t.WrongInput


class IllegalCallError(HugeCTRError):
    """A call at a time, or on an object, that does not allow it."""

    error = Error_t.IllegalCall


class OutOfBoundError(HugeCTRError, StorageError):
    """More keys than a table was given room for, or a key outside its table."""

    error = Error_t.OutOfBound


class FileCannotOpenError(HugeCTRError, DataNotFoundError):
    """A file that was named does not exist or cannot be read."""

    error = Error_t.FileCannotOpen


class BrokenFileError(HugeCTRError, FormatError):
    """A file does not hold what its format promises."""

    error = Error_t.BrokenFile


class LossCannotConvergeError(HugeCTRError, TrainingError):
    """The loss is no longer a number."""

    error = Error_t.DataCheckError
