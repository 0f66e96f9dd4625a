"""``manifest.json``: the list of a checkpoint's files with their sizes and checksums; written last, read first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.io import read_versioned_json, write_versioned_json
from terarec.spec import checks, from_data, to_data

MANIFEST = "manifest.json"
FORMAT = "terarec.checkpoint"
VERSION = 2  # 2 added dynamic tables


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint: its path inside (forward slashes), its size and its SHA-256 in hexadecimal."""

    file: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        checks.inner_path(self, "file")
        checks.positive_int(self, "bytes", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: training steps done.
        files: every other file of the checkpoint.
    """

    step: int
    files: tuple[FileEntry, ...]

    def entry(self, file: str) -> FileEntry:
        """The entry of `file`; raises `FormatError` if there is none."""
        for entry in self.files:
            if entry.file == file:
                return entry
        raise FormatError(f"{MANIFEST}: names no file {file!r}, which every checkpoint has")


def write_manifest(checkpoint: Path, step: int, files: Sequence[FileEntry]) -> None:
    """Write the manifest of `checkpoint`, whose other files are all on the disk by now."""
    write_versioned_json(checkpoint / MANIFEST, FORMAT, VERSION, to_data(Manifest(step=step, files=tuple(files))))


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of `checkpoint` and compare it with the directory, names and sizes.

    Raises:
        DataNotFoundError: there is none, so it is no (whole) checkpoint.
        FormatError: it is damaged, of a newer version, or a file is missing or has another size.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise DataNotFoundError(f"{checkpoint}: holds no {MANIFEST}, expected a whole checkpoint")
    try:
        manifest = from_data(Manifest, read_versioned_json(path, FORMAT, VERSION), f"{path}: $")
    except ConfigError as error:
        raise FormatError(str(error)) from None
    inside = checkpoint.resolve()
    for entry in manifest.files:
        file = checkpoint / entry.file
        if not file.is_file():
            raise FormatError(f"{file}: missing, expected a file of {entry.bytes} bytes")
        if not file.resolve().is_relative_to(inside):
            raise FormatError(f"{file}: a link to {file.resolve()}, expected a file inside {checkpoint}")
        if file.stat().st_size != entry.bytes:
            raise FormatError(f"{file}: {file.stat().st_size} bytes, expected {entry.bytes}")
    return manifest
