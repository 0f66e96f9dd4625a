"""A spec as JSON with a comment for every field, taken from the specs' docstrings."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from terarec.spec import to_data
from terarec.spec.fields import documentation_of, hints_of, kinds_of, members, summary_of, words_of

_INDENT, _WIDTH = 2, 100


def commented_json(spec: object, remarks: Mapping[str, str] | None = None) -> str:
    """Return `spec` as JSON with all its fields, those that are None included, and whole lines of ``//`` comments.

    A field's comment is its entry in the docstring of its class, the words that it takes, and its remark.

    Args:
        spec: A dataclass of `terarec.spec`.
        remarks: Dotted path of a field -> text behind its comment.
    """
    return "\n".join(_object(spec, "", remarks or {}, 0)) + "\n"


def without_comments(text: str) -> str:
    """Return `text` with empty lines in the place of those that hold a ``//`` comment only, so that numbers stay."""
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
        lines[-1] += "," if position < len(fields) - 1 else ""
        yield from lines
    yield " " * _INDENT * depth + "}"


def _value(value: Any, path: str, remarks: Mapping[str, str], depth: int) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        yield from _object(value, path, remarks, depth)
        return
    data = to_data(value)
    text = json.dumps(data, allow_nan=False)
    if len(text) > _WIDTH:
        text = json.dumps(data, allow_nan=False, indent=_INDENT)
    first, *others = text.split("\n")
    yield first
    yield from (" " * _INDENT * depth + line for line in others)


def _comment(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [f"{indent}// {line}" for line in lines]


def _choices(hint: Any) -> str:
    """The words, or the kinds, that a field of this type takes."""
    words = [json.dumps(word) for word in words_of(hint)]
    kinds = [json.dumps(kind) for kind in kinds_of(hint)]
    if not words and not kinds:
        return ""
    listed = [*words, *kinds, *(["null"] if type(None) in members(hint) else [])]
    return f"{'Kinds' if kinds else 'One of'}: {', '.join(listed)}."


def _as_json(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text)
