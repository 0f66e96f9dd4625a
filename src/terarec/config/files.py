"""Run descriptions as JSON files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from terarec.errors import ConfigError, DataNotFoundError
from terarec.spec import RunSpec, from_data, to_data


def load_run(path: Path | str) -> RunSpec:
    """Read a `RunSpec` from a JSON file.

    A relative ``data`` path is taken from the folder that holds the file, so that a configuration and its data set
    move together.

    Raises:
        DataNotFoundError: there is no such file.
        ConfigError: broken JSON (line and column), or an unknown, missing or mistyped field (JSON path).
    """
    path = Path(path)
    run = from_data(RunSpec, _parse(path), where=f"{path}: $")
    return dataclasses.replace(run, data=os.path.normpath(path.parent.absolute() / run.data))


def save_run(run: RunSpec, path: Path | str) -> None:
    """Write `run` as indented JSON, beside `path` first and then renamed into place."""
    path = Path(path)
    beside = path.with_name(path.name + ".partial")
    try:
        beside.write_text(json.dumps(to_data(run), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_distinct_fields)
    except FileNotFoundError:
        raise DataNotFoundError(f"{path}: no such file, expected a run description in JSON") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: got a directory, expected a run description in JSON") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8, expected a run description in JSON") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno} column {error.colno}: {error.msg}, expected JSON") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}, expected a run description in JSON") from None
    except _RepeatedFieldError as error:
        raise ConfigError(f"{path}: the field {error.args[0]!r} occurs twice in one object, expected it once") from None


class _RepeatedFieldError(Exception):
    """A JSON object names a field twice; `json` alone would silently keep the last one."""


def _distinct_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _RepeatedFieldError(name)
        fields[name] = value
    return fields
