"""JSON files that say what they are: ``{"format": NAME, "version": N, ...}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.atomic import write_bytes
from terarec.spec.codec import parse_json
from terarec.spec.quoting import quoted


def write_envelope(path: Path, name: str, version: int, content: Mapping[str, Any], *, replace: bool = True) -> None:
    """Write `content` atomically as indented JSON after ``"format": name`` and ``"version": version``.

    Raises:
        ConfigError: a file is there that may not be replaced.
        StorageError: the disk is full.
    """
    text = json.dumps({"format": name, "version": version, **content}, indent=2, allow_nan=False)
    write_bytes(path, (text + "\n").encode(), replace=replace)


def open_envelope(path: Path, name: str, version: int, *, oldest: int = 1) -> dict[str, Any]:
    """The content of a JSON file that `write_envelope` wrote; see `open_versioned`."""
    return open_versioned(path, name, version, oldest=oldest)[1]


def open_versioned(path: Path, name: str, version: int, *, oldest: int = 1) -> tuple[int, dict[str, Any]]:
    """The version and the content of a JSON file that `write_envelope` wrote, of `version` or down to `oldest`.

    Raises:
        DataNotFoundError: no such file.
        FormatError: not JSON, another format, or a version outside these.
    """
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise DataNotFoundError(f"{path}: no such file") from None
    except ValueError as error:
        raise FormatError(f"{path}: not JSON ({error}), expected a {name!r} file") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != name:
        raise FormatError(f"{path}: $.format is {quoted(found)}, expected {name!r}")
    number = data.get("version")
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise FormatError(f"{path}: $.version is {quoted(number)}, expected an integer >= 1")
    if number > version:
        raise FormatError(f"{path}: {name} version {number} is newer than this terarec reads (up to {version})")
    if number < oldest:
        raise FormatError(
            f"{path}: {name} version {number} was made by an earlier development state, expected version {oldest}; "
            "make it again"
        )
    return number, {key: value for key, value in data.items() if key not in ("format", "version")}
