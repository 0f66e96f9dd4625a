# SPDX-License-Identifier: Apache-2.0
"""Descriptions of runs, servers and graphs from JSON files, and back."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.io.files import write_json
from terarec.io.opening import read_bytes
from terarec.spec import (
    GraphModelSpec,
    GraphSpec,
    KafkaTopicSpec,
    RedisSpec,
    RedisStreamSpec,
    RocksDBSpec,
    RowFileSpec,
    RunSpec,
    ServedTablesSpec,
    from_data,
    to_data,
)
from terarec.spec.checks import FieldError
from terarec.spec.codec import (
    documentation_of,
    hints_of,
    kinds_of,
    members,
    parse_json,
    summary_of,
    words_of,
)
from terarec.spec.serving import RecommendationSpec, UpdateStreamSpec

_INDENT, _WIDTH = 2, 100

RUN_FILE = "run.json"
DATASET_DIRECTORY = "dataset"
CHECKPOINT_DIRECTORY = "checkpoints"
"""Names in the directory of a run."""


def commented_json(spec: object, remarks: Mapping[str, str] | None = None) -> str:
    """Return `spec` as JSON with all its fields, those that are None included, and with ``//`` comment lines.

    A field's comment is its entry in the docstring of its class, the words that it takes, and its remark.

    Args:
        spec: A dataclass of `terarec.spec`.
        remarks: Dotted path of a field -> text behind its comment.
    """
    return "\n".join(_object(spec, "", remarks or {}, 0)) + "\n"


def without_comments(text: str) -> str:
    """Return `text` with its ``//`` comment lines emptied, so that line numbers stay."""
    # Emptied and not removed: errors of the parser name lines of the file.
    return "\n".join("" if line.lstrip().startswith("//") else line for line in text.split("\n"))


def _object(spec: Any, path: str, remarks: Mapping[str, str], depth: int) -> Iterator[str]:
    inner = " " * _INDENT * (depth + 1)
    yield "{"
    spec_type: Any = type(spec)
    kind = getattr(spec_type, "kind", None)
    hints, entries = hints_of(spec_type), documentation_of(spec_type)
    fields = dataclasses.fields(spec)
    if kind is not None:
        yield from _comment(summary_of(spec_type), inner)
        yield f'{inner}"kind": {json.dumps(kind)}{"," if fields else ""}'
    for position, field in enumerate(fields):
        place = f"{path}.{field.name}" if path else field.name
        value = getattr(spec, field.name)
        for text in (_as_json(entries.get(field.name, "")), _choices(hints[field.name]), remarks.get(place, "")):
            yield from _comment(text, inner)
        lines = list(_value(value, place, remarks, depth + 1))
        lines[0] = f"{inner}{json.dumps(field.name)}: {lines[0]}"
        # JSON has no comma after the last field, and comments stand before a field, never after it.
        lines[-1] += "," if position < len(fields) - 1 else ""
        yield from lines
    yield " " * _INDENT * depth + "}"


def _value(value: Any, path: str, remarks: Mapping[str, str], depth: int) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        yield from _object(value, path, remarks, depth)
        return
    data = to_data(value)
    text = json.dumps(data, allow_nan=False)
    # A list on one line where it fits: one item a line would make layers and columns fill the page.
    if len(text) > _WIDTH:
        text = json.dumps(data, allow_nan=False, indent=_INDENT)
    first, *others = text.split("\n")
    yield first
    yield from (" " * _INDENT * depth + line for line in others)


def _comment(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [f"{indent}// {line}" for line in lines]


def _choices(hint: Any) -> str:
    """Return the words, or the kinds, that a field of this type accepts."""
    words = [json.dumps(word) for word in words_of(hint)]
    kinds = [json.dumps(kind) for kind in kinds_of(hint)]
    if not words and not kinds:
        return ""
    listed = [*words, *kinds, *(["null"] if type(None) in members(hint) else [])]
    return f"{'Kinds' if kinds else 'One of'}: {', '.join(listed)}."


def _as_json(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text)


def load_run(path: Path | str) -> RunSpec:
    """Read a `RunSpec` from a JSON file, in which lines that begin with ``//`` are comments.

    A relative ``data``, ``init_from`` or ``model.file`` path counts from the folder that holds the file, so that a
    configuration and its data set move together. The graph that ``model.file`` names is read, so that the run has it
    whatever becomes of that file.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: Broken JSON (line and column), or an unknown, missing or mistyped field (JSON path).
    """
    path = Path(path)
    # First without its folder, so that errors quote what the file has.
    run = from_data(RunSpec, _parse(path, "a run description"), where=f"{path}: $")
    folder = path.parent.absolute()
    init_from = None if run.init_from is None else os.path.normpath(folder / run.init_from)
    run = dataclasses.replace(run, data=os.path.normpath(folder / run.data), init_from=init_from)
    return with_graph(run, folder)


def load_served_tables(path: Path | str) -> ServedTablesSpec:
    """Read where the rows of served tables are from a JSON file, in which lines that begin with ``//`` are comments.

    The relative path of a tier counts from the folder that holds the file.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: Broken JSON (line and column), or an unknown, missing or mistyped field (JSON path).
    """
    path = Path(path)
    spec = from_data(ServedTablesSpec, _parse(path, "a description of tiers"), where=f"{path}: $")
    folder = path.parent.absolute()
    tiers = [
        dataclasses.replace(tier, path=os.path.normpath(folder / tier.path))
        if isinstance(tier, RowFileSpec | RocksDBSpec)
        else tier
        for tier in spec.tiers
    ]
    return dataclasses.replace(spec, tiers=tuple(tiers))


def load_recommendations(path: Path | str) -> RecommendationSpec:
    """Read what a server recommends from a JSON file, in which lines that begin with ``//`` are comments.

    Relative paths in it count from the folder that holds the file.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: Broken JSON (line and column), or an unknown, missing or mistyped field (JSON path).
    """
    path = Path(path)
    spec = from_data(RecommendationSpec, _parse(path, "a description of recommendations"), where=f"{path}: $")
    folder = path.parent.absolute()
    index_dir = None if spec.index_dir is None else os.path.normpath(folder / spec.index_dir)
    return dataclasses.replace(spec, items=os.path.normpath(folder / spec.items), index_dir=index_dir)


def load_update_stream(source: Path | str, client_file: Path | None = None) -> UpdateStreamSpec:
    """Return where updates are published.

    Args:
        source: ``kafka://HOST:PORT/TOPIC``, ``redis://HOST:PORT/STREAM``, or a JSON file, in which lines that begin
            with ``//`` are comments.
        client_file: File of the client's settings for Kafka, in place of one that the source names.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: Another URL, broken JSON (line and column), an unknown, missing or mistyped field (JSON path), or
            settings of a client for Kafka and another stream.
    """
    spec = _update_stream(source)
    if client_file is None:
        return spec
    if not isinstance(spec, KafkaTopicSpec):
        raise ConfigError("client_file", f"got {str(client_file)!r} for a stream of Redis, expected a topic of Kafka")
    return dataclasses.replace(spec, client_file=str(client_file))


def _update_stream(source: Path | str) -> UpdateStreamSpec:
    scheme, separator, rest = str(source).partition("://")
    address, _, name = rest.partition("/")
    try:
        if separator and scheme == "kafka":
            return KafkaTopicSpec(brokers=address, topic=name)
        if separator and scheme == "redis":
            return RedisStreamSpec(server=RedisSpec(address=address), stream=name)
    except FieldError as error:
        raise ConfigError(str(source), f"{error.field}: {error.problem}") from None
    if separator:
        raise ConfigError(str(source), "is not a stream, expected kafka://HOST:PORT/TOPIC or redis://HOST:PORT/STREAM")
    path = Path(source)
    data, where = _parse(path, "a description of a stream"), f"{path}: $"
    # Not as a union, in which the kind is required: streams of Redis are described without it as well.
    if isinstance(data, dict) and data.get("kind") == KafkaTopicSpec.kind:
        return from_data(KafkaTopicSpec, data, where=where)
    return from_data(RedisStreamSpec, data, where=where)


def with_graph(run: RunSpec, folder: Path) -> RunSpec:
    """Return `run` with the graph that ``model.file`` names in its place; relative paths count from `folder`.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: It holds no graph.
    """
    model = run.model
    if not isinstance(model, GraphModelSpec) or model.file is None:
        return run
    return dataclasses.replace(run, model=GraphModelSpec(graph=read_graph(folder / model.file)))


def read_graph(path: Path | str) -> GraphSpec:
    """Read a `GraphSpec` from a JSON file.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: Broken JSON (line and column), or an unknown, missing or mistyped field (JSON path).
    """
    path = Path(path)
    return from_data(GraphSpec, _parse(path, "a graph"), where=f"{path}: $")


def save_run(run: RunSpec, path: Path | str) -> None:
    """Write `run` atomically as indented JSON.

    Raises:
        DataNotFoundError: No such folder.
        StorageError: The disk is full.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise DataNotFoundError(path.parent, f"no such directory, expected one for {path.name}")
    # Without comments: this file records a run, and people edit another one.
    write_json(path, to_data(run))


def _parse(path: Path, what: str) -> Any:
    try:
        text = without_comments(read_bytes(path).decode())
        data = parse_json(text, object_pairs_hook=_distinct_fields)
    except DataNotFoundError:
        raise DataNotFoundError(path, f"no such file, expected {what} in JSON") from None
    except FormatError as error:
        raise ConfigError(path, f"{error.problem} of {what} in JSON") from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, f"byte {error.start} is not UTF-8, expected {what} in JSON") from None
    except json.JSONDecodeError as error:
        raise ConfigError(path, f"line {error.lineno} column {error.colno}", f"{error.msg}, expected JSON") from None
    except ValueError as error:
        raise ConfigError(path, f"{error}, expected {what} in JSON") from None
    repeated = _find_repeated(data)
    if repeated is not None:
        raise ConfigError(path, f"{repeated}: the field occurs twice, expected it once")
    return data


@dataclass(frozen=True)
class _RepeatedField:
    """Object that names a field twice; `json` alone would silently keep the last one."""

    name: str


def _distinct_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _RepeatedField:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            return _RepeatedField(name)
        fields[name] = value
    return fields


def _find_repeated(data: Any) -> str | None:
    """Return the path of the first field that occurs twice in `data`; `json` reports no paths."""
    waiting = [("$", data)]  # not the calls of a function, which are fewer than the levels that `json` reads
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, _RepeatedField):
            return f"{where}.{value.name}"
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            inner = [(f"{where}.{name}", inner_value) for name, inner_value in value.items()]
        elif isinstance(value, list):
            inner = [(f"{where}[{index}]", inner_value) for index, inner_value in enumerate(value)]
        # The last one is taken first: so the first repeated field of the text is reported.
        waiting += reversed(inner)
    return None
