"""What an interrupted piece of work has done already: its phases commit, and the next run goes on after the last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terarec.errors import FormatError
from terarec.formats.envelope import open_envelope, write_envelope
from terarec.spec import FieldError

JOURNAL_FILE = "journal.json"
FORMAT = "terarec.journal"
VERSION = 1


class Journal:
    """``journal.json`` of a directory in the making.

    Args:
        directory: that directory.
        fingerprint: what the phases depend on: the name of each part, and a text that changes whenever it does.

    Attributes:
        directory: that directory.

    Raises:
        ConfigError: phases of another fingerprint are there already.
        FormatError: what is there is damaged.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self._path = directory / JOURNAL_FILE
        self._fingerprint = dict(fingerprint)
        self._phases: dict[str, Any] = {}
        if self._path.exists():
            found = _read(self._path)
            _check(found["fingerprint"], fingerprint, directory)
            self._phases = found["phases"]

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that are done, in the order in which they were."""
        return tuple(self._phases)

    def result(self, phase: str) -> Any | None:
        """What `commit` was given for `phase`; None if the phase is still to do."""
        return self._phases.get(phase)

    def commit(self, phase: str, result: Mapping[str, Any]) -> None:
        """Put down that `phase` is done. What it wrote must be on the disk.

        Raises:
            StorageError: the disk is full.
        """
        phases = {**self._phases, phase: dict(result)}
        write_envelope(self._path, FORMAT, VERSION, {"fingerprint": self._fingerprint, "phases": phases})
        self._phases = phases

    def remove(self) -> None:
        """Remove the file: the directory is whole."""
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = open_envelope(path, FORMAT, VERSION)
        if not all(isinstance(found.get(part), dict) for part in ("fingerprint", "phases")):
            raise FormatError(f"{path}: expected the objects fingerprint and phases")
        return found
    except FormatError as error:
        raise FormatError(f"{error}; restart (--restart) throws away what an interrupted run left there") from error


def _check(found: Mapping[str, str], expected: Mapping[str, str], directory: Path) -> None:
    for part, value in expected.items():
        if found.get(part) != value:
            problem = (
                f"an interrupted run left {directory} with other {part}, expected the same to go on, "
                "or restart (--restart) to throw it away"
            )
            raise FieldError("", "out", problem)
