"""JSON files: plain ones, and versioned ones ``{"format": NAME, "version": N, ...}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terarec.errors import FormatError
from terarec.io.atomic import write_bytes
from terarec.io.remote import locate
from terarec.spec import checks
from terarec.spec.codec import parse_json
from terarec.spec.quoting import quoted


def write_json(
    path: Path, content: object, *, replace: bool = True, durable: bool = False, allow_nan: bool = False
) -> None:
    """Write `content` atomically as indented JSON.

    Args:
        path: Path of the file.
        content: JSON data.
        replace: Whether an existing file is replaced.
        durable: Whether it names files of a directory under construction, see `AtomicFile`.
        allow_nan: Whether NaN and infinities are written, in the spelling that Python reads.

    Raises:
        ConfigError: An existing file may not be replaced.
        StorageError: The disk is full.
        ValueError: A number that JSON lacks.
    """
    text = f"{json.dumps(content, indent=2, allow_nan=allow_nan)}\n"
    write_bytes(path, text.encode(), replace=replace, durable=durable)


def read_json(path: str | Path, expected: str = "JSON") -> Any:
    """Return the content of a JSON file.

    Args:
        path: Path or URL.
        expected: Expected content, for the error.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON.
    """
    try:
        file = locate(path)
        return parse_json(file.read(0, file.size).tobytes())
    # Of a missing file; it is a ValueError, too.
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(path, f"not JSON ({error}), expected {expected}") from None


def write_versioned_json(
    path: Path,
    name: str,
    version: int,
    content: Mapping[str, Any],
    *,
    replace: bool = True,
    durable: bool = False,
) -> None:
    """Write `content` atomically as indented JSON after ``"format": name`` and ``"version": version``.

    Args:
        path: Path of the file.
        name: Name of the format.
        version: Version of the format.
        content: JSON data.
        replace: Whether an existing file is replaced.
        durable: Whether it names files of a directory under construction, see `AtomicFile`.

    Raises:
        ConfigError: An existing file may not be replaced.
        StorageError: The disk is full.
    """
    write_json(path, {"format": name, "version": version, **content}, replace=replace, durable=durable)


def read_versioned_json(path: Path, name: str, version: int, *, oldest: int = 1) -> dict[str, Any]:
    """Return the content of a file of `write_versioned_json`; see `read_json_and_version`."""
    return read_json_and_version(path, name, version, oldest=oldest)[1]


def read_json_and_version(path: Path, name: str, version: int, *, oldest: int = 1) -> tuple[int, dict[str, Any]]:
    """Return version and content of a file of `write_versioned_json`.

    Args:
        path: Path of the file.
        name: Format that the file must name.
        version: Newest accepted version.
        oldest: Oldest accepted version.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON, another format, or a version outside these.
    """
    data = read_json(path, f"a {name!r} file")
    found = data.get("format") if isinstance(data, dict) else None
    if found != name:
        raise FormatError(path, "$.format", f"got {quoted(found)}, expected {name!r}")
    number, rule = data.get("version"), checks.integer(1)
    try:
        rule.read(number)
    except ValueError:
        raise FormatError(path, "$.version", f"got {quoted(number)}, expected {rule.accepted}") from None
    if number > version:
        raise FormatError(path, f"{name} version {number} is newer than this terarec reads (up to {version})")
    if number < oldest:
        raise FormatError(
            path,
            f"{name} version {number} was made by an earlier development state, expected version {oldest}; "
            "make it again",
        )
    return number, {key: value for key, value in data.items() if key not in ("format", "version")}
